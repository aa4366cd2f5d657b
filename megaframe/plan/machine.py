"""Machine: what a layout meets on a cluster, and the seconds that are made of it.

Rates of kernels and groups of ranks, for one run or for arrays of layouts. Seconds come in three
passes, as a schedule has them, and by what takes them: compute, and of each axis what no compute
hides.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from megaframe.config.schema import RunConfig
from megaframe.plan.cluster import Cluster
from megaframe.plan.collectives import Level, collective_seconds, levels, members
from megaframe.plan.constants import Constants
from megaframe.plan.kernels import Rates, rates
from megaframe.plan.sizes import Sizes

Number = Any
"""A float, or a numpy array of them."""


@dataclass(frozen=True)
class Passes:
    """Seconds of forward, of input gradient and of weight gradient."""

    forward: Number = 0.0
    backward: Number = 0.0
    weight: Number = 0.0

    def __add__(self, other: Passes) -> Passes:
        return Passes(
            self.forward + other.forward,
            self.backward + other.backward,
            self.weight + other.weight,
        )

    def times(self, factor: Number) -> Passes:
        """`factor` of these."""
        return Passes(self.forward * factor, self.backward * factor, self.weight * factor)

    @property
    def total(self) -> Number:
        """Sum of the three."""
        return self.forward + self.backward + self.weight


@dataclass(frozen=True)
class Part:
    """Seconds of a part of the model by what takes them: `compute`, and exposed communication of
    `tensor`, `context` and `expert`."""

    compute: Passes
    tensor: Passes = Passes()
    context: Passes = Passes()
    expert: Passes = Passes()

    def __add__(self, other: Part) -> Part:
        return Part(
            self.compute + other.compute,
            self.tensor + other.tensor,
            self.context + other.context,
            self.expert + other.expert,
        )

    def times(self, factor: Number) -> Part:
        """`factor` of these."""
        return Part(
            self.compute.times(factor),
            self.tensor.times(factor),
            self.context.times(factor),
            self.expert.times(factor),
        )

    @property
    def whole(self) -> Passes:
        """All of it."""
        return self.compute + self.tensor + self.context + self.expert

    def named(self) -> Mapping[str, Passes]:
        """By name of the axis, compute first."""
        return {
            "compute": self.compute,
            "tensor": self.tensor,
            "context": self.context,
            "expert": self.expert,
        }


class Machine:
    """Rates and groups of one cluster for given sizes; everything below asks it."""

    def __init__(
        self, config: RunConfig, cluster: Cluster, constants: Constants, sizes: Sizes
    ) -> None:
        self.config, self.cluster, self.sizes = config, cluster, sizes
        self.constants, self.software = constants, constants.software
        kind = config.train.precision
        self.rate: Rates = rates(cluster.chip, constants, kind)
        self.linear: Rates = rates(cluster.chip, constants, self.software.products or kind)
        self.tokens = sizes.microbatch * config.train.seq / sizes.context
        self.groups: dict[str, list[Level]] = {
            "tensor": self.group(1, sizes.tensor),
            "context": self.group(sizes.tensor, sizes.context),
            "shard": self.group(sizes.tensor, sizes.shard),
            "owners": self.group(1, sizes.tensor * sizes.shard),
            "replicas": self.group(sizes.tensor * sizes.shard, sizes.data_replicate),
            "expert": self.group(sizes.expert_tensor, sizes.expert),
            "expert_tensor": self.group(1, sizes.expert_tensor),
            "next_stage": self.group(sizes.tensor * sizes.context * sizes.data, 2),
            "pipeline": self.group(sizes.tensor * sizes.context * sizes.data, sizes.pipeline),
        }

    def group(self, stride: Number, size: Number) -> list[Level]:
        """Levels of a group, with the share of their bandwidth that collectives reach."""
        return levels(self.cluster, stride, size, self.constants.links)

    def buckets(self, chunks: Number, blocks: Number) -> Number:
        """In which a rank's gradients of so many chunks and blocks leave."""
        return np.maximum(1.0, chunks if self.software.gradients_of == "chunk" else blocks)

    def seconds(self, operation: str, size: Number, axis: str, times: Number = 1.0) -> Number:
        """Collectives over the ranks of an axis, in so many `times` of together `size` bytes."""
        known = self.software.collectives
        return times * collective_seconds(operation, size / times, self.groups[axis], known)

    def delay(self, size: Number, axis: str) -> Number:
        """Seconds by which compute is delayed by a collective of `size` bytes beside it."""
        many = members(self.groups[axis])
        return self.hop_delay(size * (many - 1) / many)

    def hop_delay(self, size: Number) -> Number:
        """The same of `size` bytes that a rank sends and receives: what they take where links are
        fastest, because memory and processors carry them, not wires."""
        busy = size / (self.cluster.tiers[0].bandwidth * self.constants.link(0))
        return self.constants.contention * busy
