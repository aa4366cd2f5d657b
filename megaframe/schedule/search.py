"""Search: the best order that can be found for given costs under a memory limit.

Every rank searches on its own and all must find the same order. Work is therefore bounded by
counting actions, never by the clock, and equal arguments give equal orders.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import chain, cycle, islice
from random import Random

from megaframe.errors import UserError
from megaframe.schedule.building_blocks import Placement, list_ranks_by_stage
from megaframe.schedule.costs import ActionCosts, Seconds
from megaframe.schedule.event_simulation import EncodedSchedule, encode_schedule
from megaframe.schedule.greedy import GreedyPolicy, SchedulingProblem, schedule_greedily
from megaframe.schedule.named import NAMED_SCHEDULES, find_name_mistakes
from megaframe.schedule.named_schedule import PipelineSizes
from megaframe.schedule.schedule import Schedule
from megaframe.schedule.simulate import Timeline, simulate

BUDGET = 100_000
"""Actions that may be placed for whole orders: about a quarter of a second. At least one order is
always made."""

TRIAL_BUDGET = 40_000
"""Actions that may be placed before that, on fewer microbatches, to see which policies do well."""

POLICIES: Mapping[Placement, tuple[GreedyPolicy, ...]] = {
    "loop": (
        GreedyPolicy(lead=2, turns=True),
        GreedyPolicy(lead=2, turns=True, patience=0.25),
        GreedyPolicy(lead=1, turns=True, patience=0.5),
        GreedyPolicy(lead=1.5, patience=0.5),
        GreedyPolicy(),
        GreedyPolicy(patience=0.25),
    ),
    "vee": (
        GreedyPolicy(),
        GreedyPolicy(patience=0.25),
        GreedyPolicy(patience=0.5),
        GreedyPolicy(patience=0.75),
    ),
}
"""The policies to try. Of all combinations of their values, these were best or nearly best over
random costs."""

PERTURBATIONS = 24
"""Orders to make for slightly changed costs, with which a greedy policy can find a better order."""

MAX_PERTURBATION = 0.1
"""Maximum relative change of the times of F, B and W for these orders."""


def search_schedule(
    ranks: int,
    chunks: int,
    microbatches: int,
    costs: ActionCosts,
    memory_limit: Seconds | None = None,
    placement: Placement | None = None,
) -> Schedule:
    """Return the order with the shortest step that was found.

    It is never slower than a named schedule with the same limit and placement.

    Args:
        ranks: Pipeline ranks.
        chunks: Stages per rank.
        microbatches: Microbatches per step.
        costs: Must be bitwise equal on all ranks.
        memory_limit: Live activations of a rank in units of its share of the layers; default
            `ranks`, as on 1F1B's first rank.
        placement: How stages are placed on ranks; default whichever is better.

    Raises:
        UserError: For a limit of less than one activation.
    """
    limit = ranks if memory_limit is None else memory_limit
    if not limit >= 1:
        raise UserError(f"a limit of {limit} live activations holds no microbatch; use 1 or more")
    capacity = int(min(limit, microbatches) * chunks)
    choices: Iterable[Placement] = (placement,) if placement else POLICIES
    placements = {
        list_ranks_by_stage(ranks, chunks, choice): choice for choice in reversed([*choices])
    }
    attempts = [
        (SchedulingProblem.from_costs(rank_of, microbatches, costs, capacity), policy)
        for rank_of, choice in placements.items()
        for policy in POLICIES[choice]
    ]
    candidates = generate_named_candidates(ranks, chunks, microbatches, limit)
    encoded_schedules = chain(
        (encoded for encoded in candidates if encoded.rank_of in placements),
        (
            schedule_greedily(problem, policy)
            for problem, policy in _order_attempts(attempts, costs)
        ),
    )
    best: Timeline | None = None
    for encoded in encoded_schedules:
        timeline = simulate(encoded, costs)
        if max(timeline.peak_activations) <= limit and (best is None or timeline.time < best.time):
            best = timeline
    assert best is not None
    steps = best.encoded.steps
    return Schedule(tuple(tuple(map(best.encoded.decode_action, rank)) for rank in steps))


def generate_named_candidates(
    ranks: int, chunks: int, microbatches: int, limit: Seconds
) -> Iterator[EncodedSchedule]:
    """Yield the named schedules of this size, except those that exceed the limit.

    Args:
        ranks: Pipeline ranks.
        chunks: Stages per rank.
        microbatches: Microbatches per step.
        limit: Live activations of a rank in units of its share of the layers.
    """
    sizes = PipelineSizes(ranks, chunks, microbatches)
    for schedule in NAMED_SCHEDULES.values():
        fits = int(schedule.count_live(sizes)) <= limit * chunks
        if fits and not any(find_name_mistakes(schedule, ranks, chunks, microbatches)):
            yield encode_schedule(schedule.build(sizes))


def _order_attempts(
    attempts: list[tuple[SchedulingProblem, GreedyPolicy]], costs: ActionCosts
) -> Iterator[tuple[SchedulingProblem, GreedyPolicy]]:
    """Yield the attempts, beginning with the fastest ones on fewer microbatches, then the best
    three with slightly changed costs, as many as the budget allows."""
    problem, _ = attempts[0]
    fewer = TRIAL_BUDGET * problem.microbatches // (problem.actions * len(attempts))
    fewer = max(1, min(fewer, problem.microbatches))
    times = [
        simulate(schedule_greedily(replace(attempt, microbatches=fewer), policy), costs).time
        for attempt, policy in attempts
    ]
    ranked = [attempts[number] for number in sorted(range(len(attempts)), key=times.__getitem__)]
    affordable = max(1, BUDGET // problem.actions)
    return islice(chain(ranked, _perturb(ranked[:3])), affordable)


def _perturb(
    attempts: list[tuple[SchedulingProblem, GreedyPolicy]],
) -> Iterator[tuple[SchedulingProblem, GreedyPolicy]]:
    random = Random(0)
    for problem, policy in islice(cycle(attempts), PERTURBATIONS):
        forward, backward, weight = (
            [value * factor for value in values]
            for values in problem.seconds
            for factor in [1 + random.uniform(-MAX_PERTURBATION, MAX_PERTURBATION)]
        )
        yield replace(problem, seconds=(forward, backward, weight)), policy
