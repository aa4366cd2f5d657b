"""Scaling: when a layout is bound by compute, what more ranks gain, and advice on batch sizes.

Communication has a roofline, as memory has. A transfer can be hidden if the operations per byte
moved are at least the operations that the chip does in the time of one byte, the ridge of the tier.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import sqrt

from megaframe.architecture.stages import block_work
from megaframe.config.schema import RunConfig
from megaframe.hardware.cluster import Cluster
from megaframe.layout import Layout
from megaframe.planner.constants import Constants
from megaframe.planner.machine import Machine
from megaframe.planner.reasons import outermost, span
from megaframe.planner.sizes import sizes_of
from megaframe.planner.update import block_owned


@dataclass(frozen=True)
class Balance:
    """The roofline of one axis of a layout. tier: the tier of its transfers. intensity: operations
    of a rank per byte that it moves for this axis. ridge: operations in the time of one byte on the
    tier. The axis is bound by compute if intensity is at least ridge."""

    axis: str
    tier: str
    intensity: float
    ridge: float

    @property
    def compute_bound(self) -> bool:
        """Whether compute can hide the transfers."""
        return self.intensity >= self.ridge


def balances(
    config: RunConfig, layout: Layout, cluster: Cluster, constants: Constants
) -> Iterator[Balance]:
    """Yield the communication roofline of each axis that has more than one rank.

    Bytes and operations are those of the last block for one microbatch. What data ranks exchange
    once per step counts divided by the number of microbatches.
    """
    machine = Machine(config, cluster, constants, sizes_of(config, layout))
    model, width = config.model, machine.rate.width
    work = block_work(config, model.layers - 1)
    rows = float(machine.tokens)
    flops = rows * (work.forward + work.backward + work.weight) / layout.tensor
    many = config.train.global_batch // (config.train.microbatch * layout.data)
    own = block_owned(machine, model.layers - 1)
    stream = width * rows * model.hidden
    keys = 2 * model.kv_heads * model.head_dim / layout.tensor
    gathered = 2 * width if config.parallel.zero == 3 else 0
    each = gathered + 4 if config.parallel.zero >= 2 else 8 / many
    moved = {
        "tensor": 10 * stream * (layout.tensor - 1) / layout.tensor,
        "context": 6 * width * rows * keys * (layout.context - 1),
        "data": (own.dense + own.experts) * each,
        "expert": 4 * stream * (model.moe.top_k if model.moe else 0) / layout.tensor,
    }
    rate = machine.rate.flops
    for axis, size in moved.items():
        if layout.sizes[axis] > 1 and size > 0:
            tier = outermost(cluster, *span(axis, layout))
            share = constants.link(cluster.tiers.index(tier))
            ridge = rate / (tier.bandwidth * share)
            yield Balance(axis, tier.name, flops / float(size), ridge)


def compute_bound_batch(
    config: RunConfig, layout: Layout, cluster: Cluster, constants: Constants
) -> int | None:
    """Return the smallest global batch, in samples, at which compute can hide the transfers of data
    ranks. They happen once per step, so a larger batch has more compute to hide them. None if they
    happen in every pass (`parallel.zero` 2 and 3), because then the batch makes no difference."""
    together = config.train.microbatch * layout.data
    if layout.data == 1:
        return together
    if config.parallel.zero >= 2:
        return None
    one = with_batch(config, together)
    found = [b for b in balances(one, layout, cluster, constants) if b.axis == "data"]
    if not found:
        return together
    return together * max(1, -(-int(1e6 * found[0].ridge) // int(1e6 * found[0].intensity)))


def amdahl(serial: float, ranks: int) -> float:
    """Return the speed-up of fixed work of which a share `serial` is not divided:
    1 / (s + (1-s)/n) (Amdahl 1967)."""
    return 1 / (serial + (1 - serial) / ranks)


def gustafson(serial: float, ranks: int) -> float:
    """Return the speed-up if the work grows with the ranks: s + (1-s) n (Gustafson 1988)."""
    return serial + (1 - serial) * ranks


def serial_share(one: float, many: float, ranks: int) -> float:
    """Return the serial share with which Amdahl's law explains `one` seconds on one rank and `many`
    seconds on `ranks` ranks (Karp and Flatt 1990)."""
    if ranks == 1:
        return 0.0
    return (many / one - 1 / ranks) / (1 - 1 / ranks)


def scaling_efficiency(
    base_ranks: int, base_tokens_per_second: float, ranks: int, tokens_per_second: float
) -> float:
    """Return the tokens per second and rank, relative to those of the base."""
    return tokens_per_second / ranks / (base_tokens_per_second / base_ranks)


@dataclass(frozen=True)
class BatchAdvice:
    """What another batch size needs. lr_linear, lr_root: learning rates by the linear and by the
    root rule. steps: steps to the same loss. tokens: tokens relative to those that the old batch
    needed. efficient: whether the batch is not above the critical one."""

    lr_linear: float
    lr_root: float
    steps: float
    tokens: float
    efficient: bool


def batch_advice(old: int, new: int, critical: float, lr: float, steps: int) -> BatchAdvice:
    """Return advice for changing from a batch of `old` tokens to one of `new` tokens.

    critical: batch in tokens at which twice the minimum of tokens is needed (McCandlish et al.
    2018: steps S = S_min (1 + B_crit / B), tokens E = E_min (1 + B / B_crit)). The learning rate
    grows with the batch (Goyal et al. 2017, for SGD) or with its root (for Adam; Malladi et al.
    2022), but not beyond that of the critical batch. lr, steps: those of the old batch.
    """
    reach = min(new, max(old, critical)) / old
    return BatchAdvice(
        lr_linear=lr * reach,
        lr_root=lr * sqrt(reach),
        steps=steps * (1 + critical / new) / (1 + critical / old),
        tokens=(1 + new / critical) / (1 + old / critical),
        efficient=new <= critical,
    )


def with_batch(config: RunConfig, batch: int) -> RunConfig:
    """Return the config with another global batch and no batch ramp."""
    train = config.train.model_copy(update={"global_batch": batch, "batch_ramp": None})
    return config.model_copy(update={"train": train})
