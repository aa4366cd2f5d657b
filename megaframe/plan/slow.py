"""What a long run loses: to the slowest rank, to failures, to checkpoints; and what it then costs.

A checkpoint that is written in the background costs a run only what it stalls; `goodput.py` has the
best interval between two.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from megaframe.plan.cluster import Cluster
from megaframe.plan.goodput import daly_interval

Number = Any


def jitter(cluster: Cluster, ranks: Number) -> Number:
    """Share by which a step of so many ranks is longer than one of a single rank: the largest of n
    like delays grows with the root of the logarithm of n."""
    return cluster.jitter * np.sqrt(np.log(np.maximum(ranks, 1.0)) / np.log(1000.0))


@dataclass(frozen=True)
class Goodput:
    """share: of the time that is training which stays. interval: seconds between checkpoints.
    failures_a_day: of the whole run. days, dollars: for the tokens that were asked for."""

    share: float
    interval: float
    failures_a_day: float
    days: float
    dollars: float


def goodput(
    cluster: Cluster, ranks: int, tokens_per_second: float, tokens: float, checkpoint_bytes: float
) -> Goodput:
    """What remains of a run. checkpoint_bytes: of the rank that writes most.

    Of an interval, a stall to save is lost, and at each failure half an interval and a restart.
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
