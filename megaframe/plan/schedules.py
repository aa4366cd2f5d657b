"""The schedule that a config asks for."""

from __future__ import annotations

from megaframe.config.schema import RunConfig
from megaframe.plan.stages import stage_costs, stage_plans
from megaframe.schedule import Action, Kind, Schedule, generate


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
