"""Simulate: when every action of a schedule runs, given what the actions take.

Exact costs are counted in whole ticks of their greatest common divisor: the walk adds integers, and
the closed forms hold to equality.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property

from megaframe.schedule.actions import Action, Kind
from megaframe.schedule.check import deadlock
from megaframe.schedule.costs import Costs, Seconds
from megaframe.schedule.schedule import Schedule
from megaframe.schedule.walk import Program, Walk, flatten, live_activations, walk


@dataclass(frozen=True)
class Interval:
    """One compute action in time. chunk: the place of its stage among those of the rank. fused: a
    backward that includes the gradient of the weights."""

    action: Action
    start: Seconds
    end: Seconds
    chunk: int
    fused: bool


@dataclass(frozen=True)
class Transfer:
    """A tensor on its way from rank `source` to rank `target`, between the two compute actions that
    make and take it."""

    producer: Action
    consumer: Action
    source: int
    target: int
    start: Seconds
    end: Seconds


@dataclass(frozen=True)
class Timeline:
    """What a simulation found; all times in seconds. The fields hold its integers: ticks of `tick`
    seconds by code (`Program`) and by rank.

    tick: exact costs have one, their greatest common divisor; with floats it is None and the
    fields are seconds.
    """

    program: Program
    walked: Walk
    durations: Sequence[Seconds]
    comm: Seconds
    tick: Fraction | None

    def _seconds(self, ticks: Seconds) -> Seconds:
        return ticks if self.tick is None else ticks * self.tick

    @cached_property
    def time(self) -> Seconds:
        """From the start of the step to the end of the last rank's last action."""
        return self._seconds(max(self.walked.ends))

    @cached_property
    def work(self) -> tuple[Seconds, ...]:
        """Time that each rank computes."""
        durations = self.durations
        return tuple(
            self._seconds(sum(durations[code] for code in steps)) for steps in self.program.steps
        )

    @cached_property
    def spans(self) -> tuple[Seconds, ...]:
        """Time from the start of each rank's first action to the end of its last."""
        starts = (self.walked.starts[steps[0]] or 0 for steps in self.program.steps)
        return tuple(
            self._seconds(end - start) for end, start in zip(self.walked.ends, starts, strict=True)
        )

    @cached_property
    def bubbles(self) -> tuple[Seconds, ...]:
        """Of each rank, the waiting within its own span: the zero-bubble papers' measure, in which
        a rank may begin its next step while others finish this one."""
        return tuple(span - work for span, work in zip(self.spans, self.work, strict=True))

    @property
    def bubble_time(self) -> Seconds:
        """Time that a rank waits in the whole step, on average over the ranks."""
        total = sum(self.work)
        mean = (
            total / len(self.work) if isinstance(total, float) else Fraction(total, len(self.work))
        )
        return self.time - mean

    @property
    def bubble(self) -> Seconds:
        """Fraction of the whole step, over all ranks, in which nothing is computed."""
        return self.bubble_time / self.time if self.time else 0

    @property
    def idle(self) -> tuple[Seconds, ...]:
        """Time of the whole step in which each rank computes nothing."""
        return tuple(self.time - work for work in self.work)

    @cached_property
    def peak_activations(self) -> tuple[Fraction, ...]:
        """Of each rank, as `live_activations` counts them."""
        return live_activations(self.program)

    @cached_property
    def compute(self) -> tuple[tuple[Interval, ...], ...]:
        """The compute actions of each rank, in order."""
        return tuple(tuple(self._intervals(steps)) for steps in self.program.steps)

    def _intervals(self, steps: Sequence[int]) -> Iterator[Interval]:
        program, starts = self.program, self.walked.starts
        for code in steps:
            if code >= 3 * program.block:
                continue
            begin, duration, action = starts[code], self.durations[code], program.action(code)
            assert begin is not None and action.stage is not None
            rank = program.rank_of[action.stage]
            yield Interval(
                action,
                self._seconds(begin),
                self._seconds(begin + duration),
                program.rank_of[: action.stage].count(rank),
                action.kind is Kind.B and not program.split[code - program.block],
            )

    @cached_property
    def transfers(self) -> tuple[Transfer, ...]:
        """The tensors that go between ranks, in order of arrival."""
        found = sorted(self._transfers(), key=lambda transfer: transfer.end)
        return tuple(found)

    def _transfers(self) -> Iterator[Transfer]:
        program, size = self.program, self.program.microbatches
        for row, (reach, edge) in enumerate(program.links()):
            if edge is None:
                continue
            for code in range(row * size, (row + 1) * size):
                end = self.walked.arrivals[code + reach]
                assert end is not None
                producer = program.action(code % (3 * program.block))
                consumer = program.action(code + reach)
                start, stop = self._seconds(end - self.comm), self._seconds(end)
                yield Transfer(producer, consumer, *edge, start, stop)


def simulate(schedule: Schedule | Program, costs: Costs) -> Timeline:
    """Run a schedule that `check` accepts, or a part of one that is a schedule itself, on `costs`.

    A tensor leaves when its producer is done and what left before it on the same edge has arrived;
    it arrives `costs.comm` later. Raises `UserError` for a deadlock and for costs of another number
    of stages.
    """
    program = schedule if isinstance(schedule, Program) else flatten(schedule)
    per_stage = costs.per_stage(len(program.rank_of))
    comm, tick = costs.comm, _tick((*sum(per_stage, ()), costs.comm))
    if tick is not None:
        per_stage = tuple(tuple(int(value / tick) for value in values) for values in per_stage)
        comm = int(comm / tick)
    durations = _durations(program, *per_stage)
    walked = walk(program, durations, comm)
    if walked.stuck:
        raise deadlock(program, walked)
    return Timeline(program, walked, durations, comm, tick)


def _tick(values: Iterable[Seconds]) -> Fraction | None:
    """The greatest common divisor, None with floats."""
    found = set(values)
    if any(isinstance(value, float) for value in found):
        return None
    fractions = [Fraction(value) for value in found]
    whole = math.lcm(*(value.denominator for value in fractions))
    divisor = math.gcd(*(int(value * whole) for value in fractions))
    return Fraction(divisor or 1, whole)


def _durations(
    program: Program,
    forward: Sequence[Seconds],
    backward: Sequence[Seconds],
    weight: Sequence[Seconds],
) -> list[Seconds]:
    """Of every code: a backward takes B + W unless there is a W of its own; sending takes none."""
    fused = [b + w for b, w in zip(backward, weight, strict=True)]
    rows = (*forward, *fused, *weight, *[0] * (2 * len(forward)))
    durations = [value for value in rows for _ in range(program.microbatches)]
    for number, split in enumerate(program.split):
        if split:
            durations[program.block + number] = backward[number // program.microbatches]
    return durations
