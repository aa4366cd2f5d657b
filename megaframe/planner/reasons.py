"""Why a step takes as long as it does, and what would change it: sentences with numbers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from megaframe.config.schema import RunConfig
from megaframe.hardware.cluster import Cluster, Tier
from megaframe.layout import Layout
from megaframe.planner.constants import Constants

_WORTH_TELLING = 0.02
_AXES = {
    "tensor": "tensor ranks",
    "context": "context ranks",
    "expert": "expert ranks",
    "data": "data ranks",
    "pipeline": "pipeline ranks",
}


def reasons(
    config: RunConfig,
    layout: Layout,
    cluster: Cluster,
    constants: Constants,
    breakdown: Mapping[str, float],
    needed: Mapping[str, int],
    host: int,
) -> Iterator[str]:
    """Yield sentences about a predicted step: memory of the device, memory of the host, what is
    assumed about the machine, what the plan does not consider, compute, and then everything else
    that takes at least a fiftieth of the step, the longest first.

    breakdown: seconds by part. needed: bytes on the device by kind. host: bytes in host memory.
    """
    step = sum(breakdown.values())
    total, there = sum(needed.values()), cluster.chip.memory
    kinds = sorted(needed, key=lambda kind: -needed[kind])[:2]
    most = " and ".join(f"{kind} {needed[kind] / 2**30:.1f} GiB" for kind in kinds)
    if total > there:
        yield (
            f"does not fit: {total / 2**30:.1f} GiB of {there / 2**30:.1f} GiB on a "
            f"{cluster.chip.name}, mostly {most}"
        )
    else:
        yield (
            f"fits with {(there - total) / 2**30:.1f} GiB to spare: {total / 2**30:.1f} GiB of "
            f"{there / 2**30:.1f} GiB, mostly {most}"
        )
    if host:
        yield _from_host(host, cluster, breakdown["optimizer"])
    yield from cluster.notes
    if constants.unfitted:
        yield (
            f"speeds are not fitted to a {cluster.chip.name}: the shares of its peaks that kernels "
            f"reach are {constants.unfitted}, and `python tools/measure_kernels.py --write FILE` "
            "measures them"
        )
    if config.optim.frozen:
        yield (
            "all of it is planned as if everything were trained: what optim.frozen names needs no "
            "gradients and no state, which a dry run of a rank counts"
        )
    yield f"compute is {breakdown['compute'] / step:.0%} of the step of {step:.3g} s"
    for part in sorted(breakdown, key=lambda name: -breakdown[name]):
        share = breakdown[part] / step
        if part == "compute" or share < _WORTH_TELLING:
            continue
        yield _of_part(part, share, config, layout, cluster)


def _of_part(part: str, share: float, config: RunConfig, layout: Layout, cluster: Cluster) -> str:
    if part == "bubble":
        many = config.train.global_batch // (config.train.microbatch * layout.data)
        return (
            f"the bubble of {config.parallel.schedule} with pipeline {layout.pipeline} and {many} "
            f"microbatches is {share:.1%}"
        )
    if part not in _AXES:
        return f"{part} is {share:.1%}"
    tier = outermost(cluster, *span(part, layout))
    size = layout.sizes[part]
    what = f"{_AXES[part]} wait {share:.1%} of the step for transfers over {tier.name}"
    if part == "tensor" and tier is not cluster.tiers[0]:
        return f"tensor {size} crosses nodes of {cluster.node}: {what}"
    return f"{what} ({part} {size})"


def _from_host(host: int, cluster: Cluster, seconds: float) -> str:
    link, name = cluster.chip.host_link, cluster.chip.name
    what = f"{host / 2**30:.1f} GiB of a GPU's weights and state are in host memory"
    if link is None:
        return (
            f"{what}; the link of a {name} to it is not known, so the update counts as without it"
        )
    how = f"move at {link / 1e9:g} GB/s in each direction"
    return f"{what} and {how}: the update takes {seconds:.2g} s"


def span(axis: str, layout: Layout) -> tuple[int, int]:
    """Return (distance between neighbours, number of ranks) of an axis."""
    inner = {
        "tensor": 1,
        "context": layout.tensor,
        "data": layout.tensor * layout.context,
        "pipeline": layout.tensor * layout.context * layout.data,
        "expert": layout.expert_tensor,
    }[axis]
    return inner, layout.sizes[axis]


def outermost(cluster: Cluster, stride: int, size: int) -> Tier:
    """Return the outermost tier that a group of `size` ranks, `stride` apart, uses."""
    for tier in cluster.tiers:
        if stride * size <= tier.size:
            return tier
    return cluster.tiers[-1]
