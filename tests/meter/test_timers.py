"""The parts of a step sum to the step, however timers nest."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megaframe.meter.timers import PARTS, StepTimer

leaves = st.integers(0, 10**9)
programs = st.recursive(
    st.lists(leaves, max_size=4),
    lambda inner: st.lists(st.tuples(st.sampled_from(PARTS), inner) | leaves, max_size=4),
    max_leaves=12,
)


class Clock:
    """Nanoseconds that pass only when the program says so."""

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


@settings(deadline=None, max_examples=100)
@given(st.lists(programs, min_size=1, max_size=3))
def test_time_goes_to_the_innermost_part_and_none_is_lost(steps):
    clock = Clock()
    timer = StepTimer(clock)
    clock.now += 5  # before the first step: no step's time
    for program in steps:
        timer.start()
        begin, expected = clock.now, Counter(dict.fromkeys(PARTS, 0))
        run(program, timer, clock, "other", expected)
        taken = timer.take().parts()
        assert taken == expected
        assert sum(taken.values()) == clock.now - begin


def test_an_error_inside_closes_the_part():
    clock = Clock()
    timer = StepTimer(clock)
    timer.start()
    with pytest.raises(ZeroDivisionError), timer.time("data"):
        clock.now += 3
        raise ZeroDivisionError
    clock.now += 4
    assert timer.take().parts() == dict.fromkeys(PARTS, 0) | {"data": 3, "other": 4}


def test_a_part_that_is_open_at_the_end_of_a_step_goes_on_in_the_next():
    clock = Clock()
    timer = StepTimer(clock)
    timer.start()
    with timer.time("checkpoint"):
        clock.now += 3
        assert timer.take().parts()["checkpoint"] == 3
        clock.now += 4
    assert timer.take().parts()["checkpoint"] == 4
