"""Chooses the source of each sample of a blend: earliest deadline first, in integer arithmetic.

After n samples, a source with share w should have given w * n of them. Its sample j (from 0) may be
given once w * n has grown past j, and must be given before it grows past j + 1. Of the samples that
may be given, the one with the earliest deadline is chosen. The obvious rule, to choose the source
with the largest deficit, lets sources lag by more than one sample; this rule never does (see
`Blend.take`). Shares are ratios of integers, so nothing drifts however long a run is, and the
counts are the whole state.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from heapq import heapify, heappop, heappush

import numpy as np
from numpy.typing import NDArray

_RESOLUTION = 2**40


@dataclass(frozen=True)
class Blend:
    """The state of a weighted blend of sources: a few integers per source.

    weights:  relative shares, positive integers.
    consumed: number of samples that each source has given; its next sample has this number.
    base:     `consumed` at the moment from which the current weights count.
    """

    weights: tuple[int, ...]
    consumed: tuple[int, ...]
    base: tuple[int, ...]

    @staticmethod
    def start(weights: Sequence[float], consumed: Sequence[int] | None = None) -> Blend:
        """Return a blend whose weights count from now on. consumed: samples that each source has
        given before; None: none."""
        counts = tuple(consumed) if consumed is not None else (0,) * len(weights)
        return Blend(whole_weights(weights), counts, counts)

    def take(self, size: int) -> tuple[NDArray[np.int64], NDArray[np.int64], Blend]:
        """Take the next `size` samples.

        Returns sources int64[size] (index of the source), numbers int64[size] (number of the sample
        within its source, over all epochs) and the blend after them. The sequence does not depend
        on the sizes in which it is taken.

        Of the first n samples since the weights began to count, a source with share w has given
        floor(w * n) or ceil(w * n). Proof: sample j must be given in the window (floor(j / w),
        ceil((j + 1) / w)). The fractional blend meets all these windows, so a schedule that meets
        them exists, and then earliest deadline first meets them too (Liu and Layland 1973; for
        windows of this form Baruah et al. 1996).
        """
        if len(self.weights) == 1:
            first = self.consumed[0]
            numbers: NDArray[np.int64] = np.arange(first, first + size)
            return np.zeros(size, np.int64), numbers, replace(self, consumed=(first + size,))
        given = [now - then for now, then in zip(self.consumed, self.base, strict=True)]
        sources = earliest_deadlines(self.weights, given, size)
        counts = np.bincount(sources, minlength=len(self.weights))
        consumed = np.asarray(self.consumed, np.int64)
        after = tuple((consumed + counts).tolist())
        numbers = consumed[sources] + _occurrences(sources, counts)
        return sources, numbers, replace(self, consumed=after)


def whole_weights(weights: Sequence[float]) -> tuple[int, ...]:
    """Return integers in the ratio of the weights, rounded to 2**-40 of the largest and at least
    1."""
    largest = max(weights)
    return tuple(max(1, round(weight / largest * _RESOLUTION)) for weight in weights)


def earliest_deadlines(
    weights: Sequence[int], given: Sequence[int], size: int
) -> NDArray[np.int64]:
    """Return the sources of the next `size` samples, int64[size].

    given: number of samples that each source has given so far. Ties go to the source listed first.
    There is always a source that may give, because not all of them can be ahead of their shares.
    """
    total, now = sum(weights), sum(given)
    counts = list(given)
    waiting = [(counts[i] * total // weight, i) for i, weight in enumerate(weights)]
    heapify(waiting)
    ready: list[tuple[int, int]] = []
    sources = np.empty(size, np.int64)
    for place in range(size):
        while waiting and waiting[0][0] <= now + place:
            _, source = heappop(waiting)
            deadline = -(-(counts[source] + 1) * total // weights[source])
            heappush(ready, (deadline, source))
        _, source = heappop(ready)
        sources[place] = source
        counts[source] += 1
        heappush(waiting, (counts[source] * total // weights[source], source))
    return sources


def _occurrences(sources: NDArray[np.int64], counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return how often each entry's value occurs before it, int64 of the length of `sources`.

    counts: how often each value occurs.
    """
    order = np.argsort(sources, kind="stable")
    firsts = np.cumsum(counts) - counts
    occurrences = np.empty_like(sources)
    occurrences[order] = np.arange(sources.size) - np.repeat(firsts, counts)
    return occurrences
