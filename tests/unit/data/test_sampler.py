from fractions import Fraction
from math import ceil, floor

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from megaframe.data.blend import Blend, round_weights

weight_lists = st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=12)


def choose_sources_slowly(weights, size):
    """Choose sources by earliest deadline first, comparing all of them for every sample."""
    shares = [Fraction(weight, sum(weights)) for weight in weights]
    counts, sources = [0] * len(weights), []
    for n in range(size):
        ready = [i for i, w in enumerate(shares) if floor(counts[i] / w) <= n]
        source = min(ready, key=lambda i: (ceil((counts[i] + 1) / shares[i]), i))
        counts[source] += 1
        sources.append(source)
    return sources


@given(weight_lists, st.integers(1, 300))
def test_counts_are_the_share_rounded_down_or_up_at_every_sample(weights, size):
    blend = Blend.start(weights)
    sources, _, _ = blend.take(size)
    total = sum(blend.weights)
    for index, weight in enumerate(blend.weights):
        counts = np.cumsum(sources == index).tolist()
        for n, count in enumerate(counts, start=1):
            assert n * weight // total <= count <= -(-n * weight // total)


@given(weight_lists, st.integers(1, 80))
def test_equals_a_slow_search(weights, size):
    blend = Blend.start(weights)
    assert blend.take(size)[0].tolist() == choose_sources_slowly(blend.weights, size)


@given(weight_lists, st.lists(st.integers(0, 40), min_size=1, max_size=8))
def test_the_sequence_does_not_depend_on_how_it_is_taken(weights, sizes):
    blend = Blend.start(weights)
    whole_sources, whole_numbers, end = blend.take(sum(sizes))
    parts = []
    for size in sizes:
        sources, numbers, blend = blend.take(size)
        parts.append((sources, numbers))
    assert np.concatenate([p[0] for p in parts]).tolist() == whole_sources.tolist()
    assert np.concatenate([p[1] for p in parts]).tolist() == whole_numbers.tolist()
    assert blend == end


@given(
    st.integers(1, 6).flatmap(
        lambda k: st.lists(st.lists(st.floats(0.01, 100), min_size=k, max_size=k), min_size=2)
    ),
    st.integers(1, 60),
)
def test_changed_weights_never_repeat_and_never_skip_a_sample(many_weights, size):
    consumed, numbers_by_source = None, {}
    for weights in many_weights:
        sources, numbers, blend = Blend.start(weights, consumed).take(size)
        consumed = blend.consumed
        for source, number in zip(sources.tolist(), numbers.tolist(), strict=True):
            numbers_by_source.setdefault(source, []).append(number)
    for source, numbers in numbers_by_source.items():
        assert numbers == list(range(consumed[source]))


def test_the_largest_deficit_rule_would_break_the_bound():
    """By largest deficit, a source lags its share by more than one sample; by deadline, never."""
    weights = [11, 11, 1, 1, 1]
    total = sum(weights)
    shares = [weight / total for weight in weights]
    counts, largest_deficit = [0] * len(weights), 0.0
    for n in range(1, 200):
        deficits = [w * n - count for w, count in zip(shares, counts, strict=True)]
        counts[deficits.index(max(deficits))] += 1
        largest_deficit = max(
            largest_deficit, *(w * n - c for w, c in zip(shares, counts, strict=True))
        )
    assert largest_deficit > 1
    sources, _, _ = Blend.start(weights).take(199)
    ours = np.cumsum(np.eye(len(weights))[sources], axis=0)
    assert np.abs(ours - np.arange(1, 200)[:, None] * shares).max() < 1


def test_whole_weights_keep_ratios_and_never_vanish():
    assert round_weights([0.3, 0.3]) == round_weights([7, 7])
    assert round_weights([2, 1]) == (2**40, 2**39)
    assert round_weights([1e30, 1.0]) == (2**40, 1)


def test_thousands_of_sources():
    rng = np.random.default_rng(0)
    weights = rng.lognormal(0, 2, 3000)
    blend = Blend.start(weights.tolist())
    for _ in range(3):
        _, numbers, blend = blend.take(2000)
        assert numbers.min() >= 0
    shares = np.array(blend.weights) / sum(blend.weights)
    assert np.abs(np.array(blend.consumed) - shares * 6000).max() < 1
