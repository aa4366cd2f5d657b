"""Estimates of gradient noise: exact in expectation, for any division of tokens, and their averages
and advice."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tolerances import assert_near, near

from megaframe.config.batch_advice import BatchSettings, advise_batch
from megaframe.data_parallel.small_batches import (
    SmallBatches,
    count_data_ranks_of_experts,
    list_kinds,
)
from megaframe.layout import Layout
from megaframe.metrics.gradient_noise import NoiseAverages, estimate_noise

KINDS = [
    SmallBatches(),
    SmallBatches(by_microbatch=True),
    SmallBatches(2),
    SmallBatches(2, by_microbatch=True),
]
COUNTS = st.lists(st.lists(st.integers(1, 9), min_size=2, max_size=2), min_size=4, max_size=4).map(
    lambda rows: torch.tensor(rows, dtype=torch.float64)
)
SIZES = st.floats(0.1, 10.0)


@given(COUNTS, SIZES, SIZES)
def test_expected_norms_give_the_gradient_and_its_variance(tokens_DM, square, variance):
    """For all kinds at once, each over parameters with a share of both."""
    total = float(tokens_DM.sum())
    shares = [1.0, 2.0, 4.0, 8.0]
    small, whole = [], []
    for kind, share in zip(KINDS, shares, strict=True):
        parts = kind.sum_tokens(tokens_DM)
        assert float(parts.sum()) == total
        weights = parts / total
        expected = weights.square() * square + weights / total * variance
        small.append(share * float(expected.sum()))
        whole.append(share * (square + variance / total))
    actual = estimate_noise(KINDS, small, whole, tokens_DM)
    expected = [sum(shares) * square, sum(shares) * variance]
    # Two differences of numbers of this size, the second times the tokens.
    sizes = [s / (1 - 0.9) for s in (sum(whole), total * sum(whole))]
    for value, reference, size in zip(actual, expected, sizes, strict=True):
        assert_near(value, reference, 64, size=size)


@given(st.lists(st.lists(st.floats(-1, 1), min_size=2, max_size=2), min_size=3, max_size=3))
def test_the_mean_over_all_draws_of_a_batch_is_the_truth(samples):
    """Every batch of four that can be drawn from three samples, for two ranks with two each."""
    gradients = torch.tensor(samples, dtype=torch.float64)
    mean = gradients.mean(0)
    variance = float((gradients - mean).square().sum(1).mean())
    estimates = []
    for drawn in itertools.product(range(3), repeat=4):
        parts = gradients[list(drawn)].unflatten(0, (2, 2)).sum(1) / 4
        small, whole = float(parts.square().sum()), float(parts.sum(0).square().sum())
        estimate = estimate_noise([SmallBatches()], [small], [whole], torch.full((2, 1), 2.0))
        estimates.append(estimate)
    actual = torch.tensor(estimates, dtype=torch.float64).mean(0)
    expected = torch.tensor([float(mean.square().sum()), variance], dtype=torch.float64)
    assert_near(actual, expected, 400, size=32.0)


def test_one_small_batch_with_all_tokens_says_nothing():
    tokens_DM = torch.tensor([[3.0], [0.0]])
    assert estimate_noise([SmallBatches()], [1.0], [1.0], tokens_DM) is None
    assert estimate_noise([SmallBatches()], [1.0], [1.0], torch.zeros(2, 1)) is None


def test_averages_forget_the_first_steps_and_are_over_the_last_hundred_later():
    averages = NoiseAverages()
    assert averages.critical_batch is None
    for number in range(1, 398):
        averages = averages.add(float(number), 2.0 * number)
        # The k-th has the weight k (k + 1) (k + 2), and the mean of all is (4 n + 1) / 5.
        assert averages.squared_norm == near((4 * number + 1) / 5, 4 * number)
    assert averages.critical_batch == near(2.0, 2000)
    later = averages.add(1000.0, 0.0)
    assert later.squared_norm == near(0.99 * 317.8 + 0.01 * 1000, 2000)
    assert later.variance == near(0.99 * 635.6, 2000)
    assert NoiseAverages(-1.0, 5.0, 3).critical_batch is None


@pytest.mark.parametrize(
    ("layout", "data_ranks", "kinds"),
    [
        (Layout(data=4), 1, [SmallBatches()]),
        (Layout(data=4, tensor=2, expert=2), 1, [SmallBatches()]),
        (Layout(data=4, expert=2), 2, [SmallBatches(), SmallBatches(2)]),
        (Layout(data=4, tensor=2, expert=4, expert_tensor=2), None, [SmallBatches()]),
        (Layout(data=2, tensor=3, expert=2), None, [SmallBatches()]),
    ],
)
def test_experts_have_the_tokens_of_whole_data_ranks_or_are_left_out(layout, data_ranks, kinds):
    assert count_data_ranks_of_experts(layout) == data_ranks
    assert list(list_kinds(layout, 1)) == kinds
    assert set(list_kinds(layout, 2)) == {
        SmallBatches(kind.data_ranks, divided) for kind in kinds for divided in (False, True)
    }


def test_advice_follows_the_rule_of_the_optimizer():
    adam = BatchSettings(64, 1024, "adamw", 1e-3)
    sgd = BatchSettings(64, 1024, "sgd", 1e-3)
    text = advise_batch(adam, 4.5 * 65536)
    assert "294,912 tokens" in text and "1.22 times the fewest tokens and 5.5 times" in text
    assert "train.global_batch=256 with optim.lr=0.002, which grows as the root" in text
    assert "train.global_batch=256 with optim.lr=0.004, which grows as the batch" in advise_batch(
        sgd, 4.5 * 65536
    )
    smaller = advise_batch(adam, 16384)
    assert "train.global_batch=16 with optim.lr=0.0005" in smaller and "batch_ramp" in smaller
    assert advise_batch(adam, 65536).endswith("a fair exchange")
    assert advise_batch(adam, None).startswith("not known")
