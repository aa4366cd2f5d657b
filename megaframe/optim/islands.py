"""Islands: data ranks that sum gradients among themselves only, and now and then synchronise their
weights with those of other islands (DiLoCo, Douillard et al. 2023; in fragments that travel while
the next steps run, Streaming DiLoCo, Douillard et al. 2025).

An island knows the last synchronised weights. After `sync.every` steps it pushes how far its own
have come from there, and `sync.delay` steps later it pulls what the outer optimizer has made of all
islands' differences. Which weights are synchronised when depends on their names alone, so an island
trains alike under any layout."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor

from megaframe.architecture.spec import Box, ParamSpec
from megaframe.config.sync import SyncConfig
from megaframe.data_parallel.bucket import Bucket
from megaframe.data_parallel.bucket_layout import VECTORS
from megaframe.data_parallel.sharded_parameters import ShardedParameters
from megaframe.optim.optimizer import Optimizer
from megaframe.optim.outer_step import OuterStep, SpanShape

OUTER_PREFIX, UNSENT_PREFIX = "optimizer.outer.", "optimizer.unsent/"
"""Prefixes of the names of outer state in a checkpoint: of all islands, and of this one."""


@dataclass(frozen=True)
class _Piece:
    """A box of a parameter in this rank's own weights."""

    bucket: Bucket
    spec: ParamSpec
    box: Box
    weights: Tensor


class _Span:
    """Pieces of weights that travel as one message.

    Attributes:
        fragment: When they travel.
        synced: The last synchronised weights, flat.
    """

    def __init__(self, fragment: int, pieces: Sequence[_Piece], synced: Tensor) -> None:
        self.fragment, self._pieces, self.synced = fragment, pieces, synced

    def read(self) -> Tensor:
        """Return a flat copy of the weights."""
        flat = torch.empty_like(self.synced)
        for piece, part in self.split(flat):
            part.copy_(piece.weights)
        return flat

    def write(self, flat: Tensor) -> None:
        """Set the weights."""
        for piece, part in self.split(flat):
            piece.weights.copy_(part)

    def split(self, flat: Tensor) -> Iterator[tuple[_Piece, Tensor]]:
        """Yield the pieces, each with its part of a flat tensor in its shape."""
        parts = flat.split([piece.box.size for piece in self._pieces])
        for piece, part in zip(self._pieces, parts, strict=True):
            yield piece, part.view(piece.box.shape)


