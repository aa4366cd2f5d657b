"""The schedule that a config asks for, and what it comes to."""

from __future__ import annotations

from collections.abc import Iterator

from megaframe.config.schema import RunConfig
from megaframe.plan.stages import stage_costs, stage_plans
from megaframe.schedule import Action, Kind, Schedule, generate
from megaframe.schedule.simulate import simulate


def step_schedule(config: RunConfig, microbatches: int) -> Schedule:
    """The compute of one step of so many microbatches; equal arguments give equal schedules.

    `search` may not choose where stages lie, because they must not move while a batch ramp grows:
    two chunks go to and fro, which puts the head beside the embedding; others go round. Raises
    `UserError` as `generate` does.
    """
    parallel = config.parallel
    searched = parallel.schedule == "search"
    return generate(
        parallel.schedule,
        parallel.pipeline,
        parallel.chunks,
        microbatches,
        group=parallel.schedule_group,
        costs=stage_costs(config, stage_plans(config)) if searched else None,
        memory_limit=parallel.schedule_memory,
        placement="vee" if parallel.chunks == 2 else "loop",
    )


def forward_schedule(rank_of: tuple[int, ...], microbatches: int) -> Schedule:
    """Forward passes only, on stages that lie as `rank_of` says: stage by stage, so that none waits
    for what comes after it."""
    ranks = range(max(rank_of) + 1)
    return Schedule(
        tuple(
            tuple(
                Action(Kind.F, stage, number)
                for stage, owner in enumerate(rank_of)
                if owner == rank
                for number in range(microbatches)
            )
            for rank in ranks
        )
    )


def pipeline_summary(config: RunConfig, schedule: Schedule) -> Iterator[str]:
    """A line for the schedule with its bubble, one for the sum of all stages, and one
    for each; nothing without a pipeline."""
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
        again = f", {plan.recomputed} recomputed" if plan.recomputed else ""
        share = work[plan.number] / sum(work)
        rank = schedule.rank_of[plan.number]
        yield f"  {plan.number:<4} rank {rank:<4} {share:6.1%} of the work  {plan}{again}"
