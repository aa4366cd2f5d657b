"""Finds stragglers: ranks whose own work takes longer than that of ranks that do the same work.

Times come from `RankProgress` and exclude waiting for other ranks. A slow rank makes all others
wait, so the length of a step can only show that there is a slow rank, not which one. On a GPU they
are those of the device, because the host only launches the work; loading data is the host's own.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from megaframe.distributed.collectives import all_gather
from megaframe.distributed.mesh import Mesh
from megaframe.distributed.rank_progress import DeviceTimer, DeviceTimes

EVERY = 20
"""Number of steps over which times are summed before they are compared."""
KINDS = ("F", "B", "W", "UPDATE", "data")
OF_DEVICE = KINDS[:-1]
"""Kinds of work that a device does if there is one."""
_LEAST_SECONDS = 1e-3
"""A rank is only slow at a kind of work if it exceeds the median by this many seconds per step."""


@dataclass(frozen=True)
class SlowRank:
    """A rank that is slow at a kind of work: seconds per step, and the median of the others."""

    rank: int
    kind: str
    seconds: float
    median: float


def find_slow_ranks(times: Mapping[int, Sequence[float]], factor: float) -> Iterator[SlowRank]:
    """Find the slow ones among ranks that do the same work.

    Args:
        times: By rank, the seconds per step of each of `KINDS`.
        factor: Multiple of the other ranks' median above which a rank is slow.
    """
    for column, kind in enumerate(KINDS):
        for rank, own_times in times.items():
            times_of_others = [
                other_times[column] for other, other_times in times.items() if other != rank
            ]
            if not times_of_others:
                continue
            median = statistics.median(times_of_others)
            if own_times[column] > max(factor * median, median + _LEAST_SECONDS):
                yield SlowRank(rank, kind, own_times[column], median)


class StragglerDetector:
    """Sums this rank's times and compares them with those of the others. All ranks call it at the
    same steps."""

    def __init__(self, mesh: Mesh, factor: float) -> None:
        self._mesh, self._factor = mesh, factor
        self._host: Counter[str] = Counter()
        self._steps = 0
        self._device: DeviceTimes | None = None
        if mesh.progress.record_event is not None:
            mesh.progress.device_timer = DeviceTimer()
            self._device = DeviceTimes()

    def add_step(self) -> list[str]:
        """Add the times of a finished step. Every `EVERY` steps, compare them with the other ranks'
        and return a line for each rank and kind of work that is slow; otherwise return no lines."""
        progress = self._mesh.progress
        self._host.update(progress.take_busy())
        if self._device is not None and progress.device_timer is not None:
            self._device.add(progress.device_timer.take_times())
        self._steps += 1
        if self._steps < EVERY:
            return []
        world = self._mesh.world
        row = torch.tensor([self._compute_row()], dtype=torch.float64)
        rows = all_gather(row.to(self._mesh.device), world).wait().tolist()
        self._host, self._steps = Counter(), 0
        if self._device is not None:
            self._device = DeviceTimes()
        return list(self._describe_slow_ranks(dict(zip(world.ranks, rows, strict=True))))

    def _compute_row(self) -> list[float]:
        """Return the seconds per step of each kind, and those of the host."""
        host = {kind: self._host[kind] / self._steps for kind in KINDS}
        busy = dict(host)
        if self._device is not None:
            steps = max(1, self._device.steps)
            busy |= {kind: self._device.busy.get(kind, 0.0) / steps for kind in OF_DEVICE}
        return [*busy.values(), *host.values()]

    def _describe_slow_ranks(self, rows: Mapping[int, Sequence[float]]) -> Iterator[str]:
        stages: dict[int, dict[int, Sequence[float]]] = {}
        for rank, row in rows.items():
            stages.setdefault(self._mesh.layout.get_coordinate(rank)["pipeline"], {})[rank] = row
        for ranks_of_stage in stages.values():
            for slow in find_slow_ranks(ranks_of_stage, self._factor):
                place = launch = ""
                if self._device is not None and slow.kind in OF_DEVICE:
                    host = ranks_of_stage[slow.rank][len(KINDS) + KINDS.index(slow.kind)]
                    place, launch = " on its device", f"; its host launched it in {host:.4f} s"
                yield (
                    f"rank {slow.rank} is slow: {slow.seconds:.4f} s of {slow.kind} per step"
                    f"{place}, where ranks with the same work take {slow.median:.4f} s{launch}"
                )
