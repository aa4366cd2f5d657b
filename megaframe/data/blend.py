"""Which source gives each sample of a blend: the earliest deadline first, in whole numbers.

With share w of n samples, a source should have given w * n. Its sample j (from 0) may be given once
w * n has grown past j and must be given before it grows past j + 1; of the samples that may be
given, the one whose deadline is nearest is. Picking the largest deficit instead, the obvious rule,
lets sources lag by more than one sample; this one never does (see `Blend.take`). Shares are ratios
of integers, so nothing drifts however long a run is, and the counts alone are the whole state.
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
    """Where a weighted blend of sources stands: a few integers for each source.

    weights:  relative shares, whole numbers above 0.
    consumed: samples that each source has given in all; its next sample has this number.
    base:     `consumed` at the moment when the present weights began to count.
    """

    weights: tuple[int, ...]
    consumed: tuple[int, ...]
    base: tuple[int, ...]

    @staticmethod
    def start(weights: Sequence[float], consumed: Sequence[int] | None = None) -> Blend:
        """A blend whose weights count from now on; `consumed` continues sources where they are."""
        counts = tuple(consumed) if consumed is not None else (0,) * len(weights)
        return Blend(whole_weights(weights), counts, counts)

    def take(self, size: int) -> tuple[NDArray[np.int64], NDArray[np.int64], Blend]:
        """The next `size` samples.

        Returns sources int64[size] (index of the source), numbers int64[size] (number of the sample
        within its source, over all epochs) and the blend after them. Whatever sizes it is taken
        in, the sequence is the same. Of any n samples since the weights began, a source with share
        w has given floor(w * n) or ceil(w * n): the windows (floor(j / w), ceil((j + 1) / w)) can
        all be met because the fractional blend meets them, and then earliest deadline first meets
        them too (Liu and Layland 1973; for windows of this form Baruah et al. 1996).
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
    """Weights as whole numbers in the same ratio, to 2**-40 of the largest and at least 1."""
    largest = max(weights)
    return tuple(max(1, round(weight / largest * _RESOLUTION)) for weight in weights)


def earliest_deadlines(
    weights: Sequence[int], given: Sequence[int], size: int
) -> NDArray[np.int64]:
    """Sources of the next `size` samples after each has `given` so many. int64[size].

    Ties go to the source that is listed first. Some source may always give: not all of them can be
    ahead of their shares.
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
    """How often each entry's value occurred before it. int64, as long as `sources`."""
    order = np.argsort(sources, kind="stable")
    firsts = np.cumsum(counts) - counts
    occurrences = np.empty_like(sources)
    occurrences[order] = np.arange(sources.size) - np.repeat(firsts, counts)
    return occurrences
