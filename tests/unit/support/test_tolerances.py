"""The tolerances of the tests: never exceeded by rounding, always by a mistake of a few roundings
more, and explained when they are."""

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tolerances import (
    assert_near,
    assert_within,
    compute_allowance,
    compute_roundoff,
    estimate_growth,
    near,
)

pytestmark = pytest.mark.numeric

TYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@pytest.mark.parametrize(
    ("dtype", "bits"),
    [*zip(TYPES, (53, 24, 8, 11), strict=True), (torch.float8_e4m3fn, 4), (torch.float8_e5m2, 3)],
)
def test_the_unit_roundoff_is_half_a_unit_of_the_last_of_its_bits(dtype, bits):
    assert compute_roundoff(dtype) == 2.0**-bits
    assert estimate_growth(1, dtype) <= compute_roundoff(dtype) / (1 - compute_roundoff(dtype))


def test_short_sums_have_the_bound_that_always_holds_and_long_ones_that_of_a_random_walk():
    unit = compute_roundoff(torch.float32)
    assert estimate_growth(10, torch.float32) == 10 * unit / (1 - 10 * unit)
    assert estimate_growth(10**6, torch.float32) == pytest.approx(8e3 * unit, rel=1e-3)
    assert estimate_growth(0, torch.float32) == 0.0


@given(st.integers(1, 400), st.integers(0, 2**31), st.sampled_from(TYPES[1:]))
def test_no_order_of_a_sum_exceeds_it(length, seed, dtype):
    """Sums one after the other, each rounded: the worst order of all."""
    generator = torch.Generator().manual_seed(seed)
    terms = torch.randn(length, generator=generator).to(dtype)
    exact = sum((Fraction(x) for x in terms.tolist()), Fraction(0))
    total = torch.zeros((), dtype=dtype)
    for term in terms:
        total = total + term
    size = float(terms.double().abs().sum())
    allowed = compute_allowance(length, size, dtype, sums=dtype)
    assert abs(Fraction(total.item()) - exact) <= allowed
    assert_near(total, float(exact), length, size=size, sums=dtype)


@pytest.mark.parametrize("dtype", TYPES)
def test_a_mistake_of_a_few_roundings_is_seen(dtype):
    x = torch.linspace(1.0, 2.0, 50).to(dtype)
    assert_near(x, x.double(), 1)
    with pytest.raises(AssertionError, match="50 of 50 elements are too far apart"):
        assert_near(
            x * (1 + 8 * compute_roundoff(dtype)) + 8 * compute_roundoff(dtype), x.double(), 1
        )


def test_the_message_says_where_what_and_why():
    actual = torch.tensor([[1.0, 2.0], [3.0, 4.5]])
    with pytest.raises(AssertionError) as error:
        assert_near(actual, torch.tensor([[1.0, 2.0], [3.0, 4.0]]), 7, label="logits")
    words = ("logits: 1 of 4 elements", "at [1, 1] 4.5 and 4.0 differ by 0.5, allowed")
    assert all(word in str(error.value) for word in words)
    assert "7 roundings, of numbers up to 4, to float32 and float32" in str(error.value)


@pytest.mark.parametrize(
    ("value", "expected", "same"),
    [
        (math.inf, math.inf, True),
        (math.nan, math.nan, True),
        (math.inf, -math.inf, False),
        (math.nan, 1.0, False),
        (1.0, math.nan, False),
        (math.inf, 1.0, False),
    ],
)
def test_only_the_same_elements_may_be_infinite_or_no_number(value, expected, same):
    tensors = torch.tensor([1.0, value]), torch.tensor([1.0, expected])
    if same:
        assert_within(*tensors, 0.0, "nothing")
    else:
        with pytest.raises(AssertionError, match="1 of 2 elements"):
            assert_within(*tensors, 1e9, "much")


def test_cancellation_is_allowed_by_the_size_of_the_terms_and_by_nothing_else():
    actual, exact = torch.tensor([1e8, 1.0, -1e8]).sum(), 1.0
    assert_near(actual, exact, 3, size=2e8 + 1)
    assert_near(torch.tensor(9.0), exact, 3, size=2e8 + 1)
    with pytest.raises(AssertionError):
        assert_near(torch.tensor(9.0), exact, 3)


def test_losses_are_near_relative_to_themselves():
    assert near([1.0, 2.0], 4) == [1.0, 2.0 * (1 + 2e-16)]
    assert near(2.0, 4) != 2.0 * (1 + 1e-14)
