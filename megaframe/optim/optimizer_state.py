"""Moments: what a rule remembers of each element of a flat span, in whatever type and memory.

They are handed out a chunk at a time in master precision, with the weights of the chunk, and are
stored back after the change. Reduced types and host memory therefore never need room for all of
them at once, and no rule knows about either.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from megaframe.architecture.optimizer_state import OFFLOAD_CHUNK, UPDATE_CHUNK
from megaframe.optim.element_ids import compute_positions
from megaframe.optim.state_dtype import BLOCK, MasterCodec, StateCodec, compute_rounding_draws
from megaframe.optim.state_offload import NO_OFFLOAD, StateOffload, StateParts
from megaframe.optim.update_rule import UpdateStep

_CHUNK = BLOCK << 10
"""Elements at a time: 1 MiB of each tensor, which caches hold and beside which the calls of a chunk
take little time (benchmarks/cpu/cache_constants.py). `UPDATE_CHUNK` keeps a GPU busy, and
`OFFLOAD_CHUNK` is for what is copied to one."""
_LARGEST_NUMBER = 1 << 30
"""Numbers of draws start again after so many, because they are multiplied in 64 bits."""
_WEIGHTS = "weights"
"""Name under which weights travel with moments; no moment has it."""


@dataclass(frozen=True)
class MomentStorage:
    """How moments are stored.

    Attributes:
        signed: Codec of averages of values.
        square: Codec of averages of squares.
        offload: Where they are; weights are there too if the device computes with a rounded copy
            of them.
        element_ids: Returns the ids of a span's elements on a device, by which the rounding of
            reduced types is drawn.
    """

    signed: StateCodec
    square: StateCodec
    offload: StateOffload = NO_OFFLOAD
    element_ids: Callable[[slice, torch.device], Tensor] = compute_positions


class Moments:
    """Moments of `weights` by name, zero at first."""

    def __init__(
        self, weights: Tensor, codecs: Mapping[str, StateCodec], storage: MomentStorage
    ) -> None:
        """Allocate the moments.

        Args:
            weights: The weights that they belong to, flat; gives length, master type and device.
            codecs: How each moment is stored, by its name.
            storage: Where they are stored.
        """
        self._element_ids, offload = storage.element_ids, storage.offload
        self._length, self._dtype = len(weights), weights.dtype
        self._codecs, self._offload = dict(codecs), offload
        # Where codecs decode and encode; the moments themselves are in `home`.
        self._device = offload.device or weights.device
        home = weights.device if offload.device is None else torch.device("cpu")
        self._stored = {
            name: offload.store(codec.make(self._length, self._dtype, home))
            for name, codec in codecs.items()
        }
        self._in_place = offload.device is None and all(codec.exact for codec in codecs.values())
        """Whether moments are changed where they are stored."""
        self._written: torch.cuda.Event | None = None
        self._to_load: dict[str, Tensor] = {}

    @property
    def tensors(self) -> dict[str, Tensor]:
        """All tensors, as they are stored in memory."""
        return {
            name if index == 0 else f"{name}.scale": tensor
            for name, tensors in self._stored.items()
            for index, tensor in enumerate(tensors)
        }

    def export(self, *, to_load: bool) -> dict[str, Tensor]:
        """Return the values of each moment.

        Args:
            to_load: `load` is to take back the values after they were changed.

        Returns:
            By name, the tensor that stores the moment or, for a codec in blocks, a copy in host
            memory.
        """
        # The host reads these tensors, so nothing may still be on its way back.
        self._offload.synchronize()
        exported = {}
        for name, codec in self._codecs.items():
            stored = self._stored[name]
            if len(stored) == 1:
                exported[name] = stored[0]
                continue
            values = exported[name] = torch.empty(self._length, dtype=torch.float32)
            for span in self._list_spans():
                values[span] = codec.decode(
                    codec.select_span(stored, span), _count(span), torch.float32
                )
            if to_load:
                self._to_load[name] = values
        return exported

    def load(self) -> None:
        """Take back the copies that were exported, rounded to nearest."""
        for name, values in self._to_load.items():
            codec = self._codecs[name]
            for span in self._list_spans():
                # Nearest packs values of the same blocks into the same bytes again, without loss.
                nearest = torch.full((_count(span),), 0.5)
                _copy(
                    codec.encode(values[span], nearest), codec.select_span(self._stored[name], span)
                )
        self._to_load = {}

    def iterate_chunks(
        self, weights: Tensor, step: UpdateStep, mixed: bool = False, *, single_span: bool = False
    ) -> Iterable[tuple[slice, Tensor, Mapping[str, Tensor]]]:
        """Return spans, each with its weights and moments, which may be changed in place until the
        next span is asked for.

        Args:
            weights: All weights, flat.
            step: The numbers of the update; in a skipped step reduced types stay unchanged.
            mixed: The device computes with a rounded copy of the weights, which themselves are
                stored where the moments are.
            single_span: Return a single span, if everything is changed in place.
        """
        self._to_load = {}
        if not self._in_place:
            return self._bring_chunks(weights, step, mixed)
        if single_span:
            return ((slice(0, self._length), weights, self._whole),)
        return ((span, weights[span], self._select(span)) for span in self._list_spans())

    @cached_property
    def _whole(self) -> Mapping[str, Tensor]:
        """All moments, in place."""
        return self._select(slice(0, self._length))

    def _select(self, span: slice) -> Mapping[str, Tensor]:
        """Return moments that are changed in place."""
        return {
            name: codec.decode(
                codec.select_span(self._stored[name], span), _count(span), self._dtype
            )
            for name, codec in self._codecs.items()
        }

    def _bring_chunks(
        self, weights: Tensor, step: UpdateStep, mixed: bool
    ) -> Iterator[tuple[slice, Tensor, dict[str, Tensor]]]:
        """Yield chunks that are decoded or copied to the device, and stored again after that."""
        codecs, stored = dict(self._codecs), dict(self._stored)
        if self._offload.device is not None and mixed:
            # Weights travel as one more exact moment of the chunk, so they need no transfer of
            # their own.
            codecs[_WEIGHTS], stored[_WEIGHTS] = MasterCodec(), (weights,)
        spans = list(self._list_spans())
        homes = [
            {n: codec.select_span(stored[n], span) for n, codec in codecs.items()} for span in spans
        ]
        # A fetch of this update must come after the last write of the previous one.
        written = self._written
        next_chunk = self._offload.fetch(homes[0], written)
        for number, (span, home) in enumerate(zip(spans, homes, strict=True)):
            # Before the next fetch starts: the wait must cover this chunk only.
            self._offload.wait_for_fetched()
            chunk = next_chunk
            if number + 1 < len(spans):
                next_chunk = self._offload.fetch(homes[number + 1], written)
            # For an exact codec these are the stored or staged tensors themselves; else copies.
            moments = {
                name: codec.decode(chunk.parts[name], _count(span), self._dtype)
                for name, codec in codecs.items()
            }
            own_weights = moments.pop(_WEIGHTS) if _WEIGHTS in moments else weights[span]
            yield span, own_weights, moments
            # Runs when the caller asks for the next span, hence after it has changed this one.
            self._encode(span, chunk.parts, moments, step)
            self._written = self._offload.write_back(chunk, home)

    def _encode(
        self, span: slice, parts: StateParts, moments: Mapping[str, Tensor], step: UpdateStep
    ) -> None:
        """Store what was changed in a copy, because its codec is not exact."""
        lossy = {name: codec for name, codec in self._codecs.items() if not codec.exact}
        if not lossy:
            return
        elements = self._element_ids(span, self._device)
        for index, (name, codec) in enumerate(lossy.items()):
            # Each moment has draws of its own in each step.
            number = (step.number * len(lossy) + index) % _LARGEST_NUMBER
            encoded = codec.encode(moments[name], compute_rounding_draws(elements, number))
            for old, new in zip(parts[name], encoded, strict=True):
                # Stochastic rounding again would change what a skipped step must keep.
                old.copy_(torch.where(step.skip.bool(), old, new))

    def _list_spans(self) -> Iterator[slice]:
        size = UPDATE_CHUNK if self._offload.device is None else OFFLOAD_CHUNK
        if self._device.type == "cpu":
            size = _CHUNK
        for start in range(0, max(1, self._length), size):
            yield slice(start, min(start + size, self._length))


def _copy(sources: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
    for source, target in zip(sources, targets, strict=True):
        target.copy_(source)


def _count(span: slice) -> int:
    return span.stop - span.start
