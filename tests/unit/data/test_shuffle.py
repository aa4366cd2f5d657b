import tracemalloc
from math import ceil, factorial, sqrt

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from megaframe.data.shuffle import ROUNDS, derive_source_key, permute, sample_indices

MASK = 2**64 - 1
STEP, M1, M2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def mix(word):
    word = (word ^ (word >> 30)) * M1 & MASK
    word = (word ^ (word >> 27)) * M2 & MASK
    return word ^ (word >> 31)


def compute_index_slowly(number, size, key):
    """Compute one index of the same permutation in Python integers, which cannot overflow."""
    epoch, value = divmod(number, size)
    key = mix((key + (epoch + 1) * STEP) & MASK)
    a = ceil(sqrt(size))
    bounds = [a, -(-size // a)]
    while True:
        halves = [value % a, value // a]
        for r in range(ROUNDS):
            word = (halves[1 - r % 2] ^ mix((key + (r + 1) * STEP) & MASK)) * M1 & MASK
            word = ((word ^ (word >> 32)) * M2 & MASK) >> 32
            halves[r % 2] = (halves[r % 2] + (word * bounds[r % 2] >> 32)) % bounds[r % 2]
        value = halves[1] * a + halves[0]
        if value < size:
            return value


keys = st.integers(0, MASK)


@given(st.integers(1, 300), keys, st.integers(0, 2**20))
def test_each_epoch_visits_every_sample_once(size, key, epoch):
    indices = sample_indices(np.arange(size) + epoch * size, size, key)
    assert sorted(indices.tolist()) == list(range(size))


@given(st.integers(1, 2**40), keys, st.integers(0, 2**40))
def test_equals_the_same_arithmetic_in_unlimited_integers(size, key, number):
    numbers = np.array([number, number + 1, number + size], np.int64)
    expected = [compute_index_slowly(n, size, key) for n in numbers.tolist()]
    assert sample_indices(numbers, size, key).tolist() == expected


@settings(max_examples=30)
@given(st.integers(20_000, 2**40), keys, st.data())
def test_a_stretch_of_a_large_source_has_no_repeats(size, key, data):
    first = data.draw(st.integers(0, size - 5000))
    indices = sample_indices(np.arange(first, first + 5000), size, key)
    assert np.unique(indices).size == 5000
    assert indices.min() >= 0 and indices.max() < size


@settings(max_examples=30)
@given(st.lists(st.tuples(st.integers(1, 2**40), keys, st.integers(0, 2**45)), min_size=1))
def test_many_sources_in_one_call_equal_each_alone(rows):
    sizes, keys, numbers = (np.array(column, t) for column, t in zip(zip(*rows), "qQq"))  # noqa: B905
    together = sample_indices(numbers, sizes, keys)
    separately = [int(sample_indices(np.array([n]), s, k)[0]) for s, k, n in rows]
    assert together.tolist() == separately


def test_golden_values():
    """Existing runs depend on this order: a change of these numbers breaks their resume."""
    key = derive_source_key(1234, "data/text")
    assert key == 10017464000236332734
    first, second = (
        sample_indices(np.arange(start, start + 5), 1_000_000, key).tolist()
        for start in (0, 1_000_000)
    )
    assert first == [162942, 17835, 998470, 992030, 912803]
    assert second == [282486, 463412, 229938, 472115, 314213]


def test_seed_name_and_epoch_change_the_order():
    size = 50
    orders = {
        tuple(sample_indices(np.arange(size) + epoch * size, size, derive_source_key(seed, name)))
        for seed in (1, 2)
        for name in ("a", "b", "1")
        for epoch in range(3)
    }
    assert len(orders) == 18


def test_small_permutations_are_equally_likely():
    """Chi-square over all permutations of 4 elements has mean 23 and deviation sqrt(46)."""
    size, trials = 4, 24_000
    keys = np.repeat(np.arange(trials, dtype=np.uint64) * np.uint64(STEP), size)
    orders = permute(np.tile(np.arange(size), trials), np.array([size]), keys).reshape(-1, size)
    counts = np.unique(orders @ size ** np.arange(size), return_counts=True)[1]
    expected = trials / factorial(size)
    assert counts.size == factorial(size)
    assert abs(((counts - expected) ** 2 / expected).sum() - 23) < 5 * sqrt(46)


def test_fixed_points_are_one_a_permutation():
    """Their number is Poisson with mean 1: over 900 epochs, 900 with deviation 30."""
    size, epochs = 997, 900
    numbers = np.arange(size * epochs)
    fixed = (sample_indices(numbers, size, 7) == numbers % size).sum()
    assert abs(fixed - epochs) < 5 * 30


def test_neighbours_epochs_and_places_do_not_correlate():
    """The correlation of n independent pairs has deviation 1 / sqrt(n)."""
    size = 100_003
    first, second = sample_indices(np.arange(2 * size), size, 99).reshape(2, size)
    pairs = [(first[1:], first[:-1]), (first[2:], first[:-2]), (first[317:], first[:-317])]
    pairs += [(first, np.arange(size)), (first, second)]
    for left, right in pairs:
        assert abs(np.corrcoef(left, right)[0, 1]) < 5 / sqrt(size)


def test_the_order_of_a_huge_source_needs_no_memory():
    tracemalloc.start()
    sample_indices(np.arange(2**39, 2**39 + 64), 2**40, 5)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 100_000
