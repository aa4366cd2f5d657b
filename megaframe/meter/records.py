"""Values recorded during a step, and their reduction over ranks.

A step's values travel in two vectors of fp64, one summed and one maximised, however many metrics
there are. Nothing waits for them: a `Reduction` is asked for its result a step later.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from megaframe.comm import Group, Pending, all_reduce
from megaframe.comm.landing import land

How = Literal["last", "sum", "mean", "max", "min"]
Value = float | Tensor
_PADDING = 64
"""Vectors are filled up to a multiple of this many elements, so that ranks that recorded a
different number of metrics still exchange vectors of one length and can find it out."""


@dataclass(slots=True)
class Entry:
    """What a name has come to in this step: the sum for `sum` and `mean`, else one value."""

    how: How
    value: Value
    count: int = 1


class Records:
    """The values of one step on this rank."""

    def __init__(self) -> None:
        self._entries: dict[str, Entry] = {}

    def add(self, name: str, value: Value, how: How) -> None:
        """Record `value`, a number or a tensor of one element, which is copied and not waited for.

        Within the step and over ranks `sum` adds, `mean` averages over all values recorded, `max`
        and `min` compare. `last` keeps the latest value of the first rank and is not communicated.
        Names of the other kinds must be the same on all ranks.
        """
        if isinstance(value, Tensor):
            value = value.detach().reshape(()).to(torch.float64, copy=True)
        entry = self._entries.get(name)
        if entry is None:
            self._entries[name] = Entry(how, value)
            return
        if entry.how != how:
            raise ValueError(f"metric {name!r} was recorded as {entry.how}, now as {how}")
        entry.value = _combined(entry.value, value, how)
        entry.count += 1

    def reduce(self, group: Group, device: torch.device) -> Reduction:
        """Start to reduce the step's values over the group, and start a new step."""
        entries, self._entries = self._entries, {}
        return Reduction(entries, group, device)


class Reduction:
    """The values of one step on their way over the ranks of a group."""

    def __init__(self, entries: Mapping[str, Entry], group: Group, device: torch.device) -> None:
        self._names: dict[How, list[str]] = {
            how: sorted(name for name, entry in entries.items() if entry.how == how)
            for how in ("last", "sum", "mean", "max", "min")
        }
        self._index = group.index
        values = {how: [entries[name].value for name in self._names[how]] for how in self._names}
        counts = [float(entries[name].count) for name in self._names["mean"]]
        token = float(zlib.crc32(repr(self._shared()).encode()))
        largest = [token, -token, *values["max"], *(-value for value in values["min"])]
        # A maximum may lose a NaN on the way; infinity is as good a sign and survives.
        infinite = torch.nan_to_num(
            _vector(largest, device), nan=math.inf, posinf=math.inf, neginf=-math.inf
        )
        self._landed = land(
            [
                Pending(_vector(values["last"], device)),
                all_reduce(_vector([*values["sum"], *values["mean"], *counts], device), group),
                all_reduce(infinite, group, "max"),
            ],
            device,
        )

    def wait(self) -> dict[str, float]:
        """The reduced values by name. Raises `RuntimeError` when ranks recorded different names."""
        last, sums, largest = (vector.tolist() for vector in self._landed())
        if largest[0] != -largest[1]:
            raise RuntimeError(
                "ranks recorded different metrics in one step; those of rank "
                f"{self._index}: {self._shared()}"
            )
        names = self._names
        result = dict(zip(names["last"], last, strict=False))
        result.update(zip(names["sum"], sums, strict=False))
        start, count = len(names["sum"]), len(names["mean"])
        for position, name in enumerate(names["mean"], start):
            result[name] = sums[position] / sums[position + count]
        result.update(zip(names["max"], largest[2:], strict=False))
        smallest = (-value for value in largest[2 + len(names["max"]) :])
        result.update(zip(names["min"], smallest, strict=False))
        return result

    def _shared(self) -> list[str]:
        """The names that all ranks must have in common, with their kinds."""
        return [
            f"{name}:{how}" for how, names in self._names.items() if how != "last" for name in names
        ]


def _combined(old: Value, new: Value, how: How) -> Value:
    if how == "last":
        return new
    if how in ("sum", "mean"):
        return old + new
    if isinstance(old, Tensor) or isinstance(new, Tensor):
        compare = torch.maximum if how == "max" else torch.minimum
        return compare(torch.as_tensor(old), torch.as_tensor(new))
    if math.isnan(old) or math.isnan(new):
        return math.nan
    return max(old, new) if how == "max" else min(old, new)


def _vector(values: Sequence[Value], device: torch.device) -> Tensor:
    """Values as one padded fp64 vector on the device; the host waits for none of them."""
    numbers = [0.0 if isinstance(value, Tensor) else float(value) for value in values]
    numbers.extend([0.0] * (-len(numbers) % _PADDING))
    host = torch.tensor(numbers, dtype=torch.float64, pin_memory=device.type == "cuda")
    vector = host.to(device, non_blocking=True)
    for position, value in enumerate(values):
        if isinstance(value, Tensor):
            vector[position].copy_(value, non_blocking=True)
    return vector
