"""Learning rates at the landmarks of their schedules."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megaframe.config import OptimConfig
from megaframe.optim.lr_schedule import compute_learning_rate

KINDS = ("constant", "cosine", "linear", "wsd", "inverse_sqrt")


@pytest.mark.parametrize("kind", KINDS)
def test_warm_up_is_linear_and_never_zero(kind):
    optim = OptimConfig(schedule=kind, lr=1.0, warmup=4)
    rates = [compute_learning_rate(optim, update, 100) for update in range(5)]
    assert rates == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])


@pytest.mark.parametrize(
    ("kind", "decay", "points"),
    [
        ("constant", None, {0: 1.0, 99: 1.0}),
        ("cosine", None, {0: 1.0, 50: 0.55, 100: 0.1, 150: 0.1}),
        ("cosine", 50, {25: 0.55, 50: 0.1, 99: 0.1}),
        ("linear", None, {0: 1.0, 25: 0.775, 100: 0.1}),
        ("wsd", None, {0: 1.0, 80: 1.0, 90: 0.55, 100: 0.1}),
        ("wsd", 10, {90: 1.0, 95: 0.55, 100: 0.1}),
        ("inverse_sqrt", None, {1: 1.0, 4: 0.5, 25: 0.2, 1000: 0.1}),
    ],
)
def test_learning_rate_at_landmarks(kind, decay, points):
    optim = OptimConfig(schedule=kind, lr=1.0, min_lr=0.1, decay=decay)
    assert {u: compute_learning_rate(optim, u, 100) for u in points} == pytest.approx(points)


@given(st.sampled_from(KINDS), st.integers(0, 50), st.integers(1, 200), st.integers(0, 300))
def test_rates_stay_between_the_two_and_only_fall_after_warm_up(kind, warmup, steps, update):
    optim = OptimConfig(schedule=kind, lr=1.0, min_lr=0.1, warmup=warmup)
    current_rate, later = (compute_learning_rate(optim, u, steps) for u in (update, update + 1))
    rounding = 4 * 2.0**-53  # of the few operations that make a rate near one
    assert 0 < current_rate <= 1.0 + rounding
    if update >= warmup:
        assert 0.1 - rounding <= later <= current_rate + rounding
