"""What a long run loses to the slowest rank, to failures and to checkpoints; and what it costs.

A checkpoint costs a run only the time that it stalls training; `goodput.py` has the best interval
between two checkpoints.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from megaframe.hardware.cluster import Cluster
from megaframe.planner.goodput import daly_interval

Number = Any


def jitter(cluster: Cluster, ranks: Number) -> Number:
    """Return the share by which a step is longer on `ranks` ranks than on one. The largest of n
    random delays grows with the root of the logarithm of n."""
    return cluster.jitter * np.sqrt(np.log(np.maximum(ranks, 1.0)) / np.log(1000.0))


@dataclass(frozen=True)
class Goodput:
    """What a run loses and costs. share: share of the time in which training makes lasting
    progress. interval: seconds between checkpoints. failures_a_day: failures of the whole run per
    day. days, dollars: duration and price of the requested tokens."""

    share: float
    interval: float
    failures_a_day: float
    days: float
    dollars: float


def goodput(
    cluster: Cluster, ranks: int, tokens_per_second: float, tokens: float, checkpoint_bytes: float
) -> Goodput:
    """Return what a run of `tokens` tokens loses and costs.

    Each interval loses the stall of a save, and each failure loses half an interval and a restart.
    checkpoint_bytes: bytes of the rank that writes most.
    """
    mean_between = cluster.failure_hours * 3600.0 / ranks
    stall = max(1e-3, checkpoint_bytes / cluster.storage)
    interval = daly_interval(stall, mean_between)
    lost = stall / (interval + stall) + (interval / 2 + cluster.restart_seconds) / mean_between
    share = max(0.0, 1.0 - min(1.0, lost))
    seconds = tokens / tokens_per_second / share if share else float("inf")
    days = seconds / 86400.0
    return Goodput(
        share=share,
        interval=interval,
        failures_a_day=86400.0 / mean_between,
        days=days,
        dollars=days * 24.0 * ranks * cluster.price,
    )
