"""The nearest alternatives that would work, with their price, if a model fits in no layout."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from megaframe.config.schema import RunConfig
from megaframe.hardware.cluster import Cluster, cluster_names, load_cluster
from megaframe.planner.candidates import SCHEDULES, Candidates
from megaframe.planner.constants import Constants, cluster_constants
from megaframe.planner.enumerate import Fixed, candidates
from megaframe.planner.memory_budget import leaves_room
from megaframe.planner.sizes import RECOMPUTE
from megaframe.planner.vectorized import Estimates, estimate

_MOST_TIMES = 1024
"""Largest number of GPUs to try, as a multiple of the requested number."""
_GIB = 2.0**30


def nothing_fits(
    config: RunConfig,
    gpus: int,
    cluster: Cluster,
    constants: Constants,
    every: Candidates,
    estimates: Estimates,
    fixed: Fixed | None = None,
) -> str:
    """Return the message if nothing fits: the least memory that the model needs, the layout that
    needs it, and what would work."""
    place = int(np.argmin(estimates.memory_bytes))
    needed, there = estimates.memory_bytes[place] / _GIB, cluster.chip.memory / _GIB
    asked = "".join(f", {key}={value}" for key, value in (fixed or {}).items())
    lines = [
        f"no layout on {gpus} GPUs of {cluster.name}{asked} leaves a GPU with less than "
        f"{needed:.1f} GiB of its {there:.0f} GiB: {in_words(every, place)}",
        *ways(config, gpus, cluster, constants, fixed),
    ]
    return "\n  ".join(lines)


def in_words(every: Candidates, place: int) -> str:
    """Return the layout of candidate number `place` in words."""
    axes = ("tensor", "context", "pipeline", "chunks", "data", "expert", "expert_tensor")
    sizes = {name: int(getattr(every, name)[place]) for name in axes}
    named = [f"{name} {size}" for name, size in sizes.items() if size > 1]
    replicas = int(every.data_replicate[place])
    if replicas > 1:
        named.append(f"replicas {replicas}")
    if sizes["pipeline"] > 1:
        named.append(SCHEDULES[int(every.schedule[place])])
    named.append(f"zero {int(every.zero[place])}")
    named.append(f"recompute {RECOMPUTE[int(every.recompute[place])]}")
    named.append(f"microbatch {int(every.microbatch[place])}")
    return ", ".join(named)


def ways(
    config: RunConfig, gpus: int, cluster: Cluster, constants: Constants, fixed: Fixed | None
) -> Iterator[str]:
    """Yield what would work if no layout fits: without the given keys, more GPUs, optimizer state
    in 8 bits, a chip with more memory."""
    if fixed:
        free = _fitting(config, gpus, cluster, constants)
        if free:
            yield f"without the given keys: {free}"
    more = _more(config, gpus, cluster, constants, fixed)
    if more:
        yield more
    if config.optim.state == "master":
        fewer = config.model_copy(
            update={"optim": config.optim.model_copy(update={"state": "int8"})}
        )
        small = _fitting(fewer, gpus, cluster, constants, fixed)
        if small:
            yield f"with optim.state=int8: {small}"
    for name in cluster_names():
        other = load_cluster(name)
        larger = other.chip.memory > cluster.chip.memory and other.size >= gpus
        if larger and other.chip.family in ("h100", "b200"):
            found = _fitting(config, gpus, other, cluster_constants(other), fixed)
            if found:
                yield f"{gpus} GPUs of {name}: {found}"
                return


def _more(
    config: RunConfig, gpus: int, cluster: Cluster, constants: Constants, fixed: Fixed | None
) -> str | None:
    """Return the smallest number of GPUs, doubled repeatedly, on which the model fits, with its
    layout; None if there is none."""
    times = 2
    while times <= _MOST_TIMES and gpus * times <= cluster.size:
        found = _fitting(config, gpus * times, cluster, constants, fixed)
        if found:
            kind = "ranks" if cluster.chip.is_host else "GPUs"
            return f"{gpus * times} {kind} of {cluster.name}: {found}"
        times *= 2
    return None


def fastest(
    config: RunConfig, gpus: int, cluster: Cluster, constants: Constants, fixed: Fixed | None = None
) -> tuple[Candidates, int, float] | None:
    """Return all candidates, the index of the one with the shortest estimated step that fits, and
    its seconds; None if no layout is valid and fits."""
    every = candidates(config, gpus, cluster, fixed)
    if not len(every):
        return None
    found = estimate(config, cluster, constants, every)
    fits = leaves_room(found.memory_bytes, cluster.chip)
    if not fits.any():
        return None
    place = int(np.argmin(np.where(fits, found.step_seconds, np.inf)))
    return every, place, float(found.step_seconds[place])


def _fitting(
    config: RunConfig,
    gpus: int,
    cluster: Cluster,
    constants: Constants,
    fixed: Fixed | None = None,
) -> str | None:
    """Return the fastest layout that fits in words, with its step and price; None if none fits."""
    found = fastest(config, gpus, cluster, constants, fixed)
    if found is None:
        return None
    every, place, step = found
    dollars = step * config.train.steps / 3600 * gpus * cluster.price
    return (
        f"{step:.3g} s a step, ${gpus * cluster.price:,.0f} an hour, ${dollars:,.0f} for "
        f"train.steps={config.train.steps} ({in_words(every, place)})"
    )
