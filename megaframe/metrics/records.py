"""Values recorded during a step, and their reduction over ranks.

A step's values travel in two fp64 vectors, one summed and one maximised, however many metrics there
are. Nothing waits for them: the result of a `PendingReduction` is read a step later. Between
islands every hop may take as long as a step, so what an island has reduced has a second step to
reach the others, in one hop.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Literal

import torch
from torch import Tensor

from megaframe.distributed.collectives import Group, Pending, all_reduce, exchange_messages
from megaframe.distributed.device import copy_to_device
from megaframe.distributed.group import ALONE
from megaframe.distributed.pending import copy_to_host

ReduceType = Literal["last", "sum", "mean", "max", "min"]
MetricValue = float | Tensor
_PADDING = 64
"""Vectors are padded to a multiple of this many elements, so that ranks that recorded a different
number of metrics still exchange vectors of one length and can detect the mismatch."""


@dataclass(slots=True)
class RecordedValue:
    """What was recorded under a name in this step: the sum for `sum` and `mean`, else one value."""

    how: ReduceType
    value: MetricValue
    count: int = 1


class StepRecords:
    """The values that this rank recorded in one step."""

    def __init__(self) -> None:
        self._entries: dict[str, RecordedValue] = {}

    def add(self, name: str, value: MetricValue, how: ReduceType) -> None:
        """Record `value`: a number, a scalar tensor, or a tensor with one dim (a row), which is
        equally long on all ranks. Tensors are copied without waiting for the device.

        Within the step and over ranks, `sum` adds, `mean` averages all recorded values, and `max`
        and `min` take the extreme. `last` keeps this rank's latest value and is not communicated;
        the first rank's is the one that is written. All other names must be the same on all ranks.

        Args:
            name: Of the metric.
            value: A number, a scalar tensor, or a tensor with one dim (a row).
            how: How values are combined.

        Raises:
            ValueError: If a name is recorded in two ways.
        """
        if isinstance(value, Tensor):
            value = value.detach().to(torch.float64, copy=True)
        entry = self._entries.get(name)
        if entry is None:
            self._entries[name] = RecordedValue(how, value)
            return
        if entry.how != how:
            raise ValueError(f"metric {name!r} was recorded as {entry.how}, now as {how}")
        entry.value = _combine(entry.value, value, how)
        entry.count += 1

    def reduce(
        self, group: Group, device: torch.device, counterparts: Group = ALONE
    ) -> PendingReduction:
        """Start reducing the step's values, and begin a new step. See `PendingReduction`."""
        entries, self._entries = self._entries, {}
        return PendingReduction(entries, group, device, counterparts)


