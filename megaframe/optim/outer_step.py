"""The outer step of islands: from their differences of weights to new synchronised weights.

`OuterStep` is what an island needs of it, whoever does it: push the differences of a fragment, go
on training, pull the weights. `GroupOuterStep` does it without a server: process groups sum the
differences, and every island applies the same outer optimizer to the same sum. With a server each
island is a run of its own (`parameter_server/server_outer_step.py`)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from megaframe.architecture.spec import Box, ParamSpec
from megaframe.config.sync import SyncConfig
from megaframe.data_parallel.buffers import BufferPool
from megaframe.data_parallel.compression import DEFAULT_SHARE, PlainCodec, make_codec
from megaframe.data_parallel.gradient_reducer import (
    CompressedReducer,
    Transfers,
    compute_part_length,
)
from megaframe.distributed.collectives import Group, Pending


@dataclass(frozen=True)
class SpanShape:
    """A flat span of weights that travels as one message.

    Attributes:
        length: Its elements.
        dtype: Their type.
        compressed: Whether it may be compressed.
        boxes: What it consists of, in order: for each the parameter and the place in it.
    """

    length: int
    dtype: torch.dtype
    compressed: bool
    boxes: tuple[tuple[ParamSpec, Box], ...] = ()


class OuterStep(Protocol):
    """Turns differences into weights. Spans are numbered in one order over all fragments, and those
    of a fragment are given together, by number."""

    def join(self, clock: int, synced: Mapping[int, Tensor], *, fresh: bool) -> int:
        """Begin to train with the other islands.

        Args:
            clock: How often this island has pushed.
            synced: All spans, each the last synchronised weights [length]; replaced where this
                island must go on from those of the others.
            fresh: Whether it has not trained yet.

        Returns:
            How often an island has pushed that goes on from `synced`: more than `clock` if the
            others have gone on without it.
        """
        ...

    def end_step(self) -> None:
        """Take in that this island has trained a step, and go on with what travels."""
        ...

    def push(self, differences: Mapping[int, Tensor]) -> None:
        """Start to send what the last synchronised weights are more than this island's, [length];
        the tensors belong to the outer step until `pull`."""
        ...

    def advance(self, spans: Iterable[int]) -> None:
        """Do what is to be done in the middle of the time that spans may travel."""
        ...

    def pull(self, synced: Mapping[int, Tensor]) -> None:
        """Return when each of `synced` [length], the last synchronised weights, has been replaced
        by the new ones."""
        ...

    def finish(self, synced: Mapping[int, Tensor], weights: Mapping[int, Tensor]) -> None:
        """Replace all spans of `synced` by what the run ends with, given the last synchronised and
        this island's weights [length]; may change both."""
        ...

    def leave(self) -> None:
        """Let the other islands go on without this one, which has nothing left to train."""
        ...

    def abandon(self) -> None:
        """Forget what has been pushed and not pulled."""
        ...

    def list_state(self, span: int) -> Iterator[tuple[str, Tensor]]:
        """Yield what the next synchronisation of a span depends on, by kind, each as long as the
        span. Only `unsent`, which messages have left out so far, differs between islands."""
        ...


def take_outer_step(
    sync: SyncConfig,
    weights: Tensor,
    gradient: Tensor,
    momentum: Tensor | None,
    early: Tensor | None = None,
) -> None:
    """Apply the outer optimizer to synchronised weights.

    Products and sums are rounded one by one. Where both are one operation, a processor may round
    the ends of a vector otherwise, and process groups and servers cut vectors at other places.

    Args:
        sync: The outer optimizer.
        weights: Changed.
        gradient: Mean difference of the islands; changed.
        momentum: Changed; None for a step without momentum.
        early: Differences that were applied before without momentum and count in it now.
    """
    if momentum is not None:
        momentum.mul_(sync.outer_momentum).add_(gradient)
        if early is not None:
            momentum.add_(early)
        if sync.optimizer == "nesterov":
            gradient.add_(momentum * sync.outer_momentum)
        else:
            gradient = momentum if early is None else momentum - early
    weights.sub_(gradient * sync.outer_lr)


class GroupOuterStep:
    """Sums over process groups: bulk-synchronous, so all islands have the same synchronised
    weights.

    Parts are summed by their owners in the order of ranks, so copies of a weight on ranks of other
    groups of islands get the same bits.

    Args:
        sync: The outer optimizer, and how differences travel.
        group: This rank's counterparts on all islands.
        spans: All spans of this rank.
        buffers: Lends memory that stays.
    """

    def __init__(
        self, sync: SyncConfig, group: Group, spans: Sequence[SpanShape], buffers: BufferPool
    ) -> None:
        self._sync, self._group, self._spans = sync, group, spans
        self._reducers = [_make_reducer(sync, group, span, buffers) for span in spans]
        self._momentum = [
            buffers.borrow(span.length, span.dtype).zero_() for span in spans if sync.outer_momentum
        ]
        self._in_flight: dict[int, _Flight] = {}

    def join(self, clock: int, synced: Mapping[int, Tensor], *, fresh: bool) -> int:
        return clock

    def end_step(self) -> None: ...

    def push(self, differences: Mapping[int, Tensor]) -> None:
        for span, difference in differences.items():
            self._in_flight[span] = _Flight(difference, self._reducers[span].sum(difference))

    def advance(self, spans: Iterable[int]) -> None:
        # The sums of the parts have had half of the time; the way back has the other half.
        for span in spans:
            self._in_flight[span].advance()

    def pull(self, synced: Mapping[int, Tensor]) -> None:
        for span, flat in synced.items():
            gradient = self._in_flight.pop(span).finish().div_(self._group.size)
            momentum = self._momentum[span] if self._momentum else None
            take_outer_step(self._sync, flat, gradient, momentum)

    def finish(self, synced: Mapping[int, Tensor], weights: Mapping[int, Tensor]) -> None:
        reducer = CompressedReducer(self._group, PlainCodec())
        for span, flat in weights.items():
            total = _Flight(flat, reducer.sum(flat)).finish()
            synced[span].copy_(total.div_(self._group.size))

    def leave(self) -> None: ...

    def abandon(self) -> None:
        for flight in self._in_flight.values():
            flight.finish()
        self._in_flight.clear()

    def list_state(self, span: int) -> Iterator[tuple[str, Tensor]]:
        if self._momentum:
            yield "momentum", self._momentum[span]
        residual = self._reducers[span].residual
        if residual is not None:
            yield "unsent", residual[: self._spans[span].length]


def _make_reducer(
    sync: SyncConfig, group: Group, span: SpanShape, buffers: BufferPool
) -> CompressedReducer:
    if sync.compress == "none" or not span.compressed:
        return CompressedReducer(group, PlainCodec())
    padded = group.size * compute_part_length(span.length, group.size)
    residual = buffers.borrow(padded, span.dtype).zero_()
    return CompressedReducer(
        group, make_codec(sync.compress, sync.compress_keep or DEFAULT_SHARE), residual
    )


class _Flight:
    """A sum on its way: the transfers that are left, of which one is in flight."""

    def __init__(self, flat: Tensor, transfers: Transfers) -> None:
        self._flat, self._transfers = flat, transfers
        self._pending: Pending[Tensor] | None = next(transfers, None)

    def advance(self) -> None:
        """Wait for the transfer in flight, and start the next one."""
        if self._pending is not None:
            self._pending.wait()
            self._pending = next(self._transfers, None)

    def finish(self) -> Tensor:
        """Return the sum."""
        while self._pending is not None:
            self.advance()
        return self._flat
