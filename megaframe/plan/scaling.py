"""Figures of scaling: when a layout is bound by compute, what more ranks bring, what to do with the
learning rate when the batch changes.

Communication has a roofline as memory has one: a transfer stays hidden while the operations that
run beside it, per byte that it moves, are at least the operations that the chip makes in the time
of a byte: the ridge of the tier.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import sqrt

from megaframe.config.schema import RunConfig
from megaframe.layout import Layout
from megaframe.plan.cluster import Cluster
from megaframe.plan.constants import Constants
from megaframe.plan.machine import Machine
from megaframe.plan.reasons import outermost, span
from megaframe.plan.sizes import sizes_of
from megaframe.plan.stages import block_work
from megaframe.plan.update import block_owned


@dataclass(frozen=True)
class Balance:
    """One axis of a layout. tier: that its transfers go over. intensity: operations that a rank
    makes per byte that it moves for this axis. ridge: operations in the time of a byte on the tier.
    The axis is bound by compute where the first is larger."""

    axis: str
    tier: str
    intensity: float
    ridge: float

    @property
    def compute_bound(self) -> bool:
        """Whether transfers can hide behind compute."""
        return self.intensity >= self.ridge


def balances(
    config: RunConfig, layout: Layout, cluster: Cluster, constants: Constants
) -> Iterator[Balance]:
    """The communication roofline of each axis that has more than one rank: bytes and operations of
    the last block and a microbatch, of data ranks those of a whole step."""
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
    """The least global batch, in samples, at which data ranks' transfers can hide behind compute:
    they are made once a step, so what hides them grows with it. None where they are made in every
    pass (`parallel.zero` 2 and 3), when no batch changes their ratio."""
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
    """Speed-up of fixed work, of which a share `serial` does not divide: 1 / (s + (1-s)/n)
    (Amdahl 1967)."""
    return 1 / (serial + (1 - serial) / ranks)


def gustafson(serial: float, ranks: int) -> float:
    """Speed-up where the work grows with the ranks: s + (1-s) n (Gustafson 1988)."""
    return serial + (1 - serial) * ranks


def serial_share(one: float, many: float, ranks: int) -> float:
    """The share that does not divide by which Amdahl's law explains `one` second on one rank and
    `many` on `ranks` (Karp and Flatt 1990)."""
    if ranks == 1:
        return 0.0
    return (many / one - 1 / ranks) / (1 - 1 / ranks)


def scaling_efficiency(
    base_ranks: int, base_tokens_per_second: float, ranks: int, tokens_per_second: float
) -> float:
    """Tokens per second and rank, beside those of the base."""
    return tokens_per_second / ranks / (base_tokens_per_second / base_ranks)


@dataclass(frozen=True)
class BatchAdvice:
    """What another batch asks for. lr: learning rates by rule. steps: to reach the same loss.
    tokens: relative to what the old batch needed. efficient: whether the batch is below the
    critical one."""

    lr_linear: float
    lr_root: float
    steps: float
    tokens: float
    efficient: bool


def batch_advice(old: int, new: int, critical: float, lr: float, steps: int) -> BatchAdvice:
    """Advice for going from a batch of `old` tokens to one of `new`.

    critical: batch in tokens at which twice the tokens of the least are needed (McCandlish et al.
    2018: steps S = S_min (1 + B_crit / B), tokens E = E_min (1 + B / B_crit)). The learning rate
    grows with the batch (Goyal et al. 2017, for SGD) or with its root (for Adam; Malladi et al.
    2022), and no further than that of the critical batch.
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
    """The config with another global batch, without a ramp."""
    train = config.train.model_copy(update={"global_batch": batch, "batch_ramp": None})
    return config.model_copy(update={"train": train})
