"""Seconds of one block, and of the output head, on one rank for one microbatch.

The same arithmetic serves a single run and arrays of layouts, so nothing here branches on a size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from megaframe.architecture.block import BlockDescription
from megaframe.architecture.embedding import describe_embedding
from megaframe.architecture.layer import BatchedProduct, MixerDescription
from megaframe.architecture.linear import GroupedLinearSpec, LinearSpec
from megaframe.architecture.model_blocks import describe_block
from megaframe.architecture.quantised import count_decoded_bytes
from megaframe.architecture.stages import compute_trained_share
from megaframe.architecture.window import Chunk, Window, compute_mean_keys
from megaframe.planner.communication_times import (
    estimate_context_parallel_times,
    estimate_expert_parallel_times,
    estimate_tensor_parallel_times,
)
from megaframe.planner.constants import get_attention_speeds
from megaframe.planner.kernel_times import (
    KernelRates,
    compute_start_factor,
    count_computed_keys,
    estimate_elementwise_seconds,
    estimate_grouped_matmul_seconds,
    estimate_linear_seconds,
)
from megaframe.planner.local_products import compute_local_product
from megaframe.planner.machine import CostBreakdown, Machine, PassTimes

Number = Any
"""A float, or a numpy array of them."""
_HEAD = 128
"""Width of the heads for which the speeds of attention are known."""
_EXPONENTIAL_TERMS = {"a100": 32.0, "h100": 64.0}
"""Terms of attention's products that tensor cores sum in the time of one exponential: a
multiprocessor computes 16 exponentials in a cycle (NVIDIA, CUDA C++ Programming Guide, throughput
of native arithmetic instructions), and 2,048 (A100) or 4,096 (H100) operations of products, of
which a score has four for each term."""


def estimate_block_times(machine: Machine, layer: int) -> CostBreakdown:
    """Return the seconds of the block of a layer."""
    model, sizes, rate = machine.config.model, machine.sizes, machine.rate
    emulation = model.emulate
    if emulation is not None:
        return CostBreakdown(PassTimes(emulation.forward, emulation.backward, emulation.weight))
    block = describe_block(model, layer)
    experts_per_token = block.feed_forward.experts_per_token
    mixing = [(mixer, _estimate_attention_times(machine, mixer)) for mixer in block.mixers]
    attention = sum((times for _, times in mixing), PassTimes())
    linears, traffic = block.linears, block.tensor_traffic.forward
    if machine.software.parallel_block and not experts_per_token:
        linears, traffic = _join_parallel_linears(linears), traffic // 2
    products = sum((_estimate_linear_times(machine, linear) for linear in linears), PassTimes())
    share = compute_trained_share(model, machine.config.frozen_patterns, layer)
    products = replace(products, weight=products.weight * share)
    if experts_per_token:
        products = products + _estimate_permutation_times(machine, experts_per_token)
    halves = block.halves / 2
    elementwise = _estimate_elementwise_times(machine, block)
    recompute = PassTimes(
        0.0, _estimate_recompute_seconds(machine, products, attention, elementwise), 0.0
    )
    compute = products + attention + elementwise + recompute
    compute = compute + _estimate_decoding_times(machine, block.linears)
    expert = (
        estimate_expert_parallel_times(machine, experts_per_token)
        if experts_per_token
        else PassTimes()
    )
    tensor = estimate_tensor_parallel_times(machine, products, traffic)
    tensor = tensor + _estimate_statistics_times(
        machine, block.count_tensor_statistics(sizes.tensor)
    )
    if gathered := block.count_gathered_bytes(machine.config.train.seq, rate.width):
        size = machine.tokens * gathered
        seconds = machine.estimate_collective_seconds("all_gather", size, "tensor")
        tensor = tensor + PassTimes(seconds, 0.0, 0.0)
    is_full = sizes.recompute == 2
    tensor = tensor + PassTimes(0.0, np.where(is_full, tensor.forward, 0.0), 0.0)
    context = sum(
        (estimate_context_parallel_times(machine, mixer, times) for mixer, times in mixing),
        PassTimes(),
    )
    # Launches of the host are compared with the whole pass, exposed transfers included: while the
    # device waits for a transfer, the host catches up.
    return CostBreakdown(
        _extend_to_launches(machine, compute, tensor, rate, halves), tensor, context, expert
    )


def _estimate_statistics_times(machine: Machine, elements: int) -> PassTimes:
    """Return the seconds in which both passes sum some elements of each token over tensor ranks."""
    if not elements:
        return PassTimes()
    size = max(4, machine.rate.width) * machine.tokens * elements
    seconds = machine.estimate_collective_seconds("all_reduce", size, "tensor")
    return PassTimes(seconds, seconds, 0.0)


def _extend_to_launches(
    machine: Machine, compute: PassTimes, tensor: PassTimes, rate: KernelRates, halves: float
) -> PassTimes:
    """Return the compute of each pass, extended to what the host's launches take beyond the exposed
    transfers if that is longer; of a block with one half they are half as many."""
    software = machine.software
    # A graph is launched as a whole.
    forward = 0.0 if machine.config.train.cuda_graph else software.kernels * halves * rate.launch
    recomputed = np.where(machine.sizes.recompute == 2, 1.0, 0.0)
    backward = forward * (software.backward_kernels + recomputed)
    device = compute.backward + compute.weight
    waiting = np.maximum(0.0, backward - device - tensor.backward - tensor.weight)
    return PassTimes(
        np.maximum(compute.forward, forward - tensor.forward),
        compute.backward + waiting,
        compute.weight,
    )


def _estimate_linear_times(machine: Machine, linear: LinearSpec) -> PassTimes:
    """Return the seconds of a linear layer."""
    groups, rows, outputs, inputs = compute_local_product(
        machine.sizes, machine.config.train.seq, linear
    )
    forward, backward, weight = estimate_linear_seconds(
        machine.linear, rows, outputs, inputs, groups
    )
    in_kernels = machine.software.overlap_tensor and not machine.software.fused_parts
    if in_kernels and not isinstance(linear, GroupedLinearSpec):
        forward, backward = _divide_into_parts(machine, linear, forward, backward)
    accumulated = machine.software.accumulate_bytes * groups * outputs * inputs
    products = PassTimes(
        forward, backward, weight + estimate_elementwise_seconds(machine.rate, accumulated)
    )
    if linear.rescales:
        products = products + _estimate_rescaling_times(machine, rows, outputs, inputs)
    if machine.linear.width == machine.rate.width:
        return products
    operands = groups * (rows * inputs + outputs * inputs)
    cast = estimate_elementwise_seconds(machine.rate, machine.software.cast_bytes)
    return products + PassTimes(cast * operands, cast * groups * rows * outputs, 0.0)


def _estimate_decoding_times(machine: Machine, linears: Sequence[LinearSpec]) -> PassTimes:
    """Return the seconds in which values are made of codes, once for each pass."""
    moved, seq = 0.0, machine.config.train.seq
    by_kernel = machine.config.kernels.codes != "reference" and not machine.cluster.chip.is_host
    for linear in linears:
        if linear.quantised is not None:
            groups, _, outputs, inputs = compute_local_product(machine.sizes, seq, linear)
            width = machine.rate.width
            each = count_decoded_bytes(linear.quantised, width, by_kernel=by_kernel)
            moved = moved + each * groups * outputs * inputs
    seconds = estimate_elementwise_seconds(machine.rate, moved)
    return PassTimes(seconds, seconds, 0.0)


def _estimate_rescaling_times(
    machine: Machine, rows: Number, outputs: Number, inputs: Number
) -> PassTimes:
    """Return the seconds in which the weight is read for the norms of its rows and for its product
    with A, and results and their gradients are rescaled."""
    width, results = machine.rate.width, rows * outputs
    read = 2 * width * outputs * inputs
    return PassTimes(
        estimate_elementwise_seconds(machine.rate, read + 2 * width * results),
        # dy and y are read, and their products written and summed.
        estimate_elementwise_seconds(machine.rate, 6 * width * results),
        0.0,
    )


def _divide_into_parts(
    machine: Machine, linear: LinearSpec, forward: Number, backward: Number
) -> tuple[Number, Number]:
    """Return the seconds of a linear layer's forward and input gradient where rows travel in parts:
    each part is a product of its own, with a start and a last wave of its own."""
    tensor, rows = machine.sizes.tensor, machine.tokens
    parts = machine.software.count_tensor_parts(machine.config.parallel, tensor)
    parts = np.where(tensor > 1, parts, 1.0)
    outputs, inputs = linear.compute_local_sizes(tensor)
    of_part = [
        parts * estimate_grouped_matmul_seconds(machine.linear, 1.0, rows / parts, *widths)
        for widths in ((outputs, inputs), (inputs, outputs))
    ]
    if not linear.is_row:
        return of_part[0] if linear.is_column else forward, backward
    units, left = machine.cluster.chip.units, machine.software.scatter_units
    fewer = np.where(tensor > 1, units / max(1.0, units - left), 1.0)
    return fewer * of_part[0], of_part[1]


def _join_parallel_linears(linears: Sequence[LinearSpec]) -> list[LinearSpec]:
    """Return the linears of a block whose attention and MLP start from the same rows: one product
    for all column linears, and one for all row linears."""
    columns = [linear for linear in linears if linear.is_column]
    rows = [linear for linear in linears if linear.is_row]
    return [
        LinearSpec(columns[0].inputs, (sum(c.results for c in columns),), std=0.0, split=0),
        LinearSpec((sum(r.terms for r in rows),), rows[0].outputs, std=0.0, split=1),
        *(linear for linear in linears if linear.split is None),
    ]


def _estimate_permutation_times(machine: Machine, experts_per_token: int) -> PassTimes:
    """Return the seconds in which rows are sorted for experts, sent, and summed."""
    rows = machine.tokens / machine.sizes.tensor * experts_per_token
    moved_bytes = machine.rate.width * rows * 8 * machine.config.model.hidden
    seconds = estimate_elementwise_seconds(machine.rate, moved_bytes)
    return PassTimes(seconds, seconds, 0.0)


def _estimate_attention_times(machine: Machine, mixer: MixerDescription) -> PassTimes:
    """Return the seconds of attention itself: the scores and the weighted sum of values; or of what
    another mixer has in their place."""
    sizes, rate, seq = machine.sizes, machine.rate, machine.config.train.seq
    software, products = machine.software, mixer.list_batched_products(seq)
    if not mixer.has_scores:
        times = _estimate_chunk_times(machine, products)
        return times.scale(sizes.tensor) if mixer.repeated else times
    if software.fused_attention:
        kernel = software.attention
        if _is_windowed(mixer.window, seq) and software.windowed_attention is not None:
            kernel = software.windowed_attention
        forward, backward = (
            sum(_count_computed_flops(machine, p, mixer.window, kernel) for p in of_pass) / seq
            for of_pass in (products, [p for p in products if p.differentiated])
        )
        speed = rate.attention * sizes.tensor / machine.tokens
        family = machine.cluster.chip.family
        forward_speed, backward_speed = get_attention_speeds(kernel, family)
        # Backward recomputes the scores: five products instead of two (Dao 2023, section 3.1).
        return PassTimes(
            forward / speed / forward_speed, 2.5 * backward / speed / backward_speed, 0.0
        )
    seconds = PassTimes()
    for product in products:
        groups, rows = (
            sizes.microbatch * product.number / sizes.tensor,
            product.rows / sizes.context,
        )
        once = estimate_grouped_matmul_seconds(rate, groups, rows, product.outputs, product.terms)
        seconds = seconds + PassTimes(once, 2 * once * product.differentiated, 0.0)
    scores = products[0]
    size = sizes.microbatch * scores.number / sizes.tensor * scores.rows * scores.outputs
    pass_over_scores = estimate_elementwise_seconds(rate, size / sizes.context)
    passes = PassTimes(software.score_bytes, software.score_backward_bytes, 0.0)
    return seconds + passes.scale(pass_over_scores)


def _is_windowed(window: Window, seq: int) -> bool:
    """Return whether a sample has keys that a window or chunk hides."""
    size = window.size if isinstance(window, Chunk) else window
    return size is not None and size < seq


def _count_computed_flops(
    machine: Machine, product: BatchedProduct, window: Window, kernel: str
) -> float:
    """Return the operations of one of fused attention's two products in a sample, in terms of heads
    of 128 and of long rows of keys: a causal kernel computes the tiles at the edges of the mask as
    a whole, a tile of queries starts and ends, and the exponential of a score takes as long as some
    terms of its products."""
    seq = max(product.rows, 1)
    share = product.causal_share if product.gathered else 1.0
    if machine.software.causal_skip and not product.gathered:
        keys = count_computed_keys(seq, window)
        edges = keys - compute_mean_keys(seq, window)
        share = min(1.0, product.causal_share + edges / seq) * compute_start_factor(kernel, keys)
    terms = min(product.terms, product.outputs)
    exponential = _EXPONENTIAL_TERMS.get(machine.cluster.chip.family, 0.0)
    slower = (1 + exponential / terms) / (1 + exponential / _HEAD)
    return product.flops * share * slower


def _estimate_chunk_times(machine: Machine, products: Sequence[BatchedProduct]) -> PassTimes:
    """Return the seconds of products of activations that are no scores, in plain code: each writes
    its results and another one reads them. The backward pass is taken to compute them again."""
    sizes, rate, forward = machine.sizes, machine.rate, 0.0
    for product in products:
        ranks = np.minimum(sizes.tensor, product.groups or sizes.tensor)
        number = sizes.microbatch * product.number / (ranks * sizes.context)
        shape = product.rows, product.outputs, product.terms
        forward = forward + estimate_grouped_matmul_seconds(rate, number, *shape)
        moved = 2 * rate.width * number * product.rows * product.outputs
        forward = forward + estimate_elementwise_seconds(rate, moved)
    return PassTimes(forward, 3 * forward, 0.0)


def _estimate_elementwise_times(machine: Machine, block: BlockDescription) -> PassTimes:
    """Return the seconds of norms, residuals and activations, of which a block with one half has
    half; and of reading and writing several streams."""
    sizes, software = machine.sizes, machine.software
    stream_ranks = sizes.tensor if software.sequence_parallel else 1.0
    elements = software.stream_passes * block.halves / 2 * machine.config.model.hidden
    elements = elements + sum(part.moved_elements for part in block.stream_parts.values())
    stream = elements / stream_ranks
    inner = software.inner_passes * block.feed_forward.inner_elements / sizes.tensor
    forward = estimate_elementwise_seconds(
        machine.rate, machine.rate.width * machine.tokens * (stream + inner)
    )
    return PassTimes(forward, 2 * forward, 0.0)


def _estimate_recompute_seconds(
    machine: Machine, linears: PassTimes, attention: PassTimes, elementwise: PassTimes
) -> Number:
    """Return the seconds of what backward recomputes."""
    recompute = machine.sizes.recompute
    selective = {
        "attention": attention.forward,
        "norms": elementwise.forward,
        "products": linears.forward / 2 + elementwise.forward,
    }[machine.software.selective]
    full = linears.forward + attention.forward + elementwise.forward
    return np.where(recompute == 2, full, np.where(recompute == 1, selective, 0.0))


def estimate_embedding_times(machine: Machine) -> CostBreakdown:
    """Return the seconds of the embedding: the products that make further inputs of layers, and
    passes over its table (`Software.embedding_bytes`); a look-up takes none."""
    model = machine.config.model
    if model.emulate is not None:
        return CostBreakdown(PassTimes())
    linears = describe_embedding(model, machine.config.train.seq).linears
    times = sum((_estimate_linear_times(machine, linear) for linear in linears), PassTimes())
    table = np.ceil((model.vocab or 0) / machine.sizes.tensor) * model.hidden
    moved = machine.software.embedding_bytes * table
    return CostBreakdown(
        times + PassTimes(weight=estimate_elementwise_seconds(machine.rate, moved))
    )


def estimate_head_times(machine: Machine) -> CostBreakdown:
    """Return the seconds of the output head and its loss. Its gradients are computed in forward, or
    in backward if the software does so (`head_backward`)."""
    model, sizes, rate = machine.config.model, machine.sizes, machine.rate
    if model.emulate is not None:
        return CostBreakdown(PassTimes())
    vocab = np.ceil((model.vocab or 0) / sizes.tensor)
    products = estimate_linear_seconds(rate, machine.tokens, vocab, model.hidden)
    loss = estimate_elementwise_seconds(rate, machine.software.logit_bytes * machine.tokens * vocab)
    size = rate.width * machine.tokens * model.hidden
    gather = machine.estimate_collective_seconds("all_gather", size, "tensor")
    heads = 1.0 + model.mtp_depth
    if machine.software.head_backward:
        forward, backward, weight = products
        deferred = np.minimum(1.0, machine.software.deferred_heads / sizes.microbatches)
        weight = weight * np.where(sizes.pipeline > 1, 1 - deferred, 1.0)
        compute = _extend_head_to_launches(
            machine, forward + 0.7 * loss, backward + 0.3 * loss, weight
        )
        return CostBreakdown(compute.scale(heads), PassTimes(gather, gather, 0.0).scale(heads))
    compute = _extend_head_to_launches(machine, sum(products) + loss, 0.0, 0.0)
    return CostBreakdown(compute.scale(heads), PassTimes(2 * gather).scale(heads))


def _extend_head_to_launches(
    machine: Machine, forward: Number, backward: Number, weight: Number
) -> PassTimes:
    """Return the passes, extended to the time that the host needs to launch them if longer."""
    software = machine.software
    graph = machine.config.train.cuda_graph
    host = 0.0 if graph else software.end_kernels * machine.rate.launch
    waiting = np.maximum(0.0, host * software.backward_kernels - backward - weight)
    return PassTimes(np.maximum(forward, host), backward + waiting, weight)
