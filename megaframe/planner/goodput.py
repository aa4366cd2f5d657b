"""Goodput: the share of time in which a run makes lasting progress, given its failures.

Mixes of failures (`failure_rates.py`) are replayed with their costs. Failures are memoryless, so
there is a closed form for every interval between saves (Daly 2006); the simulation checks it. A
plan uses the short form, `predict_goodput`, with the figures of its cluster.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from megaframe.hardware.cluster import Cluster
from megaframe.planner.failure_rates import FailureCause, FailureCosts, FailureMix

Number = Any


def compute_daly_interval(stall: float, mean_between: float) -> float:
    """Return the seconds of work between two saves that lose least, if a save stalls work for
    `stall` seconds and failures are `mean_between` seconds apart on average (Daly 2006,
    equation 37)."""
    if stall >= 2 * mean_between:
        return mean_between
    ratio = math.sqrt(stall / (2 * mean_between))
    return math.sqrt(2 * stall * mean_between) * (1 + ratio / 3 + ratio**2 / 9) - stall


def compute_effective_share(
    mix: FailureMix, ranks: int, costs: FailureCosts, interval: float
) -> float:
    """Return the expected share of time in which a run on `ranks` ranks does lasting work.

    Work of w seconds and its save of s seconds take E[e^(rD)] (e^(r(w+s)) - 1) / r seconds at r
    failures per second. Each failure costs D seconds of downtime, during which failures may occur
    too, and all work since the last save. A planned stop costs no work, because it saves first.

    Args:
        mix, costs: The failures, and what they and the saves cost.
        ranks: Ranks of the run.
        interval: Seconds of work between saves.
    """
    rate = mix.compute_failure_rate(ranks)
    total = sum(cause.count for cause in mix.causes)
    planned_share = sum(cause.count for cause in mix.causes if cause.kind == "planned") / total
    sudden_rate = rate * (1 - planned_share)
    attempts = _compute_growth(sudden_rate * (interval + costs.stall)) * (interval + costs.stall)
    pause, growth = 0.0, 0.0
    for cause in mix.causes:
        downtime = costs.compute_downtime(cause)
        if cause.kind == "planned":
            pause += rate * cause.count / total * (downtime + costs.stall)
        else:
            growth += (
                cause.count
                / total
                / (1 - planned_share)
                * math.exp(min(sudden_rate * downtime, 700.0))
            )
    return interval / (attempts * max(growth, 1.0) * (1 + pause))


def _compute_growth(x: float) -> float:
    """Return (e^x - 1) / x, with x limited to 700 in the exponent."""
    return math.expm1(min(x, 700.0)) / x if x > 0 else 1.0


def find_best_interval(mix: FailureMix, ranks: int, costs: FailureCosts) -> float:
    """Return the interval in seconds with the largest effective share, by golden-section search.

    Args:
        mix, costs: The failures, and what they and the saves cost.
        ranks: Ranks of the run.
    """
    low, high = 1e-3, 10 / mix.compute_failure_rate(ranks)
    ratio = (math.sqrt(5) - 1) / 2
    for _ in range(100):
        left, right = high - ratio * (high - low), low + ratio * (high - low)
        if compute_effective_share(mix, ranks, costs, left) < compute_effective_share(
            mix, ranks, costs, right
        ):
            low = left
        else:
            high = right
    return (low + high) / 2


@dataclass(frozen=True)
class SimulatedGoodput:
    """Result of a simulation.

    Attributes:
        effective: Share of time with lasting work.
        lost: Shares of time that were lost, by cause.
        failures: How many were simulated.
    """

    effective: float
    lost: Mapping[str, float]
    failures: int


def simulate_failures(
    mix: FailureMix,
    ranks: int,
    costs: FailureCosts,
    interval: float,
    *,
    failures: int = 10000,
    seed: int = 0,
) -> SimulatedGoodput:
    """Replay random failures one after the other.

    Args:
        mix, costs: The failures, and what they and the saves cost.
        ranks: Ranks of the run.
        interval: Seconds of work between saves.
        failures: Number of failures to replay.
        seed: Of the random numbers.
    """
    draw = random.Random(seed)
    rate, weights = mix.compute_failure_rate(ranks), [cause.count for cause in mix.causes]
    cycle = interval + costs.stall
    lost = dict.fromkeys(("down", "repeated", "saves"), 0.0)
    worked = total = since = 0.0
    for _ in range(failures):
        gap = draw.expovariate(rate)
        (cause,) = draw.choices(mix.causes, weights)
        total += gap
        since += gap
        saves = math.floor(since / cycle)
        unsaved = since - saves * cycle
        if cause.kind == "planned":
            saved_work = min(unsaved, interval)
            worked += saves * interval + saved_work
            lost["saves"] += saves * costs.stall + costs.stall + (unsaved - saved_work)
            total += costs.stall
        else:
            worked += saves * interval
            lost["saves"] += saves * costs.stall
            lost["repeated"] += unsaved
        since = 0.0
        downtime = _simulate_downtime(mix, costs, cause, rate, weights, draw)
        lost["down"] += downtime
        total += downtime
    return SimulatedGoodput(
        worked / total, {name: time / total for name, time in lost.items()}, failures
    )


def _simulate_downtime(
    mix: FailureMix,
    costs: FailureCosts,
    cause: FailureCause,
    rate: float,
    weights: Sequence[int],
    draw: random.Random,
) -> float:
    """Return the seconds from a failure to the next step. Another failure meanwhile starts the
    downtime anew; a planned stop waits."""
    total = 0.0
    while True:
        downtime, gap = costs.compute_downtime(cause), draw.expovariate(rate)
        if gap >= downtime:
            return total + downtime
        (other,) = draw.choices(mix.causes, weights)
        if other.kind == "planned":
            return total + downtime
        total += gap
        cause = other


def compute_gains_of_halving(
    mix: FailureMix, ranks: int, costs: FailureCosts
) -> list[tuple[str, float]]:
    """Return how much halving each cost would add to the effective share at the best interval,
    largest gain first.

    Args:
        mix, costs: The failures, and what they and the saves cost.
        ranks: Ranks of the run.
    """

    def compute_share(costs: FailureCosts) -> float:
        return compute_effective_share(mix, ranks, costs, find_best_interval(mix, ranks, costs))

    current = compute_share(costs)
    gains = [
        (
            field.name,
            compute_share(replace(costs, **{field.name: getattr(costs, field.name) / 2})) - current,
        )
        for field in fields(costs)
    ]
    return sorted(gains, key=lambda gain: -gain[1])


def find_max_restart_seconds(
    mix: FailureMix, ranks: int, costs: FailureCosts, share: float
) -> float:
    """Return the longest restart in seconds that reaches a share at the best interval, else 0.

    Args:
        mix, costs: The failures, and what they and the saves cost; `costs.restart` is ignored.
        ranks: Ranks of the run.
        share: Effective share to reach, from 0 to 1.
    """

    def is_reached(restart: float) -> bool:
        tried = replace(costs, restart=restart)
        return (
            compute_effective_share(mix, ranks, tried, find_best_interval(mix, ranks, tried))
            >= share
        )

    low, high = 0.0, 10 / mix.compute_failure_rate(ranks)
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if is_reached(middle) else (low, middle)
    return low


def format_table_lines(
    mix: FailureMix, costs: FailureCosts, sizes: Sequence[int], seed: int = 0
) -> Iterator[str]:
    """Yield the lines of a table: for each number of ranks the time between failures, the best
    interval and Daly's, the effective share computed and simulated, and what to improve first.

    Args:
        mix, costs: The failures, and what they and the saves cost.
        sizes: Numbers of ranks, one for each line.
        seed: Of the simulation.
    """
    head = ("ranks", "between failures", "save every", "Daly", "effective", "simulated", "next")
    yield _format_row(head)
    for ranks in sizes:
        interval, rate = find_best_interval(mix, ranks, costs), mix.compute_failure_rate(ranks)
        share = compute_effective_share(mix, ranks, costs, interval)
        simulated = simulate_failures(mix, ranks, costs, interval, seed=seed).effective
        name, gain = compute_gains_of_halving(mix, ranks, costs)[0]
        yield _format_row(
            (
                f"{ranks:,}",
                f"{1 / rate / 60:,.1f} min",
                f"{interval:,.0f} s",
                f"{compute_daly_interval(costs.stall, 1 / rate):,.0f} s",
                f"{share:.2%}",
                f"{simulated:.2%}",
                f"{name} (half of it: +{gain:.2%})",
            )
        )


def _format_row(cells: Sequence[str]) -> str:
    widths = (8, 17, 11, 9, 10, 10)
    padded = [f"{cell:>{width}}" for cell, width in zip(cells, widths, strict=False)]
    return " ".join([*padded, f" {cells[-1]}"])


def estimate_straggler_share(cluster: Cluster, ranks: Number) -> Number:
    """Return the share by which a step is longer on `ranks` ranks than on one. The largest of n
    random delays grows with the root of the logarithm of n."""
    return cluster.jitter * np.sqrt(np.log(np.maximum(ranks, 1.0)) / np.log(1000.0))


@dataclass(frozen=True)
class Goodput:
    """What a run loses and costs. days, dollars: duration and price of the requested tokens.

    Attributes:
        share: Share of the time in which training makes lasting progress.
        interval: Seconds between checkpoints.
        failures_a_day: Failures of the whole run per day.
    """

    share: float
    interval: float
    failures_a_day: float
    days: float
    dollars: float


def compute_mean_between_failures(cluster: Cluster, ranks: int) -> float:
    """Return the mean seconds between failures of a run: those of one chip divided by the ranks."""
    return cluster.failure_hours * 3600.0 / ranks


def estimate_stall_seconds(cluster: Cluster, checkpoint_bytes: float) -> float:
    """Return the seconds in which the rank that writes most saves so many bytes."""
    return max(1e-3, checkpoint_bytes / cluster.storage)


def compute_lost_share(stall: float, interval: float, mean_between: float, restart: float) -> float:
    """Return the share of time that saves and failures take, 1 at most. Each interval loses the
    stall of a save, and each failure loses half an interval and a restart.

    Args:
        stall: Seconds for which a save stalls work.
        interval: Seconds of work between saves.
        mean_between: Mean seconds between failures.
        restart: Seconds from a failure until training continues.
    """
    return min(1.0, stall / (interval + stall) + (interval / 2 + restart) / mean_between)


def predict_goodput(
    cluster: Cluster, ranks: int, tokens_per_second: float, tokens: float, checkpoint_bytes: float
) -> Goodput:
    """Return what a run of `tokens` tokens loses and costs, with a save after each of Daly's
    intervals.

    Args:
        cluster: Failures, storage and price.
        ranks: Number of ranks.
        tokens_per_second: Of the whole run, while it trains.
        tokens: Tokens to train on.
        checkpoint_bytes: Bytes of the rank that writes most.
    """
    mean_between = compute_mean_between_failures(cluster, ranks)
    stall = estimate_stall_seconds(cluster, checkpoint_bytes)
    interval = compute_daly_interval(stall, mean_between)
    share = 1.0 - compute_lost_share(stall, interval, mean_between, cluster.restart_seconds)
    seconds = tokens / tokens_per_second / share if share else float("inf")
    days = seconds / 86400.0
    return Goodput(
        share=share,
        interval=interval,
        failures_a_day=86400.0 / mean_between,
        days=days,
        dollars=days * 24.0 * ranks * cluster.price,
    )
