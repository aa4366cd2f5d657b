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
from megaframe.schedule.building_blocks import Placement, ranks_of_stages
from megaframe.schedule.costs import Costs, Seconds
from megaframe.schedule.event_simulation import Program, flatten
from megaframe.schedule.greedy import Problem, Rule, greedy
from megaframe.schedule.limits import name_mistakes
from megaframe.schedule.named import GENERATORS, live_at_least, named
from megaframe.schedule.schedule import Schedule
from megaframe.schedule.simulate import Timeline, simulate

BUDGET = 100_000
"""Actions that may be placed for whole orders: about a quarter of a second. At least one order is
always made."""

TRIAL = 40_000
"""Actions that may be placed before that, on fewer microbatches, to see which rules do well."""

RULES: Mapping[Placement, tuple[Rule, ...]] = {
    "loop": (
        Rule(lead=2, turns=True),
        Rule(lead=2, turns=True, patience=0.25),
        Rule(lead=1, turns=True, patience=0.5),
        Rule(lead=1.5, patience=0.5),
        Rule(),
        Rule(patience=0.25),
    ),
    "vee": (Rule(), Rule(patience=0.25), Rule(patience=0.5), Rule(patience=0.75)),
}
"""The rules to try. Of all combinations of their values, these were best or nearly best over random
costs."""

SHAKES = 24
"""Orders to make for slightly changed costs, with which a greedy rule can find a better order."""

SHAKEN_BY = 0.1
"""Maximum relative change of the times of F, B and W for these orders."""


def search(
    ranks: int,
    chunks: int,
    microbatches: int,
    costs: Costs,
    memory_limit: Seconds | None = None,
    placement: Placement | None = None,
) -> Schedule:
    """Return the order with the shortest step that was found. It is never slower than a named
    schedule with the same limit and placement.

    costs: must be bitwise equal on all ranks.
    memory_limit: live activations of a rank in units of its share of the layers; default `ranks`,
    as on 1F1B's first rank.
    placement: how stages are placed on ranks; default whichever is better.
    Raises `UserError` for a limit of less than one activation.
    """
    limit = ranks if memory_limit is None else memory_limit
    if not limit >= 1:
        raise UserError(f"a limit of {limit} live activations holds no microbatch; use 1 or more")
    capacity = int(min(limit, microbatches) * chunks)
    choices: Iterable[Placement] = (placement,) if placement else RULES
    places = {ranks_of_stages(ranks, chunks, choice): choice for choice in reversed([*choices])}
    tries = [
        (Problem.of(place, microbatches, costs, capacity), rule)
        for place, choice in places.items()
        for rule in RULES[choice]
    ]
    candidates = named_candidates(ranks, chunks, microbatches, limit)
    programs = chain(
        (program for program in candidates if program.rank_of in places),
        (greedy(problem, rule) for problem, rule in _promising(tries, costs)),
    )
    best: Timeline | None = None
    for program in programs:
        found = simulate(program, costs)
        if max(found.peak_activations) <= limit and (best is None or found.time < best.time):
            best = found
    assert best is not None
    steps = best.program.steps
    return Schedule(tuple(tuple(map(best.program.action, rank)) for rank in steps))


def named_candidates(
    ranks: int, chunks: int, microbatches: int, limit: Seconds
) -> Iterator[Program]:
    """Yield the named schedules of this size, except those that are known to exceed the limit."""
    for name in GENERATORS:
        fits = live_at_least(name, ranks, chunks, microbatches) <= limit
        if fits and not any(name_mistakes(name, ranks, chunks, microbatches)):
            yield flatten(named(name, ranks, chunks, microbatches))


def _promising(tries: list[tuple[Problem, Rule]], costs: Costs) -> Iterator[tuple[Problem, Rule]]:
    """Yield the tries, beginning with the fastest ones on fewer microbatches, then the best three
    with slightly changed costs, as many as the budget allows."""
    problem, _ = tries[0]
    fewer = TRIAL * problem.microbatches // (problem.actions * len(tries))
    fewer = max(1, min(fewer, problem.microbatches))
    times = [
        simulate(greedy(replace(one, microbatches=fewer), rule), costs).time for one, rule in tries
    ]
    ranked = [tries[number] for number in sorted(range(len(tries)), key=times.__getitem__)]
    affordable = max(1, BUDGET // problem.actions)
    return islice(chain(ranked, _shaken(ranked[:3])), affordable)


def _shaken(tries: list[tuple[Problem, Rule]]) -> Iterator[tuple[Problem, Rule]]:
    random = Random(0)
    for problem, rule in islice(cycle(tries), SHAKES):
        forward, backward, weight = (
            [value * factor for value in values]
            for values in problem.seconds
            for factor in [1 + random.uniform(-SHAKEN_BY, SHAKEN_BY)]
        )
        yield replace(problem, seconds=(forward, backward, weight)), rule
