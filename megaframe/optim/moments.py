"""Moments: what a rule remembers of each element of a flat span, whatever type keeps it and where.

They are handed out a chunk at a time in master precision, and taken back changed. So neither fewer
bits nor another memory ever needs room for all of them at once, and no rule knows of either.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megaframe.optim.codes import BLOCK, Code, chances
from megaframe.optim.rule import Step

_CHUNK, _GPU_CHUNK = BLOCK << 8, BLOCK << 15
"""Elements at a time: what the cache of a core holds, and what keeps a GPU busy."""
_LARGEST_NUMBER = 1 << 30
"""Numbers of draws, which are multiplied in 64 bits, start again after so many."""


@dataclass(frozen=True)
class Keeping:
    """How moments are kept. signed, square: codes. away: in the host's memory, whatever the device
    of the weights, in copies of their own."""

    signed: Code
    square: Code
    away: bool = False


class Moments:
    """Moments of `weights` by name, zero at first."""

    def __init__(self, weights: Tensor, codes: Mapping[str, Code], *, away: bool) -> None:
        self._length, self._dtype, self._device = len(weights), weights.dtype, weights.device
        self._codes = dict(codes)
        self._route = _route(weights.device) if away else None
        home = torch.device("cpu") if away else weights.device
        made = {name: code.make(self._length, self._dtype, home) for name, code in codes.items()}
        self._kept = made if self._route is None else self._route.at_home(made)
        self._shown: dict[str, Tensor] = {}

    @property
    def tensors(self) -> dict[str, Tensor]:
        """All, as they lie in memory."""
        return {
            name if index == 0 else f"{name}.scale": tensor
            for name, kept in self._kept.items()
            for index, tensor in enumerate(kept)
        }

    def shown(self, *, to_load: bool) -> dict[str, Tensor]:
        """The values of each: the tensor that keeps them, or a copy in the host's memory where
        that is a code in blocks. to_load: `load` is to take back what becomes of the copy."""
        if self._route is not None:
            self._route.settle()
        found = {}
        for name, code in self._codes.items():
            kept = self._kept[name]
            if len(kept) == 1:
                found[name] = kept[0]
                continue
            values = found[name] = torch.empty(self._length, dtype=torch.float32)
            for span in self._spans():
                values[span] = code.decode(code.part(kept, span), _size(span), torch.float32)
            if to_load:
                self._shown[name] = values
        return found

    def load(self) -> None:
        """Take back the copies that were shown, rounded to the nearest."""
        for name, values in self._shown.items():
            code = self._codes[name]
            for span in self._spans():
                nearest = torch.full((_size(span),), 0.5)
                encoded = code.encode(values[span], nearest)
                _copy(encoded, code.part(self._kept[name], span))
        self._shown = {}

    def chunks(
        self, step: Step, *, whole: bool = False
    ) -> Iterator[tuple[slice, dict[str, Tensor]]]:
        """Spans, each with its moments, which may be changed in place until the next one is asked
        for. whole: all at once, where moments are changed where they lie."""
        self._shown = {}
        in_place = self._route is None and all(code.exact for code in self._codes.values())
        spans = [slice(0, self._length)] if whole and in_place else list(self._spans())
        coming = self._fetch(spans[0])
        for span, following in zip(spans, [*spans[1:], None], strict=True):
            if self._route is not None:
                self._route.arrive(coming)
            here = coming
            if following is not None:
                coming = self._fetch(following)
            moments = {
                name: code.decode(here[name], _size(span), self._dtype)
                for name, code in self._codes.items()
            }
            yield span, moments
            if not in_place:
                self._put_back(span, here, moments, step)

    def _fetch(self, span: slice) -> dict[str, tuple[Tensor, ...]]:
        parts = {name: code.part(self._kept[name], span) for name, code in self._codes.items()}
        return parts if self._route is None else self._route.fetch(parts)

    def _put_back(
        self,
        span: slice,
        before: Mapping[str, tuple[Tensor, ...]],
        moments: Mapping[str, Tensor],
        step: Step,
    ) -> None:
        count = len(self._codes)
        for index, (name, code) in enumerate(self._codes.items()):
            encoded: Sequence[Tensor] = (moments[name],)
            if not code.exact:
                number = (step.number * count + index) % _LARGEST_NUMBER
                chance = chances(span, number, self._device)
                changed = code.encode(moments[name], chance)
                skip = step.skip.bool()
                pairs = zip(before[name], changed, strict=True)
                encoded = [torch.where(skip, old, new) for old, new in pairs]
            home = code.part(self._kept[name], span)
            if self._route is None:
                _copy(encoded, home)
            else:
                self._route.put_back(encoded, home)

    def _spans(self) -> Iterator[slice]:
        size = _CHUNK if self._device.type == "cpu" else _GPU_CHUNK
        for start in range(0, max(1, self._length), size):
            yield slice(start, min(start + size, self._length))


class _Route:
    """Between host memory and the device of the weights, where both are the same."""

    def at_home(self, kept: dict[str, tuple[Tensor, ...]]) -> dict[str, tuple[Tensor, ...]]:
        """`kept` in memory from which copies are fast."""
        return kept

    def fetch(self, parts: Mapping[str, tuple[Tensor, ...]]) -> dict[str, tuple[Tensor, ...]]:
        """Start copying to the device."""
        return {name: tuple(one.clone() for one in part) for name, part in parts.items()}

    def arrive(self, parts: Mapping[str, tuple[Tensor, ...]]) -> None:
        """What is computed from now on may use what was fetched so far."""

    def put_back(self, changed: Sequence[Tensor], home: Sequence[Tensor]) -> None:
        """Start copying back what has been computed so far."""
        _copy(changed, home)

    def settle(self) -> None:
        """Return when everything has been put back."""


class _GpuRoute(_Route):
    """To a GPU: copies in either direction run beside the computation, each in a stream."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._inward, self._outward = torch.cuda.Stream(device), torch.cuda.Stream(device)

    def at_home(self, kept: dict[str, tuple[Tensor, ...]]) -> dict[str, tuple[Tensor, ...]]:
        return {name: tuple(one.pin_memory() for one in part) for name, part in kept.items()}

    def fetch(self, parts: Mapping[str, tuple[Tensor, ...]]) -> dict[str, tuple[Tensor, ...]]:
        self._inward.wait_stream(self._outward)  # what the step before has changed is back
        with torch.cuda.stream(self._inward):
            return {
                name: tuple(one.to(self._device, non_blocking=True) for one in part)
                for name, part in parts.items()
            }

    def arrive(self, parts: Mapping[str, tuple[Tensor, ...]]) -> None:
        here = torch.cuda.current_stream(self._device)
        here.wait_stream(self._inward)
        for part in parts.values():
            for one in part:
                one.record_stream(here)

    def put_back(self, changed: Sequence[Tensor], home: Sequence[Tensor]) -> None:
        self._outward.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._outward):
            for source, target in zip(changed, home, strict=True):
                target.copy_(source, non_blocking=True)
                source.record_stream(self._outward)

    def settle(self) -> None:
        self._outward.synchronize()


def _route(device: torch.device) -> _Route:
    return _GpuRoute(device) if device.type == "cuda" else _Route()


def _copy(sources: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
    for source, target in zip(sources, targets, strict=True):
        target.copy_(source)


def _size(span: slice) -> int:
    return span.stop - span.start
