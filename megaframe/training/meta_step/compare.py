"""Comparison of what a rehearsed rank counted with what the plan predicts for it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from megaframe.architecture.pipeline import build_step_schedule
from megaframe.architecture.stages import stage_plans
from megaframe.config import RunConfig
from megaframe.layout import Layout
from megaframe.planner.communication_volume import communication_bytes
from megaframe.planner.memory import compute_rank_memory
from megaframe.schedule import lower
from megaframe.schedule.check import check
from megaframe.training.meta_step import RankMeasurement

_GIB = 2.0**30


@dataclass(frozen=True)
class ComparisonRow:
    """A number of bytes, counted and planned; None if the plan does not predict it."""

    name: str
    counted: float
    planned: float | None

    @property
    def shown(self) -> tuple[str, str, str]:
        """Both numbers in GiB, and their relative difference."""
        counted = f"{self.counted / _GIB:.3f} GiB"
        if self.planned is None:
            return counted, "-", ""
        ratio = f"{self.counted / self.planned - 1:+.1%}" if self.planned else ""
        return counted, f"{self.planned / _GIB:.3f} GiB", ratio


def compare_with_plan(
    config: RunConfig, layout: Layout, rank: int, found: RankMeasurement
) -> list[ComparisonRow]:
    """Return the rows for memory and bytes moved. The schedule of all ranks is checked first."""
    many = config.train.global_batch // (config.train.microbatch * layout.data)
    schedule = lower(build_step_schedule(config, many))
    check(schedule)
    return [*_memory(config, layout, rank, found), *_traffic(config, layout, rank, found)]


def _memory(
    config: RunConfig, layout: Layout, rank: int, found: RankMeasurement
) -> Iterator[ComparisonRow]:
    many = config.train.global_batch // (config.train.microbatch * layout.data)
    schedule = lower(build_step_schedule(config, many))
    here = layout.get_coordinate(rank)["pipeline"]
    plan = compute_rank_memory(config, layout, stage_plans(config), schedule, here)
    buffers = plan.weights + plan.values + plan.gradients
    kept = plan.activations + plan.messages
    yield ComparisonRow("weights, values, gradients", found.buffers, buffers)
    yield ComparisonRow("optimizer", found.optimizer, plan.optimizer)
    if plan.host:
        yield ComparisonRow("on the host", found.host, plan.host)
        yield ComparisonRow("rooms", found.rooms, plan.rooms)
    again = any(p.recomputed for p in stage_plans(config))
    passing = found.kept + found.temporaries if again else found.kept
    planned = kept + plan.temporaries if again else kept
    what = "activations, messages" + ", temporaries" * again
    yield ComparisonRow(what, passing, planned)
    if not again:
        yield ComparisonRow("temporaries", found.temporaries, plan.temporaries)
    whole = buffers + plan.optimizer + plan.rooms + kept + plan.temporaries
    yield ComparisonRow("most at a time", found.peak, whole)


def _traffic(
    config: RunConfig, layout: Layout, rank: int, found: RankMeasurement
) -> Iterator[ComparisonRow]:
    """Yield the bytes moved, by axes. With several context ranks, gradients and values travel over
    context and data ranks together, so the plan's "data" is compared with "context+data"."""
    many = config.train.global_batch // (config.train.microbatch * layout.data)
    schedule = lower(build_step_schedule(config, many))
    here = layout.get_coordinate(rank)["pipeline"]
    plans = stage_plans(config)
    mine = [plans[stage] for stage in schedule.list_stages(here)]
    planned = dict(communication_bytes(config, layout, mine, schedule.ranks[here]))
    for axes, size in sorted(found.traffic.items()):
        alike = {"context+data": "data"}.get(axes, axes)
        if size or axes in planned:
            plan = planned.get(alike) if axes != "data" or layout.context == 1 else None
            yield ComparisonRow(f"moved over {axes}", size, plan)