class PendingReduction:
    """The values of one step while they are being reduced over ranks.

    Args:
        entries: The values by name.
        group: The ranks of this island, which is all of them if there is only one.
        device: Of the transfers within the island.
        counterparts: This rank's on other islands; they transfer on the host.
    """

    def __init__(
        self,
        entries: Mapping[str, RecordedValue],
        group: Group,
        device: torch.device,
        counterparts: Group = ALONE,
    ) -> None:
        self._names: dict[ReduceType, list[str]] = {
            how: sorted(name for name, entry in entries.items() if entry.how == how)
            for how in ("last", "sum", "mean", "max", "min")
        }
        self._rank, self._progress = group.ranks[group.index], group.progress
        self._counterparts = counterparts
        self._exchange: Pending[Tensor] | None = None
        values = {how: [entries[name].value for name in self._names[how]] for how in self._names}
        counts = [float(entries[name].count) for name in self._names["mean"]]
        self._lengths = {
            name: len(entry.value)
            for name, entry in entries.items()
            if isinstance(entry.value, Tensor) and entry.value.dim()
        }
        token = float(zlib.crc32(repr(self._list_shared_names()).encode()))
        largest = [token, -token, *values["max"], *(-value for value in values["min"])]
        # A max reduction may lose a NaN; infinity signals the same and survives it.
        infinite = torch.nan_to_num(
            _pack(largest, device), nan=math.inf, posinf=math.inf, neginf=-math.inf
        )
        self._wait_for_copies = copy_to_host(
            [
                Pending(_pack(values["last"], device)),
                all_reduce(_pack([*values["sum"], *values["mean"], *counts], device), group),
                all_reduce(infinite, group, "max"),
            ],
            device,
        )

    @property
    def steps(self) -> int:
        """How many steps after its own the result is read."""
        return 1 if self._counterparts.handle is None else 2

    def advance(self) -> None:
        """Start to exchange with other islands what this one has reduced; called a step later."""
        if self._counterparts.handle is None or self._exchange is not None:
            return
        self._own = self._wait_for_copies()
        self._progress.check_not_ended()
        message = torch.cat(self._own[1:])
        self._exchange = exchange_messages(
            message.expand(len(self._counterparts.others), -1).contiguous(), self._counterparts
        )

    def wait(self) -> dict[str, float | list[float]]:
        """Return the reduced values by name, rows as lists.

        Raises:
            RuntimeError: If ranks recorded different names.
            LostRanks: If the transfers were ended meanwhile.
        """
        self.advance()
        vectors = self._wait_for_copies() if self._exchange is None else self._join_islands()
        self._progress.check_not_ended()
        last, sums, largest = (iter(vector.tolist()) for vector in vectors)
        if next(largest) != -next(largest):
            raise RuntimeError(
                "ranks recorded different metrics in one step; those of rank "
                f"{self._rank}: {self._list_shared_names()}"
            )
        result = self._take("last", last) | self._take("sum", sums)
        means = self._take("mean", sums)
        result |= {name: _divide(mean, next(sums)) for name, mean in means.items()}
        result |= self._take("max", largest)
        smallest = self._take("min", largest)
        return result | {name: _divide(value, -1.0) for name, value in smallest.items()}

    def _join_islands(self) -> list[Tensor]:
        """Return the vectors of all islands reduced in their order, as each of them does it."""
        assert self._exchange is not None
        last, *own = self._own
        sizes = [len(vector) for vector in own]
        messages = [message.split(sizes) for message in self._exchange.wait()]
        messages.insert(self._counterparts.index, tuple(own))
        sums, largest = zip(*messages, strict=True)
        total = torch.zeros_like(sums[0])
        for vector in sums:
            total += vector
        return [last, total, torch.stack(largest).amax(0)]

    def _take(self, how: ReduceType, numbers: Iterator[float]) -> dict[str, float | list[float]]:
        """Take the next numbers as the values of one kind."""
        return {
            name: list(islice(numbers, self._lengths[name]))
            if name in self._lengths
            else next(numbers)
            for name in self._names[how]
        }

    def _list_shared_names(self) -> list[str]:
        """The names that must be the same on all ranks, with their kinds and lengths."""
        return [
            f"{name}:{how}" + (f":{self._lengths[name]}" if name in self._lengths else "")
            for how, names in self._names.items()
            if how != "last"
            for name in names
        ]


def _divide(value: float | list[float], by: float) -> float | list[float]:
    """Divide a number, or each number of a row."""
    return [element / by for element in value] if isinstance(value, list) else value / by


def _combine(old: MetricValue, new: MetricValue, how: ReduceType) -> MetricValue:
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


def _pack(values: Sequence[MetricValue], device: torch.device) -> Tensor:
    """Return values as one padded fp64 vector on the device. The host does not wait: its own
    numbers go there together, through pinned memory."""
    numbers: list[float] = []
    destinations: list[tuple[slice, Tensor]] = []
    for value in values:
        if not isinstance(value, Tensor):
            numbers.append(float(value))
        elif value.device.type == "cpu":
            numbers.extend(value.reshape(-1).tolist())
        else:
            destinations.append((slice(len(numbers), len(numbers) + value.numel()), value))
            numbers.extend([0.0] * value.numel())
    numbers.extend([0.0] * (-len(numbers) % _PADDING))
    vector = copy_to_device(torch.tensor(numbers, dtype=torch.float64), device)
    for position, value in destinations:
        vector[position].copy_(value.reshape(-1))
    return vector
