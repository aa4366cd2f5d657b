"""Costs: seconds of one block, of the head and of the update, on one rank, for one microbatch.

One arithmetic for a single run and for arrays of layouts: nothing here branches on a size. A block
has three passes as a schedule has them (forward, input gradient, weight gradient); what of a
transfer no compute hides is part of the pass that waits for it, and known by its axis.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from megaframe.config.schema import RunConfig
from megaframe.plan.cluster import Cluster
from megaframe.plan.collectives import Level, collective_seconds, hop_seconds, levels, members
from megaframe.plan.constants import Constants
from megaframe.plan.experts import has_experts
from megaframe.plan.kernels import (
    Rates,
    grouped_product_seconds,
    moving_seconds,
    rates,
    three_products,
)
from megaframe.plan.sizes import Sizes
from megaframe.plan.stages import head_widths, latent_width, mean_keys

Number = Any
"""A float, or a numpy array of them."""


_CAST_BYTES = 6.0
"""To find the largest of a tensor's values, to read them again, and to write them in eight bits as
they are and transposed."""


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
            "replicas": self.group(sizes.tensor * sizes.shard, sizes.data_replicate),
            "expert": self.group(sizes.expert_tensor, sizes.expert),
            "expert_tensor": self.group(1, sizes.expert_tensor),
            "next_stage": self.group(sizes.tensor * sizes.context * sizes.data, 2),
        }

    def group(self, stride: Number, size: Number) -> list[Level]:
        """Levels of a group, with the share of their bandwidth that collectives reach."""
        return levels(self.cluster, stride, size, self.constants.link)

    def seconds(self, operation: str, size: Number, axis: str, times: Number = 1.0) -> Number:
        """Collectives over the ranks of an axis, in so many `times` of together `size` bytes."""
        known = self.software.collectives
        return times * collective_seconds(operation, size / times, self.groups[axis], known)

    def delay(self, size: Number, axis: str) -> Number:
        """Seconds by which compute is delayed by `size` bytes of an axis beside it: those that the
        bytes take where links are fastest, because memory and processors carry them, not wires."""
        many = members(self.groups[axis])
        busy = size * (many - 1) / many / (self.cluster.tiers[0].bandwidth * self.constants.link)
        return self.constants.contention * busy


def block(machine: Machine, layer: int) -> Part:
    """One block."""
    model, sizes, rate = machine.config.model, machine.sizes, machine.rate
    emulated = model.emulate
    if emulated is not None:
        return Part(Passes(emulated.forward, emulated.backward, emulated.weight))
    moe = model.moe
    experts = moe is not None and has_experts(moe, layer)
    attention = _attention(machine)
    if machine.software.parallel_block and model.latent is None and not experts:
        linears = _joined_linears(machine)
    else:
        linears = _attention_linears(machine)
        linears = linears + (_expert_mlp(machine) if experts else _mlp(machine, model.ffn))
    stream = _elementwise(machine)
    again = Passes(0.0, _again(machine, linears, attention, stream), 0.0)
    compute = linears + attention + stream + again
    expert = _expert_traffic(machine) if experts else Passes()
    tensor = _tensor_traffic(machine, linears)
    full = sizes.recompute == 2
    tensor = tensor + Passes(0.0, np.where(full, tensor.forward, 0.0), 0.0)
    context = _context_traffic(machine, attention)
    # Host: launches are counted for the pass as a whole, and where it is the slower one it waits
    # for no transfer either.
    return Part(_hosted(machine, compute, tensor, rate), tensor, context, expert)


def _hosted(machine: Machine, compute: Passes, tensor: Passes, rate: Rates) -> Passes:
    """Compute, or what of the host's launches is longer than it and the exposed transfers."""
    software = machine.software
    forward = software.kernels * rate.launch
    extra = np.where(machine.sizes.recompute == 2, 1.0, 0.0)
    backward = forward * (software.backward_kernels + extra)
    device = compute.backward + compute.weight
    lacking = np.maximum(0.0, backward - device - tensor.backward - tensor.weight)
    return Passes(
        np.maximum(compute.forward, forward - tensor.forward),
        compute.backward + lacking,
        compute.weight,
    )


