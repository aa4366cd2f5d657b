"""The time split of a step on every rank, and how it becomes a part of the step's line.

Every line has the mean, minimum and maximum over ranks and, for each pipeline stage, how long its
ranks worked and waited. Every `metrics.ranks_every` steps it also has rows with a number for each
rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from megaframe.config import MetricsConfig
from megaframe.distributed.mesh import Mesh
from megaframe.metrics.records import MetricValue, ReduceType
from megaframe.metrics.timers import COMMUNICATION, PARTS, StepTimeline

Record = tuple[str, MetricValue, ReduceType]
_EXTREMES: tuple[ReduceType, ...] = ("max", "min")
_WORK = ("compute", "optimizer", "data", "other")
"""Parts in which a rank keeps others waiting if it takes longer than they do."""


class StepBreakdown:
    """Records the same names on all ranks of a mesh, whatever their steps contained.

    Args:
        config: The config of the run.
        mesh: The mesh of its ranks.
        read_extra: Returns further values of a rank by name; the names are the same on all
            ranks.
        more: Returns further values of a rank by name; the names are the same on all ranks.
    """

    def __init__(
        self,
        metrics: MetricsConfig,
        mesh: Mesh,
        read_extra: Callable[[], Mapping[str, float]] = dict,
    ) -> None:
        self._read_extra = read_extra
        self._axes = mesh.traffic_axes
        self._parts = [*PARTS, *(COMMUNICATION + axes for axes in self._axes)]
        self._place, self._rank = mesh.coordinate["pipeline"], mesh.rank
        self._world, self._stages = mesh.layout.world, mesh.layout.pipeline
        self._every = metrics.ranks_every

    def make_records(self, split: StepTimeline, step: int) -> Iterator[Record]:
        """Yield what this rank reports about a step."""
        parts = {name: spent / 1e9 for name, spent in split.sum_parts().items()}
        for name in self._parts:
            yield f"time/{name}", parts.get(name, 0.0), "mean"
        work = sum(parts[name] for name in _WORK)
        if self._every and step % self._every == 0:
            rows = {name: parts.get(name, 0.0) for name in self._parts} | {"work": work}
            for name, value in (rows | dict(self._read_extra())).items():
                yield f"ranks/{name}", self._make_row(self._rank, self._world, value), "sum"
        if self._world == 1:
            return
        for how in _EXTREMES:
            for name in self._parts:
                yield f"time_{how}/{name}", parts.get(name, 0.0), how
        yield "stages/work_max", self._make_row(self._place, self._stages, work), "max"
        yield "stages/work", self._make_row(self._place, self._stages, work), "sum"
        yield "stages/bubble", self._make_row(self._place, self._stages, parts["bubble"]), "sum"
        rates = split.compute_rates()
        for axes in self._axes:
            yield f"bandwidth/{axes}", rates.get(axes, 0.0), "max"

    def take_values(self, values: dict[str, Any]) -> dict[str, Any]:
        """Take the recorded values out of `values`, and return their part of the step's line.
        bandwidth: bytes per second, measured by the rank that was last to start what others waited
        for; None if nobody waited. stages: by pipeline rank, seconds of the mean rank, and
        `work_max` of the slowest. stragglers: seconds that the mean rank waits for slower ranks of
        its own stage. ranks: a row for each part."""

        def take_means(prefix: str) -> dict[str, Any]:
            return {name: values.pop(prefix + name) for name in self._parts}

        parts = take_means("time/")
        breakdown: dict[str, Any] = {"seconds": sum(parts.values()), "time": parts}
        rows = sorted(name for name in values if name.startswith("ranks/"))
        if rows:
            breakdown["ranks"] = {
                name.removeprefix("ranks/"): [round(value, 6) for value in values.pop(name)]
                for name in rows
            }
        if self._world == 1:
            return breakdown
        breakdown |= {"time_max": take_means("time_max/"), "time_min": take_means("time_min/")}
        per_stage = self._world / self._stages
        most = values.pop("stages/work_max")
        mean = [seconds / per_stage for seconds in values.pop("stages/work")]
        bubble = [seconds / per_stage for seconds in values.pop("stages/bubble")]
        breakdown["stages"] = {"work": mean, "work_max": most, "bubble": bubble}
        breakdown["stragglers"] = sum(
            high - middle for high, middle in zip(most, mean, strict=True)
        )
        breakdown["stragglers"] /= self._stages
        breakdown["bandwidth"] = {
            axes: values.pop(f"bandwidth/{axes}") or None for axes in self._axes
        }
        return breakdown

    def _make_row(self, index: int, length: int, value: float) -> torch.Tensor:
        row = torch.zeros(length, dtype=torch.float64)
        row[index] = value
        return row
