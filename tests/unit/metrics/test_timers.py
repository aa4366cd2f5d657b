"""Timers: however they nest, the parts of a step sum to the step."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megaframe.metrics.timers import PARTS, StepTimer

leaves = st.integers(0, 10**9)
programs = st.recursive(
    st.lists(leaves, max_size=4),
    lambda inner: st.lists(st.tuples(st.sampled_from(PARTS), inner) | leaves, max_size=4),
    max_leaves=12,
)


class Clock:
    """A clock in nanoseconds that advances only when a test says so."""

    def __init__(self) -> None:
        self.now = 17

    def __call__(self) -> int:
        return self.now


def run(program, timer, clock, part, expected) -> None:
    for item in program:
        if isinstance(item, int):
            clock.now += item
            expected[part] += item
        else:
            with timer.time(item[0]):
                run(item[1], timer, clock, item[0], expected)


@given(st.lists(programs, min_size=1, max_size=3))
def test_time_goes_to_the_innermost_part_and_none_is_lost(steps):
    clock = Clock()
    timer = StepTimer(clock)
    clock.now += 5  # before the first step, so it counts for none
    for program in steps:
        timer.start()
        begin, expected = clock.now, Counter(dict.fromkeys(PARTS, 0))
        run(program, timer, clock, "other", expected)
        parts = timer.take().sum_parts()
        assert parts == expected
        assert sum(parts.values()) == clock.now - begin


def test_an_error_inside_closes_the_part():
    clock = Clock()
    timer = StepTimer(clock)
    timer.start()
    with pytest.raises(ZeroDivisionError), timer.time("data"):
        clock.now += 3
        raise ZeroDivisionError
    clock.now += 4
    assert timer.take().sum_parts() == dict.fromkeys(PARTS, 0) | {"data": 3, "other": 4}


def test_a_part_that_is_open_at_the_end_of_a_step_goes_on_in_the_next():
    clock = Clock()
    timer = StepTimer(clock)
    timer.start()
    with timer.time("checkpoint"):
        clock.now += 3
        assert timer.take().sum_parts()["checkpoint"] == 3
        clock.now += 4
    assert timer.take().sum_parts()["checkpoint"] == 4


def transfer(timer, clock, waits, size, before, waited, late=True):
    """Wait for a transfer from `before` after its start, for a duration of `waited`."""
    started = waits.start()
    clock.now += before
    with waits:
        clock.now += waited
    waits.record_arrival(started, size, late)


def test_of_a_wait_for_a_message_the_way_on_a_free_link_is_communication_the_rest_bubble():
    clock = Clock()
    timer = StepTimer(clock)
    waits = timer.time_messages((0, 1), 5e-9)
    for waited in (3, 20):
        transfer(timer, clock, waits, 100, 7, waited)
    split = timer.take()
    expected = {"bubble": 15, "communication/pipeline": 3 + 5, "other": 14}
    assert split.sum_parts() == dict.fromkeys(PARTS, 0) | expected
    assert split.compute_rates() == {"pipeline": pytest.approx(100 / 5e-9)}


def test_rates_are_of_transfers_that_were_waited_for():
    clock = Clock()
    timer = StepTimer(clock)
    waits = timer.time_waits("data")
    transfer(timer, clock, waits, 1000, 1, 9)
    transfer(timer, clock, waits, 10**9, 90, 2)  # it may have arrived long before the wait
    transfer(timer, clock, waits, 10**9, 0, 9, late=False)
    transfer(timer, clock, waits, 2000, 0, 5)
    split = timer.take()
    assert split.sum_parts()["communication/data"] == 25
    assert split.compute_rates() == {"data": pytest.approx(3000 / 15e-9)}


def test_what_an_evaluation_waits_for_stays_its_own():
    clock = Clock()
    timer = StepTimer(clock)
    with timer.time("evaluation"):
        transfer(timer, clock, timer.time_waits("data"), 1, 1, 9)
    split = timer.take()
    assert split.sum_parts() == dict.fromkeys(PARTS, 0) | {"evaluation": 10}
    assert split.compute_rates() == {}


class ClockEvent:
    """Stands for an event of a GPU's stream, whose time is known once the stream has passed it."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock


def test_moments_may_be_known_only_later():
    times: dict[ClockEvent, int] = {}
    events = []

    def note() -> ClockEvent:
        events.append(ClockEvent(Clock()))
        return events[-1]

    timer = StepTimer(note, lambda start, end: times[end] - times[start])
    timer.start()
    with timer.time("compute"), timer.time_waits("data"):
        pass
    split = timer.take()
    times |= {event: 10 * number**2 for number, event in enumerate(events)}
    parts = split.sum_parts()
    assert sum(parts.values()) == times[events[-1]] - times[events[1]]
    assert parts["communication/data"] == times[events[4]] - times[events[3]]
