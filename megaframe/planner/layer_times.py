"""Seconds of one block, and of the output head, on one rank for one microbatch.

The same arithmetic serves a single run and arrays of layouts, so nothing here branches on a size.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from megaframe.architecture.attention import head_widths, latent_width, mean_keys, window_of
from megaframe.architecture.experts import has_experts, has_mlp
from megaframe.config.model import ModelConfig
from megaframe.planner.communication_times import (
    context_parallel_times,
    expert_parallel_times,
    tensor_parallel_times,
)
from megaframe.planner.kernel_times import (
    KernelRates,
    elementwise_seconds,
    grouped_product_seconds,
    linear_seconds,
)
from megaframe.planner.machine import CostBreakdown, Machine, PassTimes

Number = Any
"""A float, or a numpy array of them."""
_CAST_BYTES = 6.0
"""Bytes moved per element to convert a tensor to 8 bits: read it to find the maximum, read it again
(2 bytes each), and write it in 8 bits twice, as it is and transposed."""


def layer_kinds(model: ModelConfig) -> list[tuple[bool, int | None]]:
    """Return for each layer what its costs depend on: whether it has experts, and its window in
    tokens."""
    moe = model.moe
    return [
        (moe is not None and has_experts(moe, layer), window_of(model, layer))
        for layer in range(model.layers)
    ]


def block_times(machine: Machine, layer: int) -> CostBreakdown:
    """Return the seconds of the block of a layer."""
    model, sizes, rate = machine.config.model, machine.sizes, machine.rate
    emulation = model.emulate
    if emulation is not None:
        return CostBreakdown(PassTimes(emulation.forward, emulation.backward, emulation.weight))
    moe = model.moe
    experts = moe is not None and has_experts(moe, layer)
    attention = _attention_times(machine, layer)
    is_parallel = machine.software.parallel_block and model.latent is None and not experts
    if is_parallel:
        linears = _parallel_block_linears(machine)
    else:
        linears = _attention_linears(machine)
        linears = linears + (_expert_times(machine) if experts else _mlp_times(machine, model.ffn))
    elementwise = _elementwise_times(machine)
    recompute = PassTimes(0.0, _recompute_seconds(machine, linears, attention, elementwise), 0.0)
    compute = linears + attention + elementwise + recompute
    expert = expert_parallel_times(machine) if experts else PassTimes()
    sums = 1 if is_parallel or not has_mlp(model, layer) else 2
    tensor = tensor_parallel_times(machine, linears, sums)
    is_full = sizes.recompute == 2
    tensor = tensor + PassTimes(0.0, np.where(is_full, tensor.forward, 0.0), 0.0)
    context = context_parallel_times(machine, attention)
    # Launches of the host are compared with the whole pass, exposed transfers included: while the
    # device waits for a transfer, the host catches up.
    return CostBreakdown(
        _extend_to_launches(machine, compute, tensor, rate), tensor, context, expert
    )


def _extend_to_launches(
    machine: Machine, compute: PassTimes, tensor: PassTimes, rate: KernelRates
) -> PassTimes:
    """Return the compute of each pass, extended to what the host's launches take beyond the exposed
    transfers if that is longer."""
    software = machine.software
    forward = software.kernels * rate.launch
    recomputed = np.where(machine.sizes.recompute == 2, 1.0, 0.0)
    backward = forward * (software.backward_kernels + recomputed)
    device = compute.backward + compute.weight
    waiting = np.maximum(0.0, backward - device - tensor.backward - tensor.weight)
    return PassTimes(
        np.maximum(compute.forward, forward - tensor.forward),
        compute.backward + waiting,
        compute.weight,
    )


def _linear_times(
    machine: Machine, outputs: Number, inputs: Number, rows: Number = None, groups: Number = 1.0
) -> PassTimes:
    rows = machine.tokens if rows is None else rows
    forward, backward, weight = linear_seconds(machine.linear, rows, outputs, inputs, groups)
    accumulated = machine.software.accumulate_bytes * groups * outputs * inputs
    products = PassTimes(forward, backward, weight + elementwise_seconds(machine.rate, accumulated))
    if machine.software.products != "fp8":
        return products
    operands = groups * (rows * inputs + outputs * inputs)
    cast = elementwise_seconds(machine.rate, _CAST_BYTES)
    return products + PassTimes(cast * operands, cast * groups * rows * outputs, 0.0)


def _attention_linears(machine: Machine) -> PassTimes:
    """Return the seconds of the projections before and after attention."""
    model, tensor = machine.config.model, machine.sizes.tensor
    latent = model.latent
    if latent is None:
        queries = model.heads * model.head_dim / tensor
        keys = 2 * model.head_dim * np.maximum(1.0, model.kv_heads / tensor)
        return _linear_times(machine, queries + keys, model.hidden) + _linear_times(
            machine, model.hidden, queries
        )
    query, value = head_widths(model)
    own_rows = machine.tokens / tensor  # a rank computes the latents of its own rows
    linears = _linear_times(machine, latent_width(latent), model.hidden, own_rows)
    linears = linears + _linear_times(
        machine, model.heads * query / tensor, latent.query_rank or model.hidden
    )
    heads = model.heads * (latent.head_dim + value) / tensor
    linears = linears + _linear_times(machine, heads, latent.kv_rank)
    return linears + _linear_times(machine, model.hidden, model.heads * value / tensor)


def _parallel_block_linears(machine: Machine) -> PassTimes:
    """Return the seconds of the linears of a block whose attention and MLP start from the same
    rows: two products in total."""
    model, tensor = machine.config.model, machine.sizes.tensor
    up = 2 if model.activation == "swiglu" else 1
    queries = model.heads * model.head_dim / tensor
    keys = 2 * model.head_dim * np.maximum(1.0, model.kv_heads / tensor)
    inner = model.ffn / tensor
    into = _linear_times(machine, queries + keys + up * inner, model.hidden)
    return into + _linear_times(machine, model.hidden, queries + inner)


def _mlp_times(machine: Machine, width: Number) -> PassTimes:
    model, tensor = machine.config.model, machine.sizes.tensor
    up = 2 if model.activation == "swiglu" else 1
    inner = width / tensor
    return _linear_times(machine, up * inner, model.hidden) + _linear_times(
        machine, model.hidden, inner
    )


def _expert_times(machine: Machine) -> PassTimes:
    """Return the seconds of the experts, assumed to be equally loaded, with the router, the shared
    experts, and the permutation of rows."""
    model, sizes = machine.config.model, machine.sizes
    moe = model.moe
    assert moe is not None
    width = (moe.ffn or model.ffn) / sizes.expert_tensor
    up = 2 if model.activation == "swiglu" else 1
    local_experts = np.maximum(1.0, moe.experts / sizes.expert)
    # Rows per expert: those of all ranks that send to this one, spread over all experts.
    own_rows = machine.tokens / sizes.tensor
    rows = own_rows * moe.top_k * sizes.expert * sizes.expert_tensor / moe.experts
    experts = _linear_times(machine, up * width, model.hidden, rows, local_experts)
    experts = experts + _linear_times(machine, model.hidden, width, rows, local_experts)
    experts = experts + _linear_times(machine, moe.experts, model.hidden, own_rows)
    if moe.shared:
        experts = experts + _mlp_times(machine, moe.shared * (moe.ffn or model.ffn))
    permuted = (
        machine.rate.width * own_rows * moe.top_k * 8 * model.hidden
    )  # sorted, sent and summed
    permutation = elementwise_seconds(machine.rate, permuted)
    return experts + PassTimes(permutation, permutation, 0.0)


def _attention_times(machine: Machine, layer: int) -> PassTimes:
    """Return the seconds of attention itself: the scores and the weighted sum of values."""
    model, sizes, rate = machine.config.model, machine.sizes, machine.rate
    software, seq = machine.software, machine.config.train.seq
    query, value = head_widths(model)
    heads = model.heads / sizes.tensor
    if software.fused_attention:
        keys = mean_keys(seq, window_of(model, layer)) if software.causal_skip else seq
        flops = 2.0 * machine.tokens * keys * heads * (query + value)
        forward = flops / (rate.attention * software.attention_speed)
        # Backward recomputes the scores: five products instead of two (Dao 2023, section 3.1).
        return PassTimes(forward, 2.5 * forward, 0.0)
    groups = sizes.microbatch * heads
    rows, keys = seq / sizes.context, float(seq)
    products = grouped_product_seconds(rate, groups, rows, keys, query)
    products = products + grouped_product_seconds(rate, groups, rows, value, keys)
    pass_over_scores = elementwise_seconds(rate, groups * rows * keys)
    backward = 2 * products + software.score_backward_bytes * pass_over_scores
    return PassTimes(products + software.score_bytes * pass_over_scores, backward, 0.0)


def _elementwise_times(machine: Machine) -> PassTimes:
    """Return the seconds of norms, residuals and activations."""
    model, sizes, software = machine.config.model, machine.sizes, machine.software
    stream_ranks = sizes.tensor if software.sequence_parallel else 1.0
    stream = software.stream_passes * model.hidden / stream_ranks
    moe, width = model.moe, float(model.ffn)
    if moe is not None:
        width = (moe.top_k + moe.shared) * (moe.ffn or model.ffn)
    up = 1.5 if model.activation == "swiglu" else 1.0
    inner = software.inner_passes * up * width / sizes.tensor
    forward = elementwise_seconds(
        machine.rate, machine.rate.width * machine.tokens * (stream + inner)
    )
    return PassTimes(forward, 2 * forward, 0.0)


def _recompute_seconds(
    machine: Machine, linears: PassTimes, attention: PassTimes, elementwise: PassTimes
) -> Number:
    """Return the seconds of what backward recomputes."""
    recompute = machine.sizes.recompute
    recomputes_attention = machine.software.selective == "attention"
    selective = attention.forward if recomputes_attention else elementwise.forward
    full = linears.forward + attention.forward + elementwise.forward
    return np.where(recompute == 2, full, np.where(recompute == 1, selective, 0.0))


def head_times(machine: Machine) -> CostBreakdown:
    """Return the seconds of the output head and its loss. Its gradients are computed in forward, or
    in backward if the software does so (`head_backward`)."""
    model, sizes, rate = machine.config.model, machine.sizes, machine.rate
    if model.emulate is not None:
        return CostBreakdown(PassTimes())
    vocab = np.ceil((model.vocab or 0) / sizes.tensor)
    products = linear_seconds(rate, machine.tokens, vocab, model.hidden)
    loss = elementwise_seconds(rate, machine.software.logit_bytes * machine.tokens * vocab)
    size = rate.width * machine.tokens * model.hidden
    gather = machine.collective_seconds("all_gather", size, "tensor")
    heads = 1.0 + model.mtp_depth
    if machine.software.head_backward:
        forward, backward, weight = products
        compute = _extend_head_to_launches(
            machine, forward + 0.7 * loss, backward + 0.3 * loss, weight
        )
        return CostBreakdown(compute.scaled(heads), PassTimes(gather, gather, 0.0).scaled(heads))
    compute = _extend_head_to_launches(machine, sum(products) + loss, 0.0, 0.0)
    return CostBreakdown(compute.scaled(heads), PassTimes(2 * gather).scaled(heads))


def _extend_head_to_launches(
    machine: Machine, forward: Number, backward: Number, weight: Number
) -> PassTimes:
    """Return the passes, extended to the time that the host needs to launch them if longer."""
    software = machine.software
    host = software.end_kernels * machine.rate.launch
    waiting = np.maximum(0.0, host * software.backward_kernels - backward - weight)
    return PassTimes(np.maximum(forward, host), backward + waiting, weight)
