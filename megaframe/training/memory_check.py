"""Checks whether the ranks of a run have the memory that it needs, before anything is built.

All ranks compute the same from the config and the memory of a GPU, so all of them refuse a run or
none does. A CPU's memory may be extended by swap and is shared with others: there the user is only
warned. A dry run asks the same of the machine that it is planned for, which need not be this one.
"""

from __future__ import annotations

import os

import torch

from megaframe.config import RunConfig
from megaframe.distributed.mesh import read_world_size
from megaframe.errors import UserError
from megaframe.hardware.cluster import Cluster
from megaframe.layout import Layout, count_fewest_ranks
from megaframe.planner.constants import get_cluster_constants
from megaframe.planner.fit import MemoryFit, compute_fit, suggest_changes
from megaframe.training.auto_layout import find_cluster

_TIGHT = "it may not be enough, as plans are good to a few percent"


def plan_dry_run(config: RunConfig, gpus: int | None) -> tuple[RunConfig, int]:
    """Return the config of a dry run and the number of ranks to plan for.

    Args:
        config: The run.
        gpus: That number; None for what a launcher started, or else the fewest ranks that the
            layout can have.

    Raises:
        UserError: The number cannot be planned for.
    """
    if gpus is None:
        launched = "WORLD_SIZE" in os.environ
        return config, read_world_size() if launched else count_fewest_ranks(config.parallel)
    if gpus < 1:
        raise UserError(f"--gpus {gpus} is not a number of GPUs; use 1 or more")
    if config.run.device == "cpu":
        raise UserError(f"--gpus {gpus} plans for GPUs, but run.device=cpu; leave out one of them")
    if config.run.device == "auto":
        run = config.run.model_copy(update={"device": "cuda"})
        config = config.model_copy(update={"run": run})
    return config, gpus


def report_memory_fit(config: RunConfig, layout: Layout, *, force: bool = False) -> list[str]:
    """Return the last lines of a dry run: whether the run fits in the memory of the machine that it
    is planned for, and if not, what does.

    The machine is that of `parallel.cluster`, or else the likely one for the device.

    Args:
        config: The config of the run.
        layout: The layout of its ranks.
        force: Warn of what cannot fit.

    Raises:
        UserError: A GPU has less memory than its rank needs; names the nearest changes that fit.
    """
    cluster = find_cluster(config)
    fit = compute_fit(config, layout, cluster.chip)
    if fit.fits:
        return [f"fits in memory: {fit}" + f": {_TIGHT}" * fit.is_tight]
    if cluster.chip.is_host:
        return [f"does not fit in memory: {fit}", *_suggest_layouts(config, layout, cluster)]
    return _refuse(config, layout, cluster, fit, force)


def check_memory(config: RunConfig, layout: Layout, *, force: bool = False) -> list[str]:
    """Return warnings about the memory of a run on this machine.

    Args:
        config: The run.
        layout: Its ranks.
        force: Warn of what cannot fit.

    Raises:
        UserError: A GPU has less memory than its rank needs; names the nearest changes that fit.
    """
    cluster = _find_machine(config)
    if cluster is None:
        return []
    fit = compute_fit(config, layout, cluster.chip)
    if fit.fits:
        return [f"warning: {fit}: {_TIGHT}"] if fit.is_tight else []
    if cluster.chip.is_host:
        return [f"warning: does not fit in memory: {fit}"]
    return _refuse(config, layout, cluster, fit, force)


def _refuse(
    config: RunConfig, layout: Layout, cluster: Cluster, fit: MemoryFit, force: bool
) -> list[str]:
    """Refuse a run that does not fit; with `force`, return a warning."""
    if force:
        return [f"warning: started by --force without enough memory: {fit}"]
    lines = [f"does not fit in memory: {fit}", *_suggest_layouts(config, layout, cluster)]
    raise UserError("\n  ".join([*lines, "or run anyway with --force"]))


def _suggest_layouts(config: RunConfig, layout: Layout, cluster: Cluster) -> list[str]:
    """Return lines with the nearest changes that fit."""
    changes = [*suggest_changes(config, layout.world, cluster, get_cluster_constants(cluster))]
    if not changes:
        return [f"no layout of {layout.world} ranks fits"]
    head = "nearest changes that fit, with their memory and step by the plan:"
    return [head, *(f"  {line}" for line in changes)]


def _find_machine(config: RunConfig) -> Cluster | None:
    """Return the machine that a run is checked for; None if nothing is known of it. A run is
    checked for the GPUs that it gets, whatever machine it was planned for."""
    if config.run.device == "cuda" and not torch.cuda.is_available():
        return None
    parallel = config.parallel.model_copy(update={"cluster": None})
    return find_cluster(config.model_copy(update={"parallel": parallel}))
