"""Thin out: any number of steps and ranks as few enough numbers for a page.

Of steps a bucket keeps its mean, and for the band around the line its least and most; of a heat map
the largest value, because one slow rank of a thousand is what it is looked at for.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


def buckets(length: int, most: int) -> NDArray[np.int64]:
    """Where each of at most `most` buckets of equal lengths starts."""
    count = min(length, most)
    return np.arange(count) * length // max(1, count)


def means(values: Floats, starts: NDArray[np.int64], weights: Floats | None = None) -> Floats:
    """Mean of each bucket over what is finite, NaN where nothing is; weighted where asked for."""
    if not len(starts):
        return np.empty(0)
    good = np.isfinite(values)
    weight = good * (1.0 if weights is None else np.nan_to_num(weights))
    total = np.add.reduceat(weight, starts)
    summed = np.add.reduceat(np.where(good, values, 0.0) * weight, starts)
    return np.divide(summed, total, out=np.full(len(starts), np.nan), where=total > 0)


def extremes(values: Floats, starts: NDArray[np.int64]) -> tuple[Floats, Floats]:
    """Least and most of each bucket."""
    if not len(starts):
        return np.empty(0), np.empty(0)
    good = np.isfinite(values)
    low = np.minimum.reduceat(np.where(good, values, np.inf), starts)
    high = np.maximum.reduceat(np.where(good, values, -np.inf), starts)
    return np.where(low < np.inf, low, np.nan), np.where(high > -np.inf, high, np.nan)


def block_maxima(table: Floats, rows: int, columns: int) -> Floats:
    """[R, C] as at most [rows, columns], each the largest value of its block."""
    for axis, most in ((0, rows), (1, columns)):
        if table.shape[axis] > most:
            table = np.maximum.reduceat(table, buckets(table.shape[axis], most), axis=axis)
    return table


def short(values: Sequence[float] | Floats, digits: int = 5) -> list[float | None]:
    """Numbers as JSON holds them, with so many digits; None for what is not finite."""
    return [float(f"{one:.{digits}g}") if np.isfinite(one) else None for one in map(float, values)]
