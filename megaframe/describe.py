"""What `--dry-run` prints: the resolved config, layout, parameter count, stages and memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict

from megaframe.config import RunConfig, dump
from megaframe.layout import Layout
from megaframe.plan.memory import Memory, memory
from megaframe.plan.schedules import step_schedule
from megaframe.plan.stages import StagePlan, stage_costs, stage_plans
from megaframe.schedule import Schedule
from megaframe.schedule.simulate import simulate
from megaframe.spec import parameter_count
from megaframe.stage import build_stages, model_specs


def describe(config: RunConfig, layout: Layout) -> str:
    """The run in words and numbers; nothing is allocated for it."""
    specs = model_specs(config)
    count = parameter_count(specs)
    train = config.train
    tokens = train.global_batch * train.seq
    microbatches = train.global_batch // (train.microbatch * layout.data)
    schedule = step_schedule(config, microbatches)
    lines = [
        dump(config),
        f"layout      {layout}",
        f"parameters  {count:,} in {len(specs)} tensors",
        f"batch       {train.global_batch} samples, {tokens:,} tokens a step, "
        f"{tokens * train.steps:,} in the run",
        *_pipeline(config, schedule),
        *_memory(config, schedule),
    ]
    return "\n".join(lines)


def _pipeline(config: RunConfig, schedule: Schedule) -> Iterator[str]:
    """What each stage runs, and the bubble that the schedule leaves."""
    plans = stage_plans(config)
    if len(plans) == 1:
        return
    layers = sum(len(plan.blocks) for plan in plans)
    costs = stage_costs(config, plans)
    timeline = simulate(schedule, costs)
    work = [f + b + w for f, b, w in zip(*costs.per_stage(len(plans)), strict=True)]
    yield (
        f"schedule    {config.parallel.schedule}, {schedule.microbatches} microbatches: bubble "
        f"{float(timeline.bubble):.1%} of the step by modelled work, without communication"
    )
    yield f"stages      {len(plans)}, {layers} blocks in all"
    for plan in plans:
        again = f", {plan.recomputed} run again" if plan.recomputed else ""
        share = work[plan.number] / sum(work)
        rank = schedule.rank_of[plan.number]
        yield f"  {plan.number:<4} rank {rank:<4} {share:6.1%} of the work  {plan}{again}"


def _memory(config: RunConfig, schedule: Schedule) -> Iterator[str]:
    """A column for each pipeline rank."""
    plans = stage_plans(config)
    columns = [
        _of_rank(config, [plans[stage] for stage in schedule.stages(rank)], schedule, rank)
        for rank in range(len(schedule.ranks))
    ]
    yield "memory per rank, without interpreter and temporaries"
    if len(columns) > 1:
        yield f"  {'pipeline':<12}" + "".join(f"{rank:>12}" for rank in range(len(columns)))
    for kind in asdict(columns[0]):
        yield f"  {kind:<12}" + "".join(_gib(asdict(column)[kind]) for column in columns)
    yield f"  {'total':<12}" + "".join(_gib(column.total) for column in columns)


def _of_rank(
    config: RunConfig, plans: Sequence[StagePlan], schedule: Schedule, rank: int
) -> Memory:
    stages = build_stages(config, plans)
    held = {p: p.spec.size for stage in stages.values() for p in stage.parameters()}
    return memory(config, sum(held.values()), plans, schedule.ranks[rank])


def _gib(size: int) -> str:
    return f"{size / 2**30:>8,.3f} GiB"
