"""Greedy: makes an order by running it: whenever a rank is free, a rule picks its next action.

What a microbatch still needs decides whether it may start: a chunk is begun only if room is left
for one activation of each later chunk of the rank. So the microbatch that is furthest can always go
on, and no limit of memory, however tight, stops the pipeline.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from math import inf

from megaframe.schedule.costs import Costs
from megaframe.schedule.walk import Program


@dataclass(frozen=True)
class Rule:
    """What a free rank prefers. Backwards come first, then forwards, then weight gradients.

    lead: forwards that a rank may be ahead of its backwards, in units of its distance from the last
    rank and at least one; None for as many as memory holds.
    turns: chunks take turns of a microbatch per rank; otherwise the later stage goes first.
    patience: a weight gradient waits for what arrives within this part of its own duration.
    """

    lead: float | None = None
    turns: bool = False
    patience: float = 0.0


@dataclass(frozen=True)
class Problem:
    """seconds: of F, B and W, each by stage. comm: seconds from rank to rank. capacity: activations
    that a rank may hold, one per chunk and microbatch; at least its number of chunks."""

    rank_of: tuple[int, ...]
    microbatches: int
    seconds: tuple[Sequence[float], Sequence[float], Sequence[float]]
    comm: float
    capacity: int

    @classmethod
    def of(
        cls, rank_of: tuple[int, ...], microbatches: int, costs: Costs, capacity: int
    ) -> Problem:
        """The problem for `costs`."""
        forward, backward, weight = (
            [float(value) for value in values] for values in costs.per_stage(len(rank_of))
        )
        seconds = (forward, backward, weight)
        return cls(rank_of, microbatches, seconds, float(costs.comm), capacity)

    @property
    def actions(self) -> int:
        """Number of actions of an order, all backwards split."""
        return 3 * len(self.rank_of) * self.microbatches


def greedy(problem: Problem, rule: Rule) -> Program:
    """The order that `rule` makes. Takes about two microseconds per action."""
    run = _Run(problem, rule)
    waking = run.waking
    while waking:
        now, rank = heappop(waking)
        if run.free[rank] <= now:
            chosen = run.choose(rank, now)
            if chosen is not None:
                run.start(rank, now, *chosen)
    return Program(problem.rank_of, problem.microbatches, tuple(run.steps))


_F, _B, _W = range(3)

_SLACK = 1e-6
"""Part of the longest action by which what is ready may still be late: sums that are equal differ
by rounding, and a rank must not turn to something else for that."""


class _Run:
    """The state of all ranks at some time. A rank that finds nothing to do is woken by what comes.

    done: by kind and stage, actions started. came: by kind and stage, when what the next ones wait
    for arrives, as far as it is known. live, ahead: by rank, activations held and forwards without
    their backward.
    """

    def __init__(self, problem: Problem, rule: Rule) -> None:
        rank_of, size = problem.rank_of, problem.microbatches
        stages, ranks = len(rank_of), max(problem.rank_of) + 1
        self.problem, self.rule = problem, rule
        self.seconds = problem.seconds
        self.slack = _SLACK * max(map(max, problem.seconds))
        self.stages = [[s for s in range(stages) if rank_of[s] == rank] for rank in range(ranks)]
        self.later = [sum(r == rank_of[s] for r in rank_of[s:]) for s in range(stages)]
        self.done = [[0] * stages for _ in range(3)]
        self.came: list[list[list[float]]] = [[[] for _ in range(stages)] for _ in range(2)]
        self.came[_F][0] = [0] * size
        self.free: list[float] = [0] * ranks
        self.live, self.ahead = [0] * ranks, [0] * ranks
        self.queue: list[deque[int]] = [deque() for _ in range(ranks)]
        self.steps: list[list[int]] = [[] for _ in range(ranks)]
        self.waking: list[tuple[float, int]] = [(0, rank) for rank in range(ranks)]
        self.bound = [self._bound(rank, ranks) for rank in range(ranks)]

    def _bound(self, rank: int, ranks: int) -> int:
        """The most forwards that a rank may be ahead."""
        if self.rule.lead is None:
            return self.problem.capacity
        chunks = len(self.stages[rank])
        return max(chunks, (chunks - 1) * ranks + int(self.rule.lead * (ranks - rank)))

    def choose(self, rank: int, now: float) -> tuple[int, int] | None:
        """Kind and stage of the next action of a free rank; None to wait for what comes."""
        ready, soonest = self._ready(_B, self.stages[rank], now)
        if ready is not None:
            return _B, ready
        room = self.problem.capacity - self.live[rank]
        room = min(room, self.bound[rank] - self.ahead[rank])
        stages = [stage for stage in self.stages[rank] if self.later[stage] <= room]
        ready, other = self._ready(_F, stages, now)
        if ready is not None:
            return _F, ready
        if not self.queue[rank]:
            return None
        stage = self.queue[rank][0]
        soonest = min(soonest, other)
        if soonest < now + self.rule.patience * self.seconds[_W][stage]:
            return None
        return _W, stage

    def _ready(self, kind: int, stages: Sequence[int], now: float) -> tuple[int | None, float]:
        """The stage whose next action of this kind goes first, and when another can be the soonest
        as far as is known."""
        best, first, soonest = None, (0, 0), inf
        turn = len(self.free) if self.rule.turns else 1 << 60
        for stage in stages:
            number, came = self.done[kind][stage], self.came[kind][stage]
            if number >= len(came):
                continue
            if came[number] > now + self.slack:
                soonest = min(soonest, came[number])
                continue
            key = (number // turn, stage if kind is _F and self.rule.turns else -stage)
            if best is None or key < first:
                best, first = stage, key
        return best, soonest

    def start(self, rank: int, now: float, kind: int, stage: int) -> None:
        """Start an action, and announce when its result arrives."""
        problem = self.problem
        number = self.done[kind][stage]
        self.done[kind][stage] = number + 1
        stages = len(problem.rank_of)
        self.steps[rank].append((kind * stages + stage) * problem.microbatches + number)
        end = self.free[rank] = now + self.seconds[kind][stage]
        heappush(self.waking, (end, rank))
        if kind == _W:
            self.queue[rank].popleft()
            self.live[rank] -= 1
        elif kind == _B:
            self.queue[rank].append(stage)
            self.ahead[rank] -= 1
            if stage:
                self._announce(_B, stage - 1, rank, end)
        else:
            self.live[rank] += 1
            self.ahead[rank] += 1
            if stage + 1 < stages:
                self._announce(_F, stage + 1, rank, end)
            else:
                self.came[_B][stage].append(end)

    def _announce(self, kind: int, stage: int, source: int, end: float) -> None:
        rank = self.problem.rank_of[stage]
        if rank == source:
            self.came[kind][stage].append(end)
            return
        arrival = end + self.problem.comm
        self.came[kind][stage].append(arrival)
        if arrival >= self.free[rank]:
            heappush(self.waking, (arrival, rank))
