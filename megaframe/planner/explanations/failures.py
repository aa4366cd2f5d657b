"""How often a run fails, and how often it should save."""

from __future__ import annotations

from megaframe.hardware.cluster import Cluster
from megaframe.planner.constants import Constants
from megaframe.planner.explanations.explanation import Explanation, format_bytes
from megaframe.planner.goodput import (
    compute_daly_interval,
    compute_lost_share,
    compute_mean_between_failures,
    estimate_stall_seconds,
)
from megaframe.planner.layout_search import LayoutChoice

_MULTIPLES = (0.25, 0.5, 1.0, 2.0, 4.0)


def explain_failures(choice: LayoutChoice, cluster: Cluster, constants: Constants) -> Explanation:
    """Return what failures and saves cost, with Daly's interval and others beside it.

    Args:
        choice: The layout.
        cluster: Its failures, storage and restarts.
        constants: Not needed; every explanation is given them.
    """
    world, size = choice.layout.world, choice.prediction.checkpoint_bytes
    between = compute_mean_between_failures(cluster, world)
    stall, restart = estimate_stall_seconds(cluster, size), cluster.restart_seconds
    interval = compute_daly_interval(stall, between)
    lines = (
        f"A chip fails once in M1 = {cluster.failure_hours:,.0f} hours, so n = {world} of them "
        f"once in M = M1 / n = {between / 3600:,.3g} hours.",
        f"A save stalls work for d = bytes / storage = {format_bytes(size)} / "
        f"{cluster.storage / 1e9:.3g} GB/s = {stall:.3g} s on the rank that writes most.",
        "Daly 2006: the interval t that loses least is sqrt(2 d M) (1 + sqrt(d / 2M) / 3 + "
        f"(d / 2M) / 9) - d = {interval:,.0f} s = {interval / 60:,.3g} minutes.",
        f"Lost is d / (t + d) by saves, and (t / 2 + r) / M by failures, with a restart of "
        f"r = {restart:.3g} s.",
    )
    rows = tuple(
        (
            f"{times:g} t",
            times * interval / 60,
            stall / (times * interval + stall),
            (times * interval / 2 + restart) / between,
            compute_lost_share(stall, times * interval, between, restart),
        )
        for times in _MULTIPLES
    )
    head = ("save every", "minutes", "lost by saves", "by failures", "lost")
    return Explanation(f"Failures of {world} GPUs of {cluster.name}", lines, head, rows)
