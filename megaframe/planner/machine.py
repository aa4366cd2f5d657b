"""Machine: the kernel rates and rank groups that a layout gets on a cluster, and types for seconds.

It works for one run or for arrays of layouts. Seconds are kept apart by pass (`PassTimes`: forward,
input gradient, weight gradient), as a schedule needs them, and by cause (`CostBreakdown`: compute,
and the exposed communication of each axis).
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from megaframe.config.schema import RunConfig
from megaframe.hardware.cluster import Cluster, Tier
from megaframe.layout import Layout
from megaframe.planner.collective_times import (
    GroupLevel,
    count_group_ranks,
    estimate_collective_seconds,
    estimate_pairwise_all_to_all,
    estimate_stepped_exchange,
    list_group_levels,
)
from megaframe.planner.constants import Constants
from megaframe.planner.kernel_times import KernelRates, compute_kernel_rates
from megaframe.planner.layout_sizes import LayoutSizes

Number = Any
"""A float, or a numpy array of them."""


@dataclass(frozen=True)
class PassTimes:
    """Seconds of the forward pass, of the input gradient and of the weight gradient."""

    forward: Number = 0.0
    backward: Number = 0.0
    weight: Number = 0.0

    def __add__(self, other: PassTimes) -> PassTimes:
        return PassTimes(
            self.forward + other.forward,
            self.backward + other.backward,
            self.weight + other.weight,
        )

    def scale(self, factor: Number) -> PassTimes:
        """Return these seconds multiplied by `factor`."""
        return PassTimes(self.forward * factor, self.backward * factor, self.weight * factor)

    @property
    def total(self) -> Number:
        """Sum of the three passes."""
        return self.forward + self.backward + self.weight


@dataclass(frozen=True)
class CostBreakdown:
    """Seconds of a part of the model by cause: `compute`, and the exposed communication of the
    axes `tensor`, `context` and `expert`."""

    compute: PassTimes
    tensor: PassTimes = PassTimes()
    context: PassTimes = PassTimes()
    expert: PassTimes = PassTimes()

    def __add__(self, other: CostBreakdown) -> CostBreakdown:
        return CostBreakdown(
            self.compute + other.compute,
            self.tensor + other.tensor,
            self.context + other.context,
            self.expert + other.expert,
        )

    def scale(self, factor: Number) -> CostBreakdown:
        """Return these seconds multiplied by `factor`."""
        return CostBreakdown(
            self.compute.scale(factor),
            self.tensor.scale(factor),
            self.context.scale(factor),
            self.expert.scale(factor),
        )

    @property
    def combined(self) -> PassTimes:
        """Sum over all causes."""
        return self.compute + self.tensor + self.context + self.expert

    def split_by_cause(self) -> Mapping[str, PassTimes]:
        """Return the passes by cause: "compute", then the axes."""
        return {
            "compute": self.compute,
            "tensor": self.tensor,
            "context": self.context,
            "expert": self.expert,
        }


class Machine:
    """Kernel rates and rank groups of one cluster for given sizes. All cost formulas use it.

    Args:
        config: The run.
        cluster: Chips and links.
        constants: Fitted constants of the chips.
        sizes: Sizes of the axes; may be arrays, one element for each candidate.
    """

    def __init__(
        self, config: RunConfig, cluster: Cluster, constants: Constants, sizes: LayoutSizes
    ) -> None:
        self.config, self.cluster, self.sizes = config, cluster, sizes
        self.constants, self.software = constants, constants.software
        self.tokens = sizes.microbatch * config.train.seq / sizes.context
        stage = sizes.tensor * sizes.context * (sizes.data // sizes.islands)
        has_server = config.sync.server is not None
        self.groups: dict[str, list[GroupLevel]] = {
            "tensor": self.make_group(1, sizes.tensor),
            "context": self.make_group(sizes.tensor, sizes.context),
            "shard": self.make_group(sizes.tensor, sizes.shard),
            "owners": self.make_group(1, sizes.tensor * sizes.shard),
            "replicas": self.make_group(sizes.tensor * sizes.shard, sizes.data_replicate),
            "expert": self.make_group(sizes.expert_tensor, sizes.expert),
            "expert_tensor": self.make_group(1, sizes.expert_tensor),
            "next_stage": self.make_group(stage, 2),
            "pipeline": self.make_group(stage, sizes.pipeline),
            # A server is as far away as another island.
            "islands": self.make_group(stage * sizes.pipeline, 2 if has_server else sizes.islands),
        }

    @cached_property
    def rate(self) -> KernelRates:
        """Rates of the kernels in the config's precision.

        Raises:
            UserError: If the chip has no such rates; the groups of ranks are known without
                them.
        """
        return compute_kernel_rates(self.cluster.chip, self.constants, self.config.train.precision)

    @cached_property
    def linear(self) -> KernelRates:
        """Rates of the matrix products of blocks. A chip without 8-bit products emulates
        `train.fp8`. Raises as `rate` does."""
        train, chip = self.config.train, self.cluster.chip
        eight = train.fp8 != "none" and "fp8" in chip.peaks
        kind = self.software.products or ("fp8" if eight else train.precision)
        return compute_kernel_rates(chip, self.constants, kind)

    def without_latency(self) -> Machine:
        """Return the same machine with links on which messages take no time but that of their
        bytes."""
        machine = copy(self)
        machine.groups = {
            name: [replace(level, alpha=0.0) for level in group]
            for name, group in self.groups.items()
        }
        return machine

    def make_group(self, stride: Number, size: Number) -> list[GroupLevel]:
        """Return the levels of a group of `size` ranks that are `stride` apart; their bandwidth is
        the share of the link's that collectives reach."""
        return list_group_levels(self.cluster, stride, size, self.constants.links)

    def estimate_collective_seconds(
        self, operation: str, size: Number, axis: str, times: Number = 1.0
    ) -> Number:
        """Return the seconds of equal collectives over the ranks of an axis.

        Args:
            operation: A key of `collective_times.ALGORITHMS`.
            size: Bytes of all of them together.
            axis: A key of `groups`.
            times: Number of collectives.
        """
        algorithms = self.software.collectives
        return times * estimate_collective_seconds(
            operation, size / times, self.groups[axis], algorithms
        )

    def estimate_exchange_seconds(self, size: Number, axis: str, times: Number = 1.0) -> Number:
        """Return the seconds of equal exchanges of coded parts over the ranks of an axis: in the
        steps of `layout.exchange_steps`, or between all pairs of ranks.

        Args:
            size: Bytes of all of them together.
            axis: A key of `groups`.
            times: Number of exchanges.
        """
        in_steps = self.software.exchange_in_steps
        formula = estimate_stepped_exchange if in_steps else estimate_pairwise_all_to_all
        return times * formula(size / times, self.groups[axis])

    def estimate_contention_seconds(self, size: Number, axis: str) -> Number:
        """Return by how many seconds a concurrent collective of `size` bytes delays compute."""
        ranks = count_group_ranks(self.groups[axis])
        return self.estimate_hop_contention_seconds(size * (ranks - 1) / ranks)

    def estimate_hop_contention_seconds(self, size: Number) -> Number:
        """Return by how many seconds compute is delayed while a rank sends and receives `size`
        bytes. It is a share (`Constants.contention`) of the transfer's time on the innermost tier,
        whichever tier it uses, because it competes for memory and processors, not for links."""
        busy = size / (self.cluster.tiers[0].bandwidth * self.constants.get_link_efficiency(0))
        return self.constants.contention * busy


def compute_axis_span(axis: str, layout: Layout) -> tuple[int, int]:
    """Return (distance between neighbours, number of ranks) of an axis; of `data` within an
    island."""
    stride = {
        "tensor": 1,
        "context": layout.tensor,
        "data": layout.tensor * layout.context,
        "pipeline": layout.tensor * layout.context * layout.island_data,
        "islands": layout.world // layout.islands,
        "expert": layout.expert_tensor,
    }[axis]
    return stride, layout.island_data if axis == "data" else layout.sizes[axis]


def find_outermost_tier(cluster: Cluster, stride: int, size: int) -> Tier:
    """Return the outermost tier that a group of ranks uses.

    Args:
        cluster: Chips and links.
        stride: Distance of neighbours in the group.
        size: Ranks of the group.
    """
    for tier in cluster.tiers:
        if stride * size <= tier.size:
            return tier
    return cluster.tiers[-1]
