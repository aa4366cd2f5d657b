"""Blend: which source the next sample comes from.

It chooses the source of each sample: earliest deadline first, in integer arithmetic. After n
samples, a source with share w should have given w * n of them. Its sample j (from 0) may be given
once w * n has grown past j, and must be given before it grows past j + 1. Of the samples that may
be given, the one with the earliest deadline is chosen. The obvious rule, to choose the source with
the largest deficit, lets sources lag by more than one sample; this rule never does (see
`Blend.take`). Shares are ratios of integers, so nothing drifts however long a run is, and the
counts are the whole state.

A source that has given all that it may (its `epochs` or `max_tokens`) leaves the blend. The shares
of the others are then those of their weights, and count from there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from heapq import heapify, heappop, heappush

import numpy as np
from numpy.typing import NDArray

from megaframe.errors import UserError

_RESOLUTION = 2**40
Limits = Sequence[int | None]
Cap = list[float | int | None]
"""`epochs` and `max_tokens` of a source, as JSON values."""


@dataclass(frozen=True)
class Blend:
    """The state of a weighted blend of sources: a few integers per source.

    Attributes:
        weights: Relative shares, positive integers.
        consumed: Number of samples that each source has given; its next sample has this number.
        base: `consumed` at the moment from which the current weights count.
    """

    weights: tuple[int, ...]
    consumed: tuple[int, ...]
    base: tuple[int, ...]

    @staticmethod
    def start(weights: Sequence[float], consumed: Sequence[int] | None = None) -> Blend:
        """Return a blend whose weights count from now on.

        Args:
            weights: Relative shares of the sources.
            consumed: Samples that each source has given before; None: none.
        """
        counts = tuple(consumed) if consumed is not None else (0,) * len(weights)
        return Blend(round_weights(weights), counts, counts)

    def take(
        self, size: int, limits: Limits = ()
    ) -> tuple[NDArray[np.int64], NDArray[np.int64], Blend]:
        """Take the next `size` samples.

        Args:
            size: How many.
            limits: Most samples that each source gives, over all; None where nothing limits them.
                One that is used up leaves the blend, and the weights of the others, which keep
                their ratios, count from then on.

        Returns:
            sources int64[size] (index of the source), numbers int64[size] (number of the sample
            within its source, over all epochs) and the blend after them. The sequence does not
            depend on the sizes in which it is taken.

        Raises:
            UserError: All sources are used up before.
        """
        if not size or all(limit is None for limit in limits):
            return self._take_from(range(len(self.weights)), size)
        blend, taken, left = self, list[tuple[NDArray[np.int64], NDArray[np.int64]]](), size
        while left:
            active = [
                source
                for source, (limit, given) in enumerate(zip(limits, blend.consumed, strict=True))
                if limit is None or given < limit
            ]
            if not active:
                raise UserError(
                    f"all sources are used up: by their epochs and max_tokens they have "
                    f"{sum(blend.consumed):,} samples, and the step takes {left:,} more; raise "
                    "epochs or max_tokens in data.sources, or use a smaller train.steps"
                )
            sources, numbers, after = blend._take_from(active, left)
            end = blend._find_end(sources, limits)
            if end is not None:
                sources, numbers, after = blend._take_from(active, end)
                after = replace(after, base=after.consumed)
            taken.append((sources, numbers))
            blend, left = after, left - sources.size
        sources, numbers = (np.concatenate(parts) for parts in zip(*taken, strict=True))
        return sources, numbers, blend

    def _find_end(self, sources: NDArray[np.int64], limits: Limits) -> int | None:
        """Return after how many of the next samples a source is used up; None if none is."""
        ends = []
        for source, limit in enumerate(limits):
            if limit is not None and limit > self.consumed[source]:
                given = np.flatnonzero(sources == source)[limit - self.consumed[source] - 1 :]
                ends += given[:1].tolist()
        return min(ends) + 1 if ends else None

    def _take_from(
        self, active: Sequence[int], size: int
    ) -> tuple[NDArray[np.int64], NDArray[np.int64], Blend]:
        """Take the next `size` samples from these sources.

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
        samples_given = [self.consumed[source] - self.base[source] for source in active]
        weights = [self.weights[source] for source in active]
        places = schedule_earliest_deadlines(weights, samples_given, size)
        sources = np.asarray(active, np.int64)[places]
        counts = np.bincount(sources, minlength=len(self.weights))
        consumed = np.asarray(self.consumed, np.int64)
        after = tuple((consumed + counts).tolist())
        numbers = consumed[sources] + _count_occurrences(sources, counts)
        return sources, numbers, replace(self, consumed=after)


def round_weights(weights: Sequence[float]) -> tuple[int, ...]:
    """Return integers in the ratio of the weights, rounded to 2**-40 of the largest and at least
    1."""
    largest = max(weights)
    return tuple(max(1, round(weight / largest * _RESOLUTION)) for weight in weights)


def schedule_earliest_deadlines(
    weights: Sequence[int], samples_given: Sequence[int], size: int
) -> NDArray[np.int64]:
    """Return the sources of the next `size` samples, int64[size].

    Ties go to the source listed first. There is always a source that may give, because not all of
    them can be ahead of their shares.

    Args:
        weights: Relative shares of the sources, positive integers.
        samples_given: Number of samples that each source has given so far.
        size: Number of samples to schedule.
    """
    total, now = sum(weights), sum(samples_given)
    counts = list(samples_given)
    waiting = [(counts[i] * total // weight, i) for i, weight in enumerate(weights)]
    heapify(waiting)
    ready: list[tuple[int, int]] = []
    sources = np.empty(size, np.int64)
    for position in range(size):
        while waiting and waiting[0][0] <= now + position:
            _, source = heappop(waiting)
            deadline = -(-(counts[source] + 1) * total // weights[source])
            heappush(ready, (deadline, source))
        _, source = heappop(ready)
        sources[position] = source
        counts[source] += 1
        heappush(waiting, (counts[source] * total // weights[source], source))
    return sources


def _count_occurrences(sources: NDArray[np.int64], counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return how often each entry's value occurs before it, int64 of the length of `sources`.

    counts: how often each value occurs.
    """
    order = np.argsort(sources, kind="stable")
    firsts = np.cumsum(counts) - counts
    occurrences = np.empty_like(sources)
    occurrences[order] = np.arange(sources.size) - np.repeat(firsts, counts)
    return occurrences
