"""What more ranks gain: the laws of Amdahl and Gustafson, and their serial part.

Both laws describe a step of t(n) = a + b / n seconds on n times the ranks: a is not divided, b is.
The serial share is s = a / (a + b).
"""

from __future__ import annotations


def compute_fixed_speedup(serial_share: float, times: float) -> float:
    """Return how many times as fast `times` as many ranks do the same work: 1 / (s + (1 - s) / n).

    Source: Amdahl 1967, "Validity of the single processor approach to achieving large scale
    computing capabilities".

    Args:
        serial_share: Share of the time on one unit of ranks that more ranks do not divide (s).
        times: Number of units (n).
    """
    return 1.0 / (serial_share + (1.0 - serial_share) / times)


def compute_scaled_speedup(serial_share: float, times: float) -> float:
    """Return how many times as fast `times` as many ranks do work that has grown with them, as
    compared with one unit of ranks that does all of it: s + (1 - s) n.

    Source: Gustafson 1988, "Reevaluating Amdahl's law".

    Args:
        serial_share: Share of the time on all ranks that more ranks do not divide (s).
        times: Number of units (n).
    """
    return serial_share + (1.0 - serial_share) * times


def compute_serial_share(speedup: float, times: float) -> float:
    """Return the serial share with which Amdahl's law explains a speed-up:
    (1 / speedup - 1 / n) / (1 - 1 / n). It grows with n if something takes longer on more ranks.

    Source: Karp and Flatt 1990, "Measuring parallel processor performance".

    Args:
        speedup: How many times as fast the same work is.
        times: How many times as many ranks do it; more than 1.
    """
    return (1.0 / speedup - 1.0 / times) / (1.0 - 1.0 / times)


def compute_serial_seconds(once: float, doubled: float) -> float:
    """Return the part a of t(n) = a + b / n that more ranks do not divide: 2 t(2) - t(1).

    Args:
        once: Seconds on one unit of ranks, t(1).
        doubled: Seconds on two, t(2).
    """
    return 2.0 * doubled - once
