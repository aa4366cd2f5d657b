"""Simulate: when every action of a schedule runs, given the durations of actions.

Exact costs are counted in whole ticks of their greatest common divisor. The walk then adds
integers, and closed forms can be tested for equality.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property

from megaframe.schedule.actions import Action, ActionKind
from megaframe.schedule.check import explain_deadlock
from megaframe.schedule.costs import ActionCosts, Seconds
from megaframe.schedule.event_simulation import (
    EncodedSchedule,
    EventTimes,
    count_live_activations,
    encode_schedule,
    simulate_events,
)
from megaframe.schedule.schedule import Schedule


@dataclass(frozen=True)
class ActionInterval:
    """The time of one compute action.

    Attributes:
        chunk: Index of its stage among the stages of the rank.
        fused: Whether it is a backward that includes the gradient of the weights.
    """

    action: Action
    start: Seconds
    end: Seconds
    chunk: int
    fused: bool


@dataclass(frozen=True)
class StageTransfer:
    """The transfer of a tensor from rank `source` to rank `target`, between the compute actions
    that produce and consume it."""

    producer: Action
    consumer: Action
    source: int
    target: int
    start: Seconds
    end: Seconds


@dataclass(frozen=True)
class Timeline:
    """The result of a simulation.

    Properties are in seconds. Fields are in ticks of `tick` seconds, by code (see
    `EncodedSchedule`) and by rank.

    Attributes:
        tick: The greatest common divisor of exact costs. With floats it is None, and the fields are
            in seconds too.
    """

    encoded: EncodedSchedule
    events: EventTimes
    durations: Sequence[Seconds]
    comm: Seconds
    tick: Fraction | None

    def _to_seconds(self, ticks: Seconds) -> Seconds:
        return ticks if self.tick is None else ticks * self.tick

    @cached_property
    def time(self) -> Seconds:
        """Time from the start of the step to the end of the last action on any rank."""
        return self._to_seconds(max(self.events.ends))

    @cached_property
    def work(self) -> tuple[Seconds, ...]:
        """Time during which each rank computes."""
        durations = self.durations
        return tuple(
            self._to_seconds(sum(durations[code] for code in steps)) for steps in self.encoded.steps
        )

    @cached_property
    def spans(self) -> tuple[Seconds, ...]:
        """Time from the start of each rank's first action to the end of its last."""
        starts = (self.events.starts[steps[0]] or 0 for steps in self.encoded.steps)
        return tuple(
            self._to_seconds(end - start)
            for end, start in zip(self.events.ends, starts, strict=True)
        )

    @cached_property
    def bubbles(self) -> tuple[Seconds, ...]:
        """Idle time of each rank within its own span.

        This is the measure of the zero-bubble papers, in which a rank may begin its next step while
        others finish this one.
        """
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
        """Idle time of each rank in the whole step."""
        return tuple(self.time - work for work in self.work)

    @cached_property
    def peak_activations(self) -> tuple[Fraction, ...]:
        """Maximum number of live activations of each rank, as in `count_live_activations`."""
        return count_live_activations(self.encoded)

    @cached_property
    def compute(self) -> tuple[tuple[ActionInterval, ...], ...]:
        """The compute actions of each rank, in order."""
        return tuple(tuple(self._list_intervals(steps)) for steps in self.encoded.steps)

    def _list_intervals(self, steps: Sequence[int]) -> Iterator[ActionInterval]:
        encoded, starts = self.encoded, self.events.starts
        for code in steps:
            if code >= 3 * encoded.block:
                continue
            begin, duration, action = (
                starts[code],
                self.durations[code],
                encoded.decode_action(code),
            )
            assert begin is not None and action.stage is not None
            rank = encoded.rank_of[action.stage]
            yield ActionInterval(
                action,
                self._to_seconds(begin),
                self._to_seconds(begin + duration),
                encoded.rank_of[: action.stage].count(rank),
                action.kind is ActionKind.B and not encoded.split_backwards[code - encoded.block],
            )

    @cached_property
    def transfers(self) -> tuple[StageTransfer, ...]:
        """The transfers between ranks, in order of arrival."""
        transfers = sorted(self._list_transfers(), key=lambda transfer: transfer.end)
        return tuple(transfers)

    def _list_transfers(self) -> Iterator[StageTransfer]:
        encoded, size = self.encoded, self.encoded.microbatches
        for row, (reach, edge) in enumerate(encoded.list_links()):
            if edge is None:
                continue
            for code in range(row * size, (row + 1) * size):
                end = self.events.arrivals[code + reach]
                assert end is not None
                producer = encoded.decode_action(code % (3 * encoded.block))
                consumer = encoded.decode_action(code + reach)
                start, stop = self._to_seconds(end - self.comm), self._to_seconds(end)
                yield StageTransfer(producer, consumer, *edge, start, stop)


def simulate(schedule: Schedule | EncodedSchedule, costs: ActionCosts) -> Timeline:
    """Simulate a schedule that `check` accepts, or a part of one that is itself a schedule.

    A transfer starts when its producer is done and the previous transfer on the same edge has
    arrived. It takes `costs.comm` seconds.

    Raises:
        UserError: For a deadlock, and for costs of another number of stages.
    """
    encoded = schedule if isinstance(schedule, EncodedSchedule) else encode_schedule(schedule)
    per_stage = costs.list_by_stage(len(encoded.rank_of))
    comm, tick = costs.comm, _find_common_divisor((*sum(per_stage, ()), costs.comm))
    if tick is not None:
        per_stage = tuple(tuple(int(value / tick) for value in values) for values in per_stage)
        comm = int(comm / tick)
    durations = _list_durations(encoded, *per_stage)
    events = simulate_events(encoded, durations, comm)
    if events.stuck:
        raise explain_deadlock(encoded, events)
    return Timeline(encoded, events, durations, comm, tick)


def _find_common_divisor(values: Iterable[Seconds]) -> Fraction | None:
    """Return the greatest common divisor, None if there are floats."""
    distinct = set(values)
    if any(isinstance(value, float) for value in distinct):
        return None
    fractions = [Fraction(value) for value in distinct]
    denominator = math.lcm(*(value.denominator for value in fractions))
    divisor = math.gcd(*(int(value * denominator) for value in fractions))
    return Fraction(divisor or 1, denominator)


def _list_durations(
    encoded: EncodedSchedule,
    forward: Sequence[Seconds],
    backward: Sequence[Seconds],
    weight: Sequence[Seconds],
) -> list[Seconds]:
    """Return the duration of every code. A backward takes B + W unless it has a separate W. Sends
    take no time of the rank."""
    fused = [b + w for b, w in zip(backward, weight, strict=True)]
    rows = (*forward, *fused, *weight, *[0] * (2 * len(forward)))
    durations = [value for value in rows for _ in range(encoded.microbatches)]
    for number, split in enumerate(encoded.split_backwards):
        if split:
            durations[encoded.block + number] = backward[number // encoded.microbatches]
    return durations
