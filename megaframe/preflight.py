"""Preflight: whether the ranks of a run have the memory that it needs, before anything is built.

All ranks compute the same from the config and the memory of a GPU, so all of them refuse a run or
none does. A CPU's memory may be extended by swap and is shared with others: there the user is only
warned.
"""

from __future__ import annotations

import os

import torch

from megaframe.automatic import cluster_of, with_memory_here
from megaframe.config import RunConfig
from megaframe.errors import UserError
from megaframe.layout import Layout
from megaframe.mesh import global_rank, ranks_on_this_node
from megaframe.plan.cluster import Cluster, load_cluster
from megaframe.plan.constants import constants_of
from megaframe.plan.fit import Fit, fit, instead
from megaframe.plan.schedules import step_schedule
from megaframe.plan.worst import pipeline_memory

_GIB = 2.0**30


def check_memory(
    config: RunConfig, layout: Layout, *, dry_run: bool = False, force: bool = False
) -> list[str]:
    """Return warnings about the memory of a run.

    dry_run: the machine is that of `parallel.cluster`, if it is given, instead of this one. force:
    warn of what cannot fit. Raises `UserError` if a GPU has less memory than its rank needs, with
    the nearest changes that fit.
    """
    cluster = _machine(config, dry_run)
    if cluster.chip.is_host:
        return _on_host(config, layout, cluster)
    found = fit(config, layout, cluster.chip)
    if found.fits:
        close = "that may not be enough, as plans are good to a few percent"
        return [f"warning: {found}: {close}"] if found.is_tight else []
    if force:
        return [f"warning: started by --force without enough memory: {found}"]
    raise UserError(_refusal(config, layout, cluster, found))


def _machine(config: RunConfig, dry_run: bool) -> Cluster:
    """Return the machine that a run is checked for, with the memory of its GPU if that is here."""
    if dry_run and config.parallel.cluster is not None:
        return load_cluster(config.parallel.cluster)
    if config.run.device == "cpu" or not torch.cuda.is_available():
        return load_cluster("cpu")
    return with_memory_here(cluster_of(config))


def _refusal(config: RunConfig, layout: Layout, cluster: Cluster, found: Fit) -> str:
    changes = instead(config, layout.world, cluster, constants_of(cluster.chip.family))
    return "\n  ".join(
        [
            f"not enough memory: {found}",
            "nearest changes that fit, with their memory and step by the plan:",
            *(f"  {line}" for line in changes),
            "or run anyway with --force",
        ]
    )


def _on_host(config: RunConfig, layout: Layout, cluster: Cluster) -> list[str]:
    """Return a warning if the ranks of this machine need more memory than it has."""
    many = config.train.global_batch // (config.train.microbatch * layout.data)
    memories = pipeline_memory(config, layout, step_schedule(config, many), cluster.chip)
    most = max(memories.values(), key=lambda one: one.total)
    count = min(ranks_on_this_node(), layout.world)
    first = global_rank() // count * count
    stages = [layout.coordinate(rank)["pipeline"] for rank in range(first, first + count)]
    needed = sum(memories.get(stage, most).total for stage in stages)
    there = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if needed <= there:
        return []
    ranks = "the rank" if count == 1 else f"the {count} ranks"
    return [
        f"warning: {ranks} on this machine need{'s' * (count == 1)} {needed / _GIB:.1f} GiB by the "
        f"plan, and it has {there / _GIB:.1f} GiB"
    ]
