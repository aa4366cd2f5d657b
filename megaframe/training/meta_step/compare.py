"""Comparison of what a meta step measured with what the plan predicts for its rank."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from megaframe.architecture.pipeline import build_step_schedule
from megaframe.architecture.stages import plan_stages
from megaframe.config import RunConfig
from megaframe.layout import Layout
from megaframe.planner.communication_volume import compute_communication_bytes
from megaframe.planner.memory import RankMemory, compute_rank_memory
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
    config: RunConfig, layout: Layout, rank: int, measured: RankMeasurement
) -> list[ComparisonRow]:
    """Return the rows for memory and bytes moved. The schedule of all ranks is checked first.

    Args:
        config: The config of the run.
        layout: The layout of its ranks.
        rank: The rank that was measured.
        measured: What was counted in its step, in bytes.
    """
    count = config.train.global_batch // (config.train.microbatch * layout.data)
    schedule, plans = lower(build_step_schedule(config, count)), plan_stages(config)
    check(schedule)
    pipeline_rank = layout.get_coordinate(rank)["pipeline"]
    memory = compute_rank_memory(config, layout, plans, schedule, pipeline_rank)
    own_plans = [plans[stage] for stage in schedule.list_stages(pipeline_rank)]
    traffic = compute_communication_bytes(config, layout, own_plans, schedule.ranks[pipeline_rank])
    recomputes = any(plan.recomputed for plan in plans)
    return [
        *_compare_memory(measured, memory, recomputes=recomputes),
        *_compare_traffic(measured, traffic, layout),
    ]


def _compare_memory(
    measured: RankMeasurement, plan: RankMemory, *, recomputes: bool
) -> Iterator[ComparisonRow]:
    buffers = plan.weights + plan.values + plan.gradients
    activations = plan.activations + plan.messages
    yield ComparisonRow("weights, values, gradients", measured.buffers, buffers)
    yield ComparisonRow("optimizer", measured.optimizer, plan.optimizer)
    if plan.host:
        yield ComparisonRow("on the host", measured.host, plan.host)
        yield ComparisonRow("buffers", measured.staging, plan.buffers)
    counted = measured.activations + measured.temporaries if recomputes else measured.activations
    planned = activations + plan.temporaries if recomputes else activations
    name = "activations, messages" + ", temporaries" * recomputes
    yield ComparisonRow(name, counted, planned)
    if not recomputes:
        yield ComparisonRow("temporaries", measured.temporaries, plan.temporaries)
    peak = buffers + plan.optimizer + plan.buffers + activations + plan.temporaries
    yield ComparisonRow("most at a time", measured.peak, peak)


def _compare_traffic(
    measured: RankMeasurement, traffic: Mapping[str, float], layout: Layout
) -> Iterator[ComparisonRow]:
    """Yield the bytes moved, by axes. With several context ranks, gradients and values travel over
    context and data ranks together, so the plan's "data" is compared with "context+data". Keys that
    go around a ring are planned as the mean of its ranks."""
    planned = {axes: size for axes, size in traffic.items() if axes != "islands"}  # not each step
    if layout.data == 1:  # then gradients and values travel over context ranks alone
        planned["context"] += planned["data"]
    for axes, size in sorted(measured.traffic.items()):
        planned_axes = {"context+data": "data"}.get(axes, axes)
        if size or axes in planned:
            plan = planned.get(planned_axes) if axes != "data" or layout.context == 1 else None
            yield ComparisonRow(f"moved over {axes}", size, plan)