def _three(
    machine: Machine, outputs: Number, inputs: Number, rows: Number = None, groups: Number = 1.0
) -> Passes:
    rows = machine.tokens if rows is None else rows
    forward, backward, weight = three_products(machine.linear, rows, outputs, inputs, groups)
    adding = machine.software.accumulate_bytes * groups * outputs * inputs
    made = Passes(forward, backward, weight + moving_seconds(machine.rate, adding))
    if machine.software.products != "fp8":
        return made
    operands = groups * (rows * inputs + outputs * inputs)
    one = moving_seconds(machine.rate, _CAST_BYTES)
    return made + Passes(one * operands, one * groups * rows * outputs, 0.0)


def _attention_linears(machine: Machine) -> Passes:
    """Projections before and after attention."""
    model, tensor = machine.config.model, machine.sizes.tensor
    latent = model.latent
    if latent is None:
        queries = model.heads * model.head_dim / tensor
        keys = 2 * model.head_dim * np.maximum(1.0, model.kv_heads / tensor)
        return _three(machine, queries + keys, model.hidden) + _three(
            machine, model.hidden, queries
        )
    query, value = head_widths(model)
    own = machine.tokens / tensor  # latents are made of a rank's own rows
    parts = _three(machine, latent_width(latent), model.hidden, own)
    parts = parts + _three(machine, model.heads * query / tensor, latent.query_rank or model.hidden)
    heads = model.heads * (latent.head_dim + value) / tensor
    parts = parts + _three(machine, heads, latent.kv_rank)
    return parts + _three(machine, model.hidden, model.heads * value / tensor)


def _joined_linears(machine: Machine) -> Passes:
    """Those of a block whose attention and MLP start from the same rows: two products in all."""
    model, tensor = machine.config.model, machine.sizes.tensor
    up = 2 if model.activation == "swiglu" else 1
    queries = model.heads * model.head_dim / tensor
    keys = 2 * model.head_dim * np.maximum(1.0, model.kv_heads / tensor)
    inner = model.ffn / tensor
    into = _three(machine, queries + keys + up * inner, model.hidden)
    return into + _three(machine, model.hidden, queries + inner)


def _mlp(machine: Machine, width: Number) -> Passes:
    model, tensor = machine.config.model, machine.sizes.tensor
    up = 2 if model.activation == "swiglu" else 1
    inner = width / tensor
    return _three(machine, up * inner, model.hidden) + _three(machine, model.hidden, inner)


def _expert_mlp(machine: Machine) -> Passes:
    """Experts as equally busy ones, router and shared ones beside them."""
    model, sizes = machine.config.model, machine.sizes
    moe = model.moe
    assert moe is not None
    width = (moe.ffn or model.ffn) / sizes.expert_tensor
    up = 2 if model.activation == "swiglu" else 1
    here = np.maximum(1.0, moe.experts / sizes.expert)
    # The rows of all ranks that send here, dealt to the experts that are here.
    own = machine.tokens / sizes.tensor
    rows = own * moe.top_k * sizes.expert * sizes.expert_tensor / moe.experts
    found = _three(machine, up * width, model.hidden, rows, here)
    found = found + _three(machine, model.hidden, width, rows, here)
    found = found + _three(machine, moe.experts, model.hidden, own)
    if moe.shared:
        found = found + _mlp(machine, moe.shared * (moe.ffn or model.ffn))
    moved = machine.rate.width * own * moe.top_k * 8 * model.hidden  # sorted, sent and summed
    moving = moving_seconds(machine.rate, moved)
    return found + Passes(moving, moving, 0.0)


def _attention(machine: Machine) -> Passes:
    """Scores and what is made with them."""
    model, sizes, rate = machine.config.model, machine.sizes, machine.rate
    software, seq = machine.software, machine.config.train.seq
    query, value = head_widths(model)
    heads = model.heads / sizes.tensor
    if software.fused_attention:
        keys = mean_keys(seq, model.window) if software.causal_skip else seq
        flops = 2.0 * machine.tokens * keys * heads * (query + value)
        forward = flops / (rate.attention * software.attention_speed)
        # Backward makes scores again: five products in place of two (Dao 2023, section 3.1).
        return Passes(forward, 2.5 * forward, 0.0)
    groups = sizes.microbatch * heads
    rows, keys = seq / sizes.context, float(seq)
    products = grouped_product_seconds(rate, groups, rows, keys, query)
    products = products + grouped_product_seconds(rate, groups, rows, value, keys)
    one = moving_seconds(rate, groups * rows * keys)
    backward = 2 * products + software.score_backward_bytes * one
    return Passes(products + software.score_bytes * one, backward, 0.0)


