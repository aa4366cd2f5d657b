"""How far apart rounding alone may bring two computations of the same numbers, on any processor.

A processor chooses the order of a sum (its vectors, its threads), whether a product and a sum are
rounded once or twice, and how an exponential is approximated. What it cannot choose is the type. A
tolerance is therefore derived from three things and never from what a machine gave: the unit
roundoff of the type, the number of roundings that meet in one result, and the size of the numbers
that were added up, which is larger than the result where they cancel.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

PROMISE = 1e-10
"""What docs/design.md promises of layouts in fp64, relative to a loss or norm, and to a weight of
size one. A published limit and not a tolerance of rounding, which is a hundred times smaller."""
CERTAINTY = 8.0
"""The lambda of `estimate_growth`: a sum of n terms exceeds it with a probability of at most
2n e^-32."""
Numbers = float | Sequence[float] | Mapping[Any, float]


def compute_roundoff(dtype: torch.dtype) -> float:
    """Return the largest relative error of rounding one number to `dtype`, to nearest."""
    return torch.finfo(dtype).eps / 2


def estimate_growth(terms: int, dtype: torch.dtype) -> float:
    """Return the relative error that `terms` roundings to `dtype`, one after the other, add up to.

    It is the smaller of two bounds. That which always holds is gamma_n = n u / (1 - n u), for any
    order of the terms (Higham, Accuracy and Stability of Numerical Algorithms, 3.1). Roundings that
    are as often up as down grow like a random walk: exp(lambda sqrt(n) u + n u^2 / (1 - u)) - 1
    (Higham and Mary 2019, A New Approach to Probabilistic Rounding Error Analysis, theorem 2.4),
    here with lambda = `CERTAINTY`.

    Args:
        terms: Roundings on the way from an input to the result: the length of a sum of products.
            For products of products, lengths are added.
        dtype: The type in which sums are kept.
    """
    unit = compute_roundoff(dtype)
    always = terms * unit / (1 - terms * unit) if terms * unit < 1 else math.inf
    walk = math.expm1(CERTAINTY * math.sqrt(terms) * unit + terms * unit**2 / (1 - unit))
    return min(always, walk)


def compute_allowance(
    terms: int, size: Any, dtype: torch.dtype, sums: torch.dtype | None = None, result: Any = None
) -> Any:
    """Return the absolute error that a computed sum may have.

    Args:
        terms: As in `estimate_growth`.
        size: Sum of the absolute values of the terms, as a number or a tensor.
        dtype: The type of the result.
        sums: The type in which sums are kept; by default fp32 or better, whatever the result is.
        result: The result's own size, to which its last rounding is relative; by default `size`.
    """
    if sums is None:
        sums = torch.float64 if dtype == torch.float64 else torch.float32
    last = 0.0 if sums == dtype else compute_roundoff(dtype) * (size if result is None else result)
    return estimate_growth(terms, sums) * size + last + torch.finfo(dtype).tiny


def assert_near(
    actual: Any,
    expected: Any,
    terms: int,
    *,
    size: Any = None,
    dtype: torch.dtype | None = None,
    sums: torch.dtype | None = None,
    label: str = "",
) -> None:
    """Assert that two results differ by no more than the errors of both.

    Args:
        actual: Tensor, or a number (fp64).
        expected: The same result, computed in another way or in a wider type.
        terms: Roundings on the way to one element, as in `estimate_growth`.
        size: Size of the numbers that are added up to an element: the sum of their absolute values,
            which broadcasts against the result. By default the largest element of `expected`:
            elements that cancel by chance are as inexact as the others of their tensor.
        dtype: Type of the numbers of `actual`, if it is lower than that in which it is given.
        sums: The type in which sums of `actual` are kept, as in `compute_allowance`.
        label: A name of the result for the message.
    """
    actual, expected = (
        torch.as_tensor(x, dtype=None if isinstance(x, Tensor) else torch.float64)
        for x in (actual, expected)
    )
    actual, expected = actual.detach(), expected.detach()
    actual_dtype, expected_dtype, wide = dtype or actual.dtype, expected.dtype, expected.double()
    finite = wide[torch.isfinite(wide)].abs()
    if size is None:
        size = finite.max() if finite.numel() else 0.0
    magnitude = torch.as_tensor(size, dtype=torch.float64)
    allowed = compute_allowance(
        terms, magnitude, actual_dtype, sums, wide.abs()
    ) + compute_allowance(terms, magnitude, expected_dtype)
    largest = float(magnitude.max()) if magnitude.numel() else 0.0
    assert_within(
        actual,
        expected,
        allowed,
        f"{terms} roundings, of numbers up to {largest:.3g}, "
        f"to {_name(actual_dtype)} and {_name(expected_dtype)}",
        label,
    )


def assert_within(
    actual: Tensor, expected: Tensor, allowed: Any, derivation: str, label: str = ""
) -> None:
    """Assert that results differ by at most `allowed`, and that the same elements are finite.

    Args:
        allowed: Absolute differences, a number or a tensor that broadcasts against the results.
        derivation: What `allowed` was derived from, for the message.
        label: A name of the result for the message.
    """
    assert actual.shape == expected.shape, (label, actual.shape, expected.shape)
    if not expected.numel():
        return
    actual, expected = actual.detach().double(), expected.detach().double()
    finite = torch.isfinite(expected)
    odd = ~finite & ~((actual == expected) | (actual.isnan() & expected.isnan()))
    allowed = torch.as_tensor(allowed, dtype=torch.float64).expand_as(expected)
    # Written so that a NaN in `actual` is not within any tolerance.
    wrong = odd | (finite & ~((actual - expected).abs() <= allowed))
    if not bool(wrong.any()):
        return
    excess = torch.where(wrong, ((actual - expected).abs() / allowed).nan_to_num(math.inf), -1.0)
    place = tuple(map(int, torch.unravel_index(excess.argmax(), excess.shape)))
    value, other, most = (float(x[place]) for x in (actual, expected, allowed))
    raise AssertionError(
        f"{label or 'result'}: {int(wrong.sum())} of {wrong.numel()} elements are too far apart; "
        f"at {list(place)} {value!r} and {other!r} differ by {abs(value - other):.3g}, "
        f"allowed {most:.3g} ({derivation})"
    )


def near(expected: Numbers, terms: int, dtype: torch.dtype = torch.float64) -> Any:
    """Return what equals numbers that differ from `expected` by at most the errors of both.

    For results without cancellation, such as losses and norms, whose size is that of their terms.

    Args:
        expected: A number, a list, or a dictionary of numbers, as for `pytest.approx`.
        terms: Roundings on the way to one number, as in `estimate_growth`.
        dtype: The type in which both were computed.
    """
    return pytest.approx(expected, rel=2 * estimate_growth(terms, dtype), abs=0.0)


def promised(expected: Numbers) -> Any:
    """Return what equals losses and norms that differ from `expected` by what is promised of
    layouts, `PROMISE`."""
    return pytest.approx(expected, rel=PROMISE, abs=0.0)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
