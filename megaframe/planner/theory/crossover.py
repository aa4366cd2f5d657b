"""From which size of the message one algorithm of a collective is faster than another.

All formulas of `planner.collective_times` are linear in the size, so two points determine a line,
and two lines meet once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from megaframe.planner.collective_times import ALGORITHMS, GroupLevel

LARGEST = 2.0**50
"""Bytes beyond which no crossover is looked for."""


def compute_latency_and_slope(
    operation: str, algorithm: str, group: Sequence[GroupLevel]
) -> tuple[float, float]:
    """Return the seconds of a message without bytes, and those of each further byte.

    Args:
        operation: A key of `ALGORITHMS`.
        algorithm: A key of its formulas.
        group: Levels of the group.
    """
    formula = ALGORITHMS[operation][algorithm]
    latency = float(formula(0.0, group))
    return latency, (float(formula(LARGEST, group)) - latency) / LARGEST


def find_crossover(
    operation: str, small: str, large: str, group: Sequence[GroupLevel]
) -> float | None:
    """Return the bytes at which two algorithms take equally long, `small` being faster below and
    `large` above: the difference of latencies divided by that of seconds per byte. None if there is
    no such size.

    Args:
        operation: A key of `ALGORITHMS`.
        small, large: Keys of its formulas.
        group: Levels of the group.
    """
    small_latency, small_slope = compute_latency_and_slope(operation, small, group)
    large_latency, large_slope = compute_latency_and_slope(operation, large, group)
    if not (small_latency < large_latency and small_slope > large_slope):
        return None
    size = (large_latency - small_latency) / (small_slope - large_slope)
    return size if size <= LARGEST else None


def list_fastest_algorithms(
    operation: str, group: Sequence[GroupLevel], algorithms: Sequence[str]
) -> Iterator[tuple[float, str]]:
    """Yield the fastest algorithm by size of the message: (bytes from which it is, its name), the
    smallest size first, which is 0.

    Args:
        operation: A key of `ALGORITHMS`.
        group: Levels of the group.
        algorithms: Keys of its formulas to choose from.
    """
    lines = {name: compute_latency_and_slope(operation, name, group) for name in algorithms}
    lines = {name: line for name, line in lines.items() if np.isfinite(line).all()}
    if not lines:
        return
    name, size = min(lines, key=lambda each: lines[each]), 0.0
    while True:
        yield size, name
        crossings = [
            (crossing, lines[other][1], other)
            for other in lines
            if (crossing := find_crossover(operation, name, other, group)) is not None
        ]
        if not crossings:
            return
        size, _, name = min(crossings)
