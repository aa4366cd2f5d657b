"""The schedule that a config asks for, and a summary of its bubble and stages."""

from __future__ import annotations

from collections.abc import Iterator

from megaframe.architecture.stages import compute_stage_costs, plan_stages
from megaframe.config.schema import RunConfig
from megaframe.schedule import Action, ActionKind, Schedule, generate
from megaframe.schedule.named import get_schedule_name
from megaframe.schedule.simulate import simulate


def build_step_schedule(config: RunConfig, microbatches: int) -> Schedule:
    """Return the compute actions of one step; equal arguments give equal schedules.

    `search` may not choose the placement of stages, because stages must stay where they are while a
    batch ramp grows. Two chunks are placed V-shaped, which puts the head on the rank of the
    embedding; any other number is placed as a loop.

    Raises:
        UserError: As `generate` does.
    """
    parallel = config.parallel
    searched = parallel.schedule == "search"
    most = parallel.schedule_microbatches
    return generate(
        parallel.schedule,
        parallel.pipeline,
        parallel.chunks,
        microbatches,
        group=None if searched or most is None else int(most),
        costs=compute_stage_costs(
            config.model, config.train, plan_stages(config), config.frozen_patterns
        )
        if searched
        else None,
        memory_limit=most if searched else None,
        placement="vee" if parallel.chunks == 2 else "loop",
    )


def build_forward_schedule(rank_of: tuple[int, ...], microbatches: int) -> Schedule:
    """Return a schedule of forward passes only.

    Each rank runs all microbatches of one stage before its next stage, so no pass waits for a later
    stage.

    Args:
        rank_of: Rank of each stage.
        microbatches: Number of microbatches.
    """
    ranks = range(max(rank_of) + 1)
    return Schedule(
        tuple(
            tuple(
                Action(ActionKind.F, stage, microbatch)
                for stage, owner in enumerate(rank_of)
                if owner == rank
                for microbatch in range(microbatches)
            )
            for rank in ranks
        )
    )


def summarize_pipeline(config: RunConfig, schedule: Schedule) -> Iterator[str]:
    """Yield a line for the schedule with its bubble, one for all stages together, and one for each
    stage; nothing if there is only one stage."""
    plans = plan_stages(config)
    if len(plans) == 1:
        return
    layers = sum(len(plan.blocks) for plan in plans)
    costs = compute_stage_costs(config.model, config.train, plans, config.frozen_patterns)
    timeline = simulate(schedule, costs)
    work = [f + b + w for f, b, w in zip(*costs.list_by_stage(len(plans)), strict=True)]
    name = get_schedule_name(config.parallel.schedule)
    yield (
        f"schedule    {name}, {schedule.microbatches} microbatches: bubble "
        f"{float(timeline.bubble):.1%} of the step by modelled work, without communication"
    )
    yield f"stages      {len(plans)}, {layers} blocks in all"
    for plan in plans:
        recomputed = f", {plan.recomputed} recomputed" if plan.recomputed else ""
        share = work[plan.stage_index] / sum(work)
        rank = schedule.rank_of[plan.stage_index]
        yield f"  {plan.stage_index:<4} rank {rank:<4} {share:6.1%} of the work  {plan}{recomputed}"
