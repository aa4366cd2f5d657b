"""Which trials of a sweep lag behind the others: asynchronous successive halving (Li et al. 2020,
arXiv:1810.05934), in the form that stops trials instead of promoting them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence


def find_lagging(histories: Mapping[str, Sequence[tuple[int, float]]], grace: int) -> set[str]:
    """Return the trials that are to be stopped.

    At `grace` steps, and each time twice as many, the better half (rounded up) of the trials that
    have come so far goes on. A trial waits for no other, so one that comes early is compared with
    few.

    Args:
        histories: Of each trial, (step, metric) in the order of steps; lower is better.
        grace: Steps that every trial gets.
    """
    lagging: set[str] = set()
    while reached := {
        name: next(value for step, value in history if step >= grace)
        for name, history in histories.items()
        if history and history[-1][0] >= grace
    }:
        ranked = sorted(reached, key=lambda name: (math.isnan(reached[name]), reached[name]))
        lagging.update(ranked[math.ceil(len(ranked) / 2) :])
        grace *= 2
    return lagging
