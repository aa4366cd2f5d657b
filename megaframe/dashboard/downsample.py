"""Thins out data: reduces any number of steps and ranks to few enough numbers for a page.

A bucket of steps keeps its mean, and its minimum and maximum for the band around the line. A block
of a heat map keeps its maximum, because the map has to show one slow rank among a thousand.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


def list_bucket_starts(length: int, most: int) -> NDArray[np.int64]:
    """Return where each of at most `most` buckets of equal length starts."""
    count = min(length, most)
    return np.arange(count) * length // max(1, count)


def compute_bucket_means(
    values: Floats, starts: NDArray[np.int64], weights: Floats | None = None
) -> Floats:
    """Return the mean of the finite values of each bucket, NaN if it has none.

    Args:
        values: The values [n].
        starts: Index of the first value of each bucket, increasing.
        weights: Of the values, if they are to be weighted [n].
    """
    if not len(starts):
        return np.empty(0)
    good = np.isfinite(values)
    weight = good * (1.0 if weights is None else np.nan_to_num(weights))
    total = np.add.reduceat(weight, starts)
    summed = np.add.reduceat(np.where(good, values, 0.0) * weight, starts)
    return np.divide(summed, total, out=np.full(len(starts), np.nan), where=total > 0)


def find_bucket_extremes(values: Floats, starts: NDArray[np.int64]) -> tuple[Floats, Floats]:
    """Return the minimum and maximum of the finite values of each bucket, NaN if it has none."""
    if not len(starts):
        return np.empty(0), np.empty(0)
    good = np.isfinite(values)
    low = np.minimum.reduceat(np.where(good, values, np.inf), starts)
    high = np.maximum.reduceat(np.where(good, values, -np.inf), starts)
    return np.where(low < np.inf, low, np.nan), np.where(high > -np.inf, high, np.nan)


def block_maxima(table: Floats, rows: int, columns: int) -> Floats:
    """Reduce [R, C] to at most [rows, columns], each the maximum of its block.

    Args:
        table: The values, [R, C].
        rows: The most rows of the result.
        columns: The most columns of the result.
    """
    for axis, most in ((0, rows), (1, columns)):
        if table.shape[axis] > most:
            table = np.maximum.reduceat(
                table, list_bucket_starts(table.shape[axis], most), axis=axis
            )
    return table


def round_values(values: Sequence[float] | Floats, digits: int = 5) -> list[float | None]:
    """Return numbers for JSON, with `digits` significant digits; None if not finite."""
    # The largest of all numbers are rounded to infinity.
    rounded = [float(f"{value:.{digits}g}") for value in map(float, values)]
    return [value if math.isfinite(value) else None for value in rounded]
