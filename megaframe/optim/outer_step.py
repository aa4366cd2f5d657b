"""The outer step of islands: from their differences of weights to new synchronised weights.

`OuterStep` is what an island needs of it, whoever does it: push the differences of a fragment, go
on training, pull the weights. `GroupOuterStep` does it without a server: process groups sum the
differences, and every island applies the same outer optimizer to the same sum."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

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
    """A flat span of weights that travels as one message. compressed: it may be."""

    length: int
    dtype: torch.dtype
    compressed: bool


class OuterStep(Protocol):
    """Turns differences into weights. Spans are numbered in one order over all fragments."""

    def push(self, span: int, difference: Tensor) -> None:
        """Start to send what the last synchronised weights are more than this island's, [length];
        the tensor belongs to the outer step until `pull`."""
        ...

    def advance(self, span: int) -> None:
        """Do what is to be done in the middle of the time that a span may travel."""
        ...

    def pull(self, span: int, synced: Tensor) -> None:
        """Return when `synced` [length], the last synchronised weights, has been replaced by the
        new ones."""
        ...

    def average(self, span: int, weights: Tensor) -> Tensor:
        """Return the mean of the weights [length] of all islands, uncompressed; may change them."""
        ...

    def abandon(self) -> None:
        """Forget what has been pushed and not pulled."""
        ...

    def list_state(self, span: int) -> Iterator[tuple[str, Tensor]]:
        """Yield what the next synchronisation of a span depends on, by kind, each as long as the
        span. Only `unsent`, which messages have left out so far, differs between islands."""
        ...


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

    def push(self, span: int, difference: Tensor) -> None:
        self._in_flight[span] = _Flight(difference, self._reducers[span].sum(difference))

    def advance(self, span: int) -> None:
        # The sums of the parts have had half of the time; the way back has the other half.
        self._in_flight[span].advance()

    def pull(self, span: int, synced: Tensor) -> None:
        outer_gradient = self._in_flight.pop(span).finish().div_(self._group.size)
        if self._sync.outer_momentum:
            momentum = self._momentum[span].mul_(self._sync.outer_momentum).add_(outer_gradient)
            if self._sync.optimizer == "nesterov":
                outer_gradient.add_(momentum, alpha=self._sync.outer_momentum)
            else:
                outer_gradient = momentum
        synced.sub_(outer_gradient, alpha=self._sync.outer_lr)

    def average(self, span: int, weights: Tensor) -> Tensor:
        reducer = CompressedReducer(self._group, PlainCodec())
        return _Flight(weights, reducer.sum(weights)).finish().div_(self._group.size)

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
