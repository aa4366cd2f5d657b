"""Traffic: seconds of the transfers inside a block that no compute hides.

A transfer beside compute still delays it: what it moves goes through the same memory and
processors.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from megaframe.plan.collectives import hop_seconds
from megaframe.plan.machine import Machine, Passes
from megaframe.plan.matrices import head_widths

Number = Any
"""A float, or a numpy array of them."""


def tensor_traffic(machine: Machine, linears: Passes, sums: int) -> Passes:
    """Exposed transfers of the tensor axis: so many `sums` of the stream in forward and again in
    backward, two of attention and an MLP that follow each other, each as a gather and a scatter
    where rows are divided; with rows divided backward also gathers as many saved inputs again,
    beside products. One sum has half of the bytes of two and, as the constants were fitted, all of
    their latencies."""
    model, software, sizes = machine.config.model, machine.software, machine.sizes
    size = machine.rate.width * machine.tokens * model.hidden * sums / 2
    parts = software.tensor_parts(machine.config)
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


def context_traffic(machine: Machine, attention: Passes) -> Passes:
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
    # Keys on their way forward, and gradients on their way back, are half as many half of the way.
    whole, most = (hop_seconds(part * size, machine.groups["context"]) for part in (1.0, 0.75))
    rounds = sizes.context - 1
    forward = rounds * np.maximum(0.0, most - attention.forward / sizes.context)
    backward = rounds * np.maximum(0.0, whole + most - attention.backward / sizes.context)
    return Passes(forward, backward, 0.0)


def expert_traffic(machine: Machine) -> Passes:
    """Tokens to their experts and back, in both directions."""
    model, sizes = machine.config.model, machine.sizes
    moe = model.moe
    assert moe is not None
    own = machine.tokens / sizes.tensor * moe.top_k * model.hidden * machine.rate.width
    one = machine.seconds("all_to_all", own, "expert")
    one = one + machine.seconds("all_gather", own * sizes.expert_tensor, "expert_tensor")
    hidden = 0.5 if machine.config.parallel.expert_overlap else 0.0
    return Passes(2 * one * (1 - hidden), 2 * one * (1 - hidden), 0.0)
