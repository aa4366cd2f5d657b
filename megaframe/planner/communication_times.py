"""Exposed seconds of the transfers inside a block and between pipeline stages.

A transfer that overlaps with compute still delays it, because both use the same memory and
processors.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from megaframe.architecture.cross_layer_tensors import count_mean_message_elements
from megaframe.architecture.layer import MixerDescription
from megaframe.planner.collective_times import estimate_hop_seconds
from megaframe.planner.kernel_times import estimate_elementwise_seconds
from megaframe.planner.machine import Machine, PassTimes

Number = Any
"""A float, or a numpy array of them."""


def estimate_tensor_parallel_times(
    machine: Machine, linears: PassTimes, elements: float
) -> PassTimes:
    """Return the exposed transfers of the tensor axis in one block.

    With sequence parallelism, backward transfers as much as forward, and also gathers as many saved
    inputs again, overlapped with products. A block is charged the latencies of four transfers in
    forward, as when the constants were fitted.

    Args:
        machine: The links, and the layout.
        linears: Seconds of the products that the transfers overlap with.
        elements: Per token that a block gathers or scatters in forward
            (`TensorTraffic.forward`): four times the width of the stream if an MLP follows
            attention.
    """
    software, sizes = machine.software, machine.sizes
    size = machine.rate.width * machine.tokens * elements / 4
    parts = software.count_tensor_parts(machine.config.parallel, sizes.tensor)
    gather = machine.estimate_collective_seconds("all_gather", size, "tensor")
    if not software.sequence_parallel:
        all_reduce = machine.estimate_collective_seconds("all_reduce", size, "tensor")
        return PassTimes(2 * all_reduce, 2 * all_reduce, 0.0)
    delay = (
        0.0 if software.copy_engines else machine.estimate_contention_seconds(4 * size, "tensor")
    )
    # Scatters that processors are left to delay nobody else's.
    of_forward = delay / 2 if software.scatter_units else delay
    forward = estimate_exposed_seconds(4 * gather, linears.forward, parts, of_forward)
    if not software.overlap_tensor:
        return PassTimes(np.where(sizes.tensor > 1, forward, 0.0), 4 * gather, 0.0)
    # Gathers of gradients are exposed; scatters and gathers of saved inputs overlap with products.
    exposed_gathers = 2 * gather / parts
    products = linears.weight + linears.backward / 2
    exposed_rest = estimate_exposed_seconds(4 * gather, products, 16.0, delay)
    return PassTimes(forward, exposed_gathers + exposed_rest, 0.0)


def estimate_exposed_seconds(
    transfer: Number, compute: Number, parts: float, delay: Number
) -> Number:
    """Return the seconds that a transfer costs when it is cut into `parts`, each of which overlaps
    with the compute of another.

    The first part is exposed, and so is what is longer than the compute. The hidden rest delays
    compute: by `delay` seconds if everything were hidden, in proportion otherwise, but never by
    more than is hidden.

    Args:
        transfer: Seconds of the transfer.
        compute: Seconds of the compute that runs at the same time.
        parts: Number of parts.
        delay: Seconds by which the whole transfer would delay compute.
    """
    exposed = np.maximum(transfer / parts, transfer - compute * (parts - 1) / parts)
    hidden = transfer - exposed
    return exposed + np.minimum(hidden, delay * hidden / np.maximum(transfer, 1e-30))


def estimate_context_parallel_times(
    machine: Machine, mixer: MixerDescription, attention: PassTimes
) -> PassTimes:
    """Return the exposed transfers of the context axis: keys and values on the ring, each
    overlapped with a tile; or the exchange of heads for tokens; or what is gathered of whole
    samples; or what pieces do to a state.

    Args:
        machine: Rates and rank groups.
        mixer: The mixer of a layer.
        attention: Its compute, behind which transfers can hide.
    """
    sizes, width = machine.sizes, machine.rate.width
    if not mixer.has_scores:
        gathered = 2 * sizes.microbatch * sizes.context * mixer.passed_elements / sizes.tensor
        states = machine.estimate_collective_seconds(
            "all_gather", max(4, width) * gathered, "context"
        )
        return PassTimes(states, 2 * states, 0.0).scale(1.0 if mixer.passed_elements else 0.0)
    if mixer.gathered_elements:
        size = width * machine.tokens * sizes.context * mixer.gathered_elements
        gather = machine.estimate_collective_seconds("all_gather", size, "context")
        return PassTimes(gather, gather, 0.0)
    if machine.config.parallel.context_kind == "all_to_all":
        size = width * machine.tokens * mixer.exchanged_elements / sizes.tensor
        exchange = machine.estimate_collective_seconds("all_to_all", size, "context")
        return PassTimes(exchange, 2 * exchange, 0.0)
    groups = np.maximum(1.0, mixer.ring_groups / sizes.tensor)
    size = width * machine.tokens * groups * mixer.ring_width
    # Keys in forward, and gradients of keys in backward, have half the size in half of the hops.
    keys_and_gradients, keys = (
        estimate_hop_seconds(part * size, machine.groups["context"]) for part in (1.0, 0.75)
    )
    rounds = sizes.context - 1
    forward = rounds * np.maximum(0.0, keys - attention.forward / sizes.context)
    backward = rounds * np.maximum(
        0.0, keys_and_gradients + keys - attention.backward / sizes.context
    )
    return PassTimes(forward, backward, 0.0) + _estimate_combining_times(machine, mixer)


def _estimate_combining_times(machine: Machine, mixer: MixerDescription) -> PassTimes:
    """Return the seconds in which the results of a ring's tiles are combined: that of the rank's
    own keys, and of three quarters of its queries with the keys of each other rank."""
    sizes = machine.sizes
    outputs = sum(linear.terms for linear in mixer.linears if linear.is_row) / sizes.tensor
    tiles = np.where(sizes.context > 1, 1 + 0.75 * (sizes.context - 1), 0.0)
    once = estimate_elementwise_seconds(machine.rate, machine.tokens * outputs * tiles)
    forward, backward = machine.software.ring_bytes
    return PassTimes(forward * once, backward * once, 0.0)


def estimate_expert_parallel_times(machine: Machine, experts_per_token: int) -> PassTimes:
    """Return the exposed transfers of tokens to their experts and back, in forward and backward.
    `parallel.expert_overlap` is assumed to hide half of them."""
    sizes, rows = machine.sizes, machine.tokens / machine.sizes.tensor * experts_per_token
    sent_bytes = rows * machine.config.model.hidden * machine.rate.width
    exchange = machine.estimate_collective_seconds("all_to_all", sent_bytes, "expert")
    exchange = exchange + machine.estimate_collective_seconds(
        "all_gather", sent_bytes * sizes.expert_tensor, "expert_tensor"
    )
    hidden = 0.5 if machine.config.parallel.expert_overlap else 0.0
    return PassTimes(2 * exchange * (1 - hidden), 2 * exchange * (1 - hidden), 0.0)


def estimate_pipeline_wait_seconds(machine: Machine) -> Number:
    """Return the seconds that a transfer to the next stage adds to the pass before it. If transfers
    overlap with compute it is the delay of that compute, otherwise the transfer itself and the
    launch of the first kernels after it."""
    software, alone = machine.software, machine.sizes.pipeline == 1
    if software.overlap_pipeline:
        return np.where(
            alone, 0.0, machine.estimate_hop_contention_seconds(_count_bytes_to_next_stage(machine))
        )
    host = software.pass_kernels * machine.rate.launch
    return np.where(alone, 0.0, estimate_stage_transfer_seconds(machine) + host)


def estimate_stage_transfer_seconds(machine: Machine) -> Number:
    """Return the seconds from the end of a stage's pass until the next stage has its result, which
    includes a gather if tensor ranks each sent a part and need the whole. A rank at the border of a
    node has one neighbour inside the node and one outside, so the mean of both counts; all other
    ranks keep pace with it."""
    sizes, software = machine.sizes, machine.software
    message, groups = _count_bytes_to_next_stage(machine), machine.groups
    near, far = (estimate_hop_seconds(message, groups[name]) for name in ("next_stage", "pipeline"))
    seconds = (near + far) / 2
    if software.scatter_pipeline and not software.sequence_parallel:
        size = message * sizes.tensor
        seconds = seconds + machine.estimate_collective_seconds("all_gather", size, "tensor")
    return np.where(sizes.pipeline > 1, seconds, 0.0)


def _count_bytes_to_next_stage(machine: Machine) -> Number:
    """Return the bytes that a rank sends to the next stage per microbatch."""
    model, software = machine.config.model, machine.software
    if model.emulate is not None:
        return 0.0 * machine.tokens
    width = machine.rate.width
    size = width * machine.tokens * count_mean_message_elements(model, width)
    divided = software.scatter_pipeline or software.sequence_parallel
    return size / machine.sizes.tensor if divided else size
