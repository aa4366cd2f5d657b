"""Preflight: whether the ranks of a run have the memory that it needs, before anything is built.

All ranks compute the same from the config and the memory of a GPU, so all of them refuse a run or
none does. A CPU's memory may be extended by swap and is shared with others: there the user is only
warned.
"""

from __future__ import annotations

import torch

from megaframe.automatic import cluster_of
from megaframe.config import RunConfig
from megaframe.errors import UserError
from megaframe.layout import Layout
from megaframe.plan.cluster import Cluster
from megaframe.plan.constants import cluster_constants
from megaframe.plan.fit import fit, instead


def check_memory(
    config: RunConfig, layout: Layout, *, dry_run: bool = False, force: bool = False
) -> list[str]:
    """Return warnings about the memory of a run.

    dry_run: the machine is that of `parallel.cluster`, if it is given, instead of this one. force:
    warn of what cannot fit. Raises `UserError` if a GPU has less memory than its rank needs, with
    the nearest changes that fit.
    """
    cluster = _machine(config, dry_run)
    if cluster is None:
        return []
    found = fit(config, layout, cluster.chip)
    if found.fits and found.is_tight:
        return [f"warning: {found}: it may not be enough, as plans are good to a few percent"]
    if found.fits:
        return []
    if cluster.chip.is_host:
        return [f"warning: not enough memory: {found}"]
    if force:
        return [f"warning: started by --force without enough memory: {found}"]
    changes = [*instead(config, layout.world, cluster, cluster_constants(cluster))]
    lines = [
        f"not enough memory: {found}",
        "nearest changes that fit, with their memory and step by the plan:"
        if changes
        else f"no layout of {layout.world} ranks fits",
        *(f"  {line}" for line in changes),
        "or run anyway with --force",
    ]
    raise UserError("\n  ".join(lines))


def _machine(config: RunConfig, dry_run: bool) -> Cluster | None:
    """Return the machine that a run is checked for; None if nothing is known of it. A run is
    checked for the GPUs that it gets, whatever machine it was planned for."""
    if dry_run and config.parallel.cluster is not None:
        return cluster_of(config)
    if config.run.device == "cuda" and not torch.cuda.is_available():
        return None
    parallel = config.parallel.model_copy(update={"cluster": None})
    return cluster_of(config.model_copy(update={"parallel": parallel}))