def _elementwise(machine: Machine) -> Passes:
    """Norms, residuals, activations."""
    model, sizes, software = machine.config.model, machine.sizes, machine.software
    divided = sizes.tensor if software.sequence_parallel else 1.0
    stream = software.stream_passes * model.hidden / divided
    moe, width = model.moe, float(model.ffn)
    if moe is not None:
        width = (moe.top_k + moe.shared) * (moe.ffn or model.ffn)
    up = 1.5 if model.activation == "swiglu" else 1.0
    inner = software.inner_passes * up * width / sizes.tensor
    forward = moving_seconds(machine.rate, machine.rate.width * machine.tokens * (stream + inner))
    return Passes(forward, 2 * forward, 0.0)


def _again(machine: Machine, linears: Passes, attention: Passes, stream: Passes) -> Number:
    """Seconds of what backward computes again."""
    recompute = machine.sizes.recompute
    of_attention = machine.software.selective == "attention"
    part = attention.forward if of_attention else stream.forward
    whole = linears.forward + attention.forward + stream.forward
    return np.where(recompute == 2, whole, np.where(recompute == 1, part, 0.0))


def _tensor_traffic(machine: Machine, linears: Passes) -> Passes:
    """Exposed transfers of the tensor axis: two sums of the stream in forward and two in backward,
    each as a gather and a scatter where rows are divided; with rows divided backward also gathers
    two saved inputs again, beside products."""
    model, software, sizes = machine.config.model, machine.software, machine.sizes
    size = machine.rate.width * machine.tokens * model.hidden
    parts = software.tensor_parts(machine.config)
    if software.parallel_block:
        size = size / 2
    one = machine.seconds("all_gather", size, "tensor")
    if not software.sequence_parallel:
        half = machine.seconds("all_reduce", size, "tensor")
        return Passes(2 * half, 2 * half, 0.0)
    delay = 0.0 if software.copy_engines else machine.delay(4 * size, "tensor")
    forward = hidden_by(4 * one, linears.forward, parts, delay)
    if not software.overlap_tensor:
        return Passes(np.where(sizes.tensor > 1, forward, 0.0), 4 * one, 0.0)
    # The gathers of gradients wait; scatters and saved inputs run beside products.
    waiting = 2 * one / parts
    room = linears.weight + linears.backward / 2
    rest = hidden_by(4 * one, room, 16.0, delay)
    return Passes(forward, waiting + rest, 0.0)


def hidden_by(moved: Number, compute: Number, parts: float, delay: Number) -> Number:
    """What a transfer costs that is cut into `parts`, each beside the compute of another: the first
    one waits, compute may be too short for the others, and what it hides delays it, all of it by
    `delay` seconds, but never by more than it hides."""
    exposed = np.maximum(moved / parts, moved - compute * (parts - 1) / parts)
    hidden = moved - exposed
    return exposed + np.minimum(hidden, delay * hidden / np.maximum(moved, 1e-30))


def _context_traffic(machine: Machine, attention: Passes) -> Passes:
    """Keys and values round the ring, each transfer beside a tile; or heads for tokens."""
    model, sizes = machine.config.model, machine.sizes
    query, value = head_widths(model)
    width = machine.rate.width
    if machine.config.parallel.context_kind == "all_to_all":
        rows = machine.tokens * (model.heads + model.kv_heads) * (query + value)
        size = width * rows / sizes.tensor
        one = machine.seconds("all_to_all", size, "context")
        return Passes(one, 2 * one, 0.0)
    heads = np.maximum(1.0, model.kv_heads / sizes.tensor)
    size = width * machine.tokens * heads * (query + value)
    step = hop_seconds(size, machine.groups["context"])
    rounds = sizes.context - 1
    forward = rounds * np.maximum(0.0, step - attention.forward / sizes.context)
    backward = rounds * np.maximum(0.0, 2 * step - attention.backward / sizes.context)
    return Passes(forward, backward, 0.0)


def _expert_traffic(machine: Machine) -> Passes:
    """Tokens to their experts and back, in both directions."""
    model, sizes = machine.config.model, machine.sizes
    moe = model.moe
    assert moe is not None
    own = machine.tokens / sizes.tensor * moe.top_k * model.hidden * machine.rate.width
    one = machine.seconds("all_to_all", own, "expert")
    one = one + machine.seconds("all_gather", own * sizes.expert_tensor, "expert_tensor")
    hidden = 0.5 if machine.config.parallel.expert_overlap else 0.0
    return Passes(2 * one * (1 - hidden), 2 * one * (1 - hidden), 0.0)
