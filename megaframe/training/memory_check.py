"""Checks whether the ranks of a run have the memory that it needs, before anything is built.

All ranks compute the same from the config and the memory of a device, so all of them refuse a run
or none does. The ranks of a host are counted together. Its memory is extended by swap, and what the
interpreter and the allocator take there is only estimated: what may be too much without exceeding
both by its tensors alone gets a warning. A dry run asks the same of the machine that it is planned
for, which need not be this one.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace

import torch

from megaframe.config import ParallelConfig, RunConfig, RunSection
from megaframe.config.phases import list_phase_configs
from megaframe.distributed.device import read_host_swap
from megaframe.distributed.mesh import read_local_world_size, read_world_size
from megaframe.errors import UserError
from megaframe.hardware.cluster import Cluster
from megaframe.layout import Layout, count_fewest_ranks
from megaframe.planner.candidates import SearchSpace
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
        phases = list_phase_configs(config)
        fewest = max(count_fewest_ranks(phase.parallel) for phase in phases)
        return config, read_world_size() if launched else fewest
    if gpus < 1:
        raise UserError(f"--gpus {gpus} is not a number of GPUs; use 1 or more")
    if config.run.device == "cpu":
        raise UserError(f"--gpus {gpus} plans for GPUs, but run.device=cpu; leave out one of them")
    if config.run.device == "auto":
        config = config.replace(run={"device": "cuda"})
    return config, gpus


@dataclass(frozen=True)
class MemoryVerdict:
    """Whether a run fits in memory.

    Attributes:
        fit: The plan and the memory.
        exceeds: Whether the run cannot fit.
        changes: If it may not, lines with the nearest changes that fit.
    """

    fit: MemoryFit
    exceeds: bool
    changes: tuple[str, ...] = ()

    @property
    def lines(self) -> list[str]:
        """The verdict in words."""
        if self.fit.fits:
            return [f"fits in memory: {self.fit}" + f": {_TIGHT}" * self.fit.is_tight]
        head = "does not fit" if self.exceeds else "may not fit"
        return [f"{head} in memory: {self.fit}", *self.changes]

    def warn_or_refuse(self, *, force: bool = False) -> list[str]:
        """Return warnings about the memory of a run.

        Args:
            force: Warn of what cannot fit.

        Raises:
            UserError: The run cannot fit; names the nearest changes that do.
        """
        if self.fit.fits:
            return [f"warning: {self.fit}: {_TIGHT}"] if self.fit.is_tight else []
        if not self.exceeds:
            return [f"warning: {self.lines[0]}"]
        if force:
            return [f"warning: started by --force without enough memory: {self.fit}"]
        raise UserError("\n  ".join([*self.lines, "or run anyway with --force"]))


def check_memory(config: RunConfig, layout: Layout, *, force: bool = False) -> list[str]:
    """Return warnings about the memory of a run on this machine.

    Args:
        config: The run.
        layout: Its ranks.
        force: Warn of what cannot fit.

    Raises:
        UserError: The run cannot fit; names the nearest changes that do.
    """
    cluster = _find_machine(config.parallel, config.run)
    if cluster is None:
        return []
    return judge_memory(config, layout, cluster, advise=not force).warn_or_refuse(force=force)


def judge_memory(
    config: RunConfig, layout: Layout, cluster: Cluster, *, advise: bool = True
) -> MemoryVerdict:
    """Return whether a run fits in the memory of a cluster.

    Args:
        config: The run.
        layout: Its ranks.
        cluster: Where it runs.
        advise: Look for changes that fit, if the run cannot.
    """
    chip, ranks, spare = cluster.chip, 1, 0
    if chip.is_host and config.parallel.cluster is None:
        memory = chip.memory * read_local_world_size()
        ranks = min(_count_host_ranks(config.parallel, layout), layout.world)
        chip, spare = replace(chip, memory=memory), read_host_swap()
        cluster = replace(cluster, chip=replace(chip, memory=memory / ranks))
    fit = compute_fit(config, layout, chip, ranks)
    needed = fit.tensors if chip.is_host else fit.needed
    exceeds = needed > chip.memory + spare
    changes = []
    if advise and not fit.fits:
        changes = _suggest_layouts(SearchSpace(config, layout.world, cluster))
    return MemoryVerdict(fit, exceeds, tuple(changes))


def _count_host_ranks(parallel: ParallelConfig, layout: Layout) -> int:
    """Return the number of ranks on each host: without a launcher all, and with one that does not
    say at least 1."""
    if "LOCAL_WORLD_SIZE" in os.environ:
        return read_local_world_size()
    launched = "WORLD_SIZE" in os.environ
    return parallel.node_size or (1 if launched else layout.world)


def _suggest_layouts(space: SearchSpace) -> list[str]:
    """Return lines with the nearest changes of a config that fit."""
    changes = [*suggest_changes(space, get_cluster_constants(space.cluster))]
    if not changes:
        return [f"no layout of {space.gpus} ranks fits"]
    head = "nearest changes that fit, with their memory and step by the plan:"
    return [head, *(f"  {line}" for line in changes)]


def _find_machine(parallel: ParallelConfig, run: RunSection) -> Cluster | None:
    """Return the machine that a run is checked for; None if nothing is known of it. A run is
    checked for the GPUs that it gets, whatever machine it was planned for."""
    if run.device == "cuda" and not torch.cuda.is_available():
        return None
    return find_cluster(parallel.model_copy(update={"cluster": None}), run)