class IslandSync:
    """Synchronises this rank's own weights with those of its counterparts on other islands.

    Args:
        sync: When and how.
        steps: Steps of the whole run.
        parameters: The buckets of the weights.
        optimizer: Updates them.
        make_outer_step: Returns who makes new weights of these spans.

    Attributes:
        unmixed: The fragments that have been pushed and not mixed into the weights yet.
    """

    def __init__(
        self,
        sync: SyncConfig,
        steps: int,
        parameters: ShardedParameters,
        optimizer: Optimizer,
        make_outer_step: Callable[[Sequence[SpanShape]], OuterStep],
    ) -> None:
        self._sync, self._steps = sync, steps
        self._parameters, self._optimizer = parameters, optimizer
        self.unmixed: set[int] = set()
        self._is_fresh = False
        self._traveling: set[int] = set()
        self._spans: list[_Span] = []
        shapes = []
        for (fragment, compressed), pieces in _divide_pieces(parameters.trained, sync.fragments):
            length, dtype = sum(piece.box.size for piece in pieces), pieces[0].weights.dtype
            synced = parameters.buffers.borrow(length, dtype)
            self._spans.append(_Span(fragment, pieces, synced))
            boxes = tuple((piece.spec, piece.box) for piece in pieces)
            shapes.append(SpanShape(length, dtype, compressed, boxes))
        self._outer = make_outer_step(shapes)

    def begin(self) -> None:
        """Begin with the weights as they are, the same on all islands."""
        self._optimizer.synchronize_state()
        for span in self._spans:
            span.synced.copy_(span.read())
        self._is_fresh = True

    def join(self, step: int) -> int:
        """Begin to train with the other islands, or go on with them.

        Args:
            step: Number of steps done.

        Returns:
            The step to go on from: another one if the others have gone on without this island,
            whose weights are then theirs.
        """
        self._optimizer.synchronize_state()
        clock, synced = step // self._sync.every, self._map_synced()
        joined = self._outer.join(clock, synced, fresh=self._is_fresh)
        if self._is_fresh or joined != clock:
            everything = range(self._sync.fragments)
            self._write(everything, [(span, span.synced) for span in self._spans])
        self._is_fresh = False
        if joined != clock:
            self.unmixed.clear()
            step = min(joined * self._sync.every, self._steps)
        if step == self._steps:
            self._outer.leave()
        return step

    def end_step(self, step: int) -> None:
        """Push the fragments that are due after a step, and pull those that have arrived.

        Args:
            step: Number of steps done.
        """
        delay = self._sync.delay
        self._outer.end_step()
        for fragment in range(self._sync.fragments):
            age = count_steps_since_push(self._sync, fragment, step)
            if age == 0:
                self._push(fragment)
            if fragment in self._traveling and age == (delay + 1) // 2:
                self._outer.advance(self._list_spans(fragment))
            if fragment in self.unmixed and age == delay:
                self._mix(fragment)
        if step == self._steps:
            self._finish()

    def settle(self) -> None:
        """Pull everything that travels, so that what a checkpoint holds does not depend on what is
        on its way. It is mixed into the weights no earlier than otherwise."""
        for fragment in sorted(self._traveling):
            self._pull(fragment)

    def _push(self, fragment: int) -> None:
        self._optimizer.synchronize_state()
        spans = ((number, self._spans[number]) for number in self._list_spans(fragment))
        self._outer.push({number: span.synced - span.read() for number, span in spans})
        self._traveling.add(fragment)
        self.unmixed.add(fragment)

    def _pull(self, fragment: int) -> None:
        self._outer.pull({n: self._spans[n].synced for n in self._list_spans(fragment)})
        self._traveling.remove(fragment)

    def _mix(self, fragment: int) -> None:
        if fragment in self._traveling:
            self._pull(fragment)
        self.unmixed.remove(fragment)
        kept = self._sync.kept_share
        self._optimizer.synchronize_state()
        spans = [self._spans[number] for number in self._list_spans(fragment)]
        self._write({fragment}, [(s, s.synced.lerp(s.read(), kept)) for s in spans])

    def _finish(self) -> None:
        """End the run with weights that are the same on all islands: their mean. After a
        synchronisation at the same step nothing changes. (A server without rounds that all islands
        end has no such mean.)"""
        for fragment in sorted(self.unmixed):
            self._mix(fragment)
        self._optimizer.synchronize_state()
        weights = {number: span.read() for number, span in enumerate(self._spans)}
        self._outer.finish(self._map_synced(), weights)
        everything = range(self._sync.fragments)
        self._write(everything, [(span, span.synced) for span in self._spans])

    def _write(self, fragments: Collection[int], weights: Sequence[tuple[_Span, Tensor]]) -> None:
        """Set the weights of all spans of these fragments, and bring them to where the model
        computes."""
        # At ZeRO stage 3 the values here are rounded from the old weights.
        self._parameters.release_blocks()
        buckets = self._list_buckets(fragments)
        for bucket in buckets:
            bucket.wait_for_gather()  # it sends the weights that are about to change
        for span, flat in weights:
            span.write(flat)
        for bucket in buckets:
            bucket.spread_owned_weights()

    def _list_buckets(self, fragments: Collection[int]) -> list[Bucket]:
        """Return the buckets with parameters of these fragments, also if this rank's own part of
        one has none: other ranks wait for it."""
        return [
            bucket
            for bucket in self._parameters.trained
            if any(
                find_fragment(p.spec.name, self._sync.fragments) in fragments
                for p in bucket.parameters
            )
        ]

    def _map_synced(self) -> dict[int, Tensor]:
        return {number: span.synced for number, span in enumerate(self._spans)}

    def _list_spans(self, fragment: int) -> Iterator[int]:
        return (number for number, span in enumerate(self._spans) if span.fragment == fragment)

    # Checkpoints.

    def list_tensors(self, *, owned: bool) -> Iterator[tuple[str, ParamSpec, Box, Tensor]]:
        """Yield the outer state of this rank's own weights as `Optimizer.list_tensors` yields
        theirs: the last synchronised weights under the names of the weights, and other state under
        names with `OUTER_PREFIX`, or with `UNSENT_PREFIX` if it is of this island alone."""
        for number, span in enumerate(self._spans):
            state = {"": span.synced}
            for kind, flat in self._outer.list_state(number):
                state[UNSENT_PREFIX if kind == "unsent" else f"{OUTER_PREFIX}{kind}/"] = flat
            for prefix, flat in state.items():
                for piece, part in span.split(flat):
                    # The other end of a tied table saves it.
                    if not (owned and piece.bucket.replica):
                        yield prefix + piece.spec.name, piece.spec, piece.box, part

    def load(self, unmixed: Sequence[int]) -> None:
        """Continue with outer state that was loaded into the tensors of `list_tensors`.

        Args:
            unmixed: The fragments that are to be mixed into the weights.
        """
        fragments = range(self._sync.fragments)
        self.unmixed = {fragment for fragment in unmixed if fragment in fragments}

    def abandon(self) -> None:
        """Forget what travels, before other state is loaded."""
        self._outer.abandon()
        self._traveling.clear()


def count_steps_since_push(sync: SyncConfig, fragment: int, step: int) -> int | None:
    """Return how many of `step` steps were done after a fragment was last pushed; None if that is
    still to come. Fragments are pushed one after the other within `sync.every` steps."""
    first = (fragment + 1) * sync.every // sync.fragments
    return (step - first) % sync.every if step >= first else None


def find_fragment(name: str, fragments: int) -> int:
    """Return the fragment of a parameter, by its name."""
    unit, _, rest = name.partition(".")
    if unit == "blocks":
        return int(rest.partition(".")[0]) % fragments
    return 0 if unit == "embedding" else fragments - 1


def _divide_pieces(
    buckets: Sequence[Bucket], fragments: int
) -> Iterator[tuple[tuple[int, bool], list[_Piece]]]:
    """Yield the pieces of this rank's own weights that travel together, with their fragment and
    whether they are compressed, in an order that is the same on all islands."""
    pieces = []
    for bucket in buckets:
        for parameter, box, weights in bucket.iterate_pieces(
            bucket.owned_weights, bucket.owned_span
        ):
            spec = parameter.spec
            key = find_fragment(spec.name, fragments), spec.role not in VECTORS
            pieces.append((key, _Piece(bucket, spec, box, weights)))
    pieces.sort(key=lambda each: each[0])  # stable: by bucket within a span
    for key, group in groupby(pieces, key=lambda each: each[0]):
        yield key, [piece for _, piece in group]
