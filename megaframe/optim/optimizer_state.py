"""Moments: what a rule remembers of each element of a flat span, in whatever type and memory.

They are handed out a chunk at a time in master precision, with the weights of the chunk, and are
stored back after the change. Reduced types and host memory therefore never need room for all of
them at once, and no rule knows about either.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megaframe.architecture.optimizer_state import OFFLOAD_CHUNK
from megaframe.optim.element_ids import positions
from megaframe.optim.rule import Step
from megaframe.optim.state_dtype import BLOCK, Code, Master, chances
from megaframe.optim.state_offload import STAYS, Parts, Route

_CHUNK, _GPU_CHUNK = BLOCK << 10, BLOCK << 15
"""Elements at a time: 1 MiB of each tensor, which caches hold and beside which the calls of a chunk
take little time (benchmarks/cpu/cache_constants.py), and what keeps a GPU busy.
`OFFLOAD_CHUNK` is for what is copied to a GPU."""
_LARGEST_NUMBER = 1 << 30
"""Numbers of draws start again after so many, because they are multiplied in 64 bits."""
_WEIGHTS = "weights"
"""Name under which weights travel with moments; no moment has it."""


@dataclass(frozen=True)
class Keeping:
    """How moments are kept. signed, square: codes of averages of values and of squares. route: to
    the device; weights take it too if the device computes with a rounded copy of them. numbers:
    returns the numbers of a span's elements, by which chances are drawn, on a device."""

    signed: Code
    square: Code
    route: Route = STAYS
    numbers: Callable[[slice, torch.device], Tensor] = positions


class Moments:
    """Moments of `weights` by name, zero at first."""

    def __init__(self, weights: Tensor, codes: Mapping[str, Code], keeping: Keeping) -> None:
        self._numbers, route = keeping.numbers, keeping.route
        self._length, self._dtype = len(weights), weights.dtype
        self._codes, self._route = dict(codes), route
        self._device = route.device or weights.device
        home = weights.device if route.device is None else torch.device("cpu")
        self._kept = {
            name: route.keep(code.make(self._length, self._dtype, home))
            for name, code in codes.items()
        }
        self._back: torch.cuda.Event | None = None
        self._shown: dict[str, Tensor] = {}

    @property
    def tensors(self) -> dict[str, Tensor]:
        """All tensors, as they are stored in memory."""
        return {
            name if index == 0 else f"{name}.scale": tensor
            for name, kept in self._kept.items()
            for index, tensor in enumerate(kept)
        }

    def settle(self) -> None:
        """Return when everything that was changed is back where it is kept."""
        self._route.settle()

    def shown(self, *, to_load: bool) -> dict[str, Tensor]:
        """Return the values of each moment: the tensor that keeps them or, for a code in blocks, a
        copy in host memory. to_load: `load` is to take back the copy after it was changed."""
        self.settle()
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
        """Take back the copies that were shown, rounded to nearest."""
        for name, values in self._shown.items():
            code = self._codes[name]
            for span in self._spans():
                nearest = torch.full((_size(span),), 0.5)
                _copy(code.encode(values[span], nearest), code.part(self._kept[name], span))
        self._shown = {}

    def chunks(
        self, weights: Tensor, step: Step, mixed: bool = False, *, whole: bool = False
    ) -> Iterator[tuple[slice, Tensor, dict[str, Tensor]]]:
        """Yield spans, each with its weights and moments, which may be changed in place until the
        next span is asked for. mixed: the device computes with a rounded copy of the weights, which
        themselves are kept where the moments are. whole: a single span, if everything is changed in
        place."""
        self._shown = {}
        codes, kept = dict(self._codes), dict(self._kept)
        if self._route.device is not None and mixed:
            codes[_WEIGHTS], kept[_WEIGHTS] = Master(), (weights,)
        in_place = self._route.device is None and all(code.exact for code in codes.values())
        spans = [slice(0, self._length)] if whole and in_place else list(self._spans())
        homes = [{n: code.part(kept[n], span) for n, code in codes.items()} for span in spans]
        before = self._back
        coming = self._route.fetch(homes[0], before)
        for number, (span, home) in enumerate(zip(spans, homes, strict=True)):
            self._route.arrive()
            here = coming
            if number + 1 < len(spans):
                coming = self._route.fetch(homes[number + 1], before)
            found = {
                name: code.decode(here.parts[name], _size(span), self._dtype)
                for name, code in codes.items()
            }
            mine = found.pop(_WEIGHTS) if _WEIGHTS in found else weights[span]
            yield span, mine, found
            self._encode(span, here.parts, found, step)
            self._back = self._route.put_back(here, home)

    def _encode(self, span: slice, parts: Parts, moments: Mapping[str, Tensor], step: Step) -> None:
        """Store what was changed in a copy, because its code is not exact."""
        lossy = {name: code for name, code in self._codes.items() if not code.exact}
        if not lossy:
            return
        elements = self._numbers(span, self._device)
        for index, (name, code) in enumerate(lossy.items()):
            number = (step.number * len(lossy) + index) % _LARGEST_NUMBER
            changed = code.encode(moments[name], chances(elements, number))
            for old, new in zip(parts[name], changed, strict=True):
                old.copy_(torch.where(step.skip.bool(), old, new))

    def _spans(self) -> Iterator[slice]:
        size = _GPU_CHUNK if self._route.device is None else OFFLOAD_CHUNK
        if self._device.type == "cpu":
            size = _CHUNK
        for start in range(0, max(1, self._length), size):
            yield slice(start, min(start + size, self._length))


def _copy(sources: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
    for source, target in zip(sources, targets, strict=True):
        target.copy_(source)


def _size(span: slice) -> int:
    return span.stop - span.start
