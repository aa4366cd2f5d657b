"""Trials that lag behind are stopped: never the best, and at each rung the worse half."""

import math

from hypothesis import given
from hypothesis import strategies as st

from megaframe.run_queue.halving import find_lagging


def test_the_worse_half_is_stopped_at_each_rung():
    histories = {
        "a": [(step, 1.0) for step in range(1, 9)],
        "b": [(step, 2.0) for step in range(1, 9)],
        "c": [(step, 3.0) for step in range(1, 3)],
        "d": [(2, math.nan)],
        "young": [(1, 9.0)],
    }
    assert find_lagging(histories, 2) == {"b", "c", "d"}
    assert find_lagging(histories, 4) == {"b"}
    assert find_lagging({"alone": [(5, 1.0)], "new": []}, 1) == set()


LOSSES = st.lists(st.floats(0, 10), min_size=1, max_size=12)


@given(st.dictionaries(st.text("abc", min_size=1), LOSSES, min_size=1), st.integers(1, 4))
def test_more_than_half_of_those_who_come_to_a_rung_never_leave_there(losses, grace):
    histories = {
        name: [(step + 1, value) for step, value in enumerate(values)]
        for name, values in losses.items()
    }
    lagging = find_lagging(histories, grace)
    assert not any(len(losses[name]) < grace for name in lagging)
    reached = [values for values in losses.values() if len(values) >= grace]
    if reached and max(map(len, reached)) < 2 * grace:  # there is one rung
        assert len(lagging) == len(reached) // 2
        going_on = [
            losses[n][grace - 1] for n in losses.keys() - lagging if len(losses[n]) >= grace
        ]
        assert max(going_on) <= min((losses[n][grace - 1] for n in lagging), default=math.inf)
    best = min(losses, key=lambda name: max(losses[name]))
    is_best_throughout = all(
        max(losses[best]) < min(values) for name, values in losses.items() if name != best
    )
    assert not (is_best_throughout and best in lagging)
