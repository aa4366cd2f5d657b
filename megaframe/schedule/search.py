"""Search: the best order that can be found for given costs under a limit of memory.

All ranks search on their own and must find the same, so work is bounded by counting actions, never
by a clock, and equal arguments give equal orders.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

from megaframe.errors import UserError
from megaframe.schedule.costs import Costs, Seconds
from megaframe.schedule.greedy import Problem, Rule, greedy
from megaframe.schedule.limits import name_mistakes
from megaframe.schedule.named import ALL_FORWARDS_FIRST, GENERATORS, named
from megaframe.schedule.orders import Placement, ranks_of_stages
from megaframe.schedule.schedule import Schedule
from megaframe.schedule.simulate import Timeline, simulate
from megaframe.schedule.walk import Program, flatten

BUDGET = 100_000
"""Actions that greedy rules may place: about half a second. One rule may always run."""

TRIAL = 30_000
"""Actions for choosing among the rules where not all can run, on fewer microbatches."""

RULES: Mapping[Placement, tuple[Rule, ...]] = {
    "loop": (
        Rule(lead=2, turns=True),
        Rule(lead=1, turns=True, patience=0.5),
        Rule(lead=2, turns=True, patience=0.5),
        Rule(),
        Rule(patience=0.5),
        Rule(lead=1.5),
    ),
    "vee": (Rule(), Rule(patience=0.5), Rule(patience=1)),
}
"""Those of all combinations of their values that were best, or nearly so, over random costs."""


def search(
    ranks: int,
    chunks: int,
    microbatches: int,
    costs: Costs,
    memory_limit: Seconds | None = None,
    placement: Placement | None = None,
) -> Schedule:
    """The order with the shortest step that was found; never longer than that of a named schedule
    within the same limit and placement.

    costs: every rank must give the same ones, to the last bit. memory_limit: live activations of a
    rank in units of its share of the layers; default `ranks`, those of 1F1B's first rank.
    placement: how stages lie on the ranks; default whichever is better.
    Raises `UserError` for a limit of less than one activation.
    """
    limit = ranks if memory_limit is None else memory_limit
    if not limit >= 1:
        raise UserError(f"a limit of {limit} live activations holds no microbatch; use 1 or more")
    choices: Iterable[Placement] = (placement,) if placement else RULES
    places = {ranks_of_stages(ranks, chunks, choice): choice for choice in reversed([*choices])}
    tries = [
        (Problem.of(place, microbatches, costs, int(limit * chunks)), rule)
        for place, choice in places.items()
        for rule in RULES[choice]
    ]
    programs = [p for p in _named(ranks, chunks, microbatches, limit) if p.rank_of in places]
    programs += (greedy(*one) for one in _most_promising(tries, costs))
    best: Timeline | None = None
    for program in programs:
        found = simulate(program, costs)
        if max(found.peak_activations) <= limit and (best is None or found.time < best.time):
            best = found
    assert best is not None
    steps = best.program.steps
    return Schedule(tuple(tuple(map(best.program.action, rank)) for rank in steps))


def _named(ranks: int, chunks: int, microbatches: int, limit: Seconds) -> Iterator[Program]:
    """The named schedules of this size, without those that cannot keep the limit."""
    for name in GENERATORS:
        too_large = name in ALL_FORWARDS_FIRST and microbatches > limit
        if not too_large and not any(name_mistakes(name, ranks, chunks, microbatches)):
            yield flatten(named(name, ranks, chunks, microbatches))


def _most_promising(tries: list[tuple[Problem, Rule]], costs: Costs) -> list[tuple[Problem, Rule]]:
    """Those that the budget affords: the fastest ones on fewer microbatches."""
    problem, _ = tries[0]
    affordable = max(1, BUDGET // problem.actions)
    if affordable >= len(tries):
        return tries
    fewer = max(1, TRIAL * problem.microbatches // (problem.actions * len(tries)))
    times = [
        simulate(greedy(replace(one, microbatches=fewer), rule), costs).time for one, rule in tries
    ]
    ranked = sorted(range(len(tries)), key=times.__getitem__)
    return [tries[number] for number in ranked[:affordable]]
