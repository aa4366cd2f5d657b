"""Finds stragglers: ranks whose own work takes longer than that of ranks that do the same work.

Times come from `Place` and exclude waiting for other ranks. A slow rank makes all others wait, so
the length of a step can only show that there is a slow rank, not which one.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

import torch

from megaframe.comm import all_gather
from megaframe.mesh import Mesh

EVERY = 20
"""Number of steps over which times are summed before they are compared."""
KINDS = ("F", "B", "W", "UPDATE", "data")
_LEAST = 1e-3
"""A rank is only slow at a kind of work if it exceeds the median by this many seconds per step."""


def outliers(
    times: Mapping[int, Sequence[float]], factor: float, steps: int
) -> Iterator[tuple[int, str, float, float]]:
    """Find the slow ones among ranks that do the same work.

    times: by rank, the seconds of each of `KINDS`, summed over `steps` steps. factor: multiple of
    the other ranks' median above which a rank is slow. Yields rank, kind of work, its seconds per
    step, and the median of the other ranks.
    """
    for place, kind in enumerate(KINDS):
        for rank, mine in times.items():
            others = [theirs[place] for other, theirs in times.items() if other != rank]
            if not others:
                continue
            usual = statistics.median(others) / steps
            if mine[place] / steps > max(factor * usual, usual + _LEAST):
                yield rank, kind, mine[place] / steps, usual


class Stragglers:
    """Sums this rank's times and compares them with those of the others. All ranks call it at the
    same steps."""

    def __init__(self, mesh: Mesh, factor: float) -> None:
        self._mesh, self._factor = mesh, factor
        self._times: Counter[str] = Counter()
        self._steps = 0

    def add_step(self) -> list[str]:
        """Add the times of a finished step. Every `EVERY` steps, compare them with the other ranks'
        and return a line for each rank and kind of work that is slow; otherwise return no lines."""
        self._times.update(self._mesh.place.take_busy())
        self._steps += 1
        if self._steps < EVERY:
            return []
        world, steps = self._mesh.world, self._steps
        mine = torch.tensor([[self._times[kind] for kind in KINDS]], dtype=torch.float64)
        times = all_gather(mine.to(self._mesh.device), world).wait().tolist()
        self._times, self._steps = Counter(), 0
        return list(self._lines(dict(zip(world.ranks, times, strict=True)), steps))

    def _lines(self, times: Mapping[int, Sequence[float]], steps: int) -> Iterator[str]:
        stages: dict[int, dict[int, Sequence[float]]] = {}
        for rank, mine in times.items():
            stages.setdefault(self._mesh.layout.coordinate(rank)["pipeline"], {})[rank] = mine
        for alike in stages.values():
            for rank, kind, slow, usual in outliers(alike, self._factor, steps):
                yield (
                    f"rank {rank} is slow: {slow:.4f} s of {kind} per step, where ranks with the "
                    f"same work take {usual:.4f} s"
                )
