"""Collectives: asynchronous, labelled by axis, and counted in bytes.

Every collective returns a `Pending`, whose tensor can be reached only through `wait()`. A group of
one rank communicates nothing, so callers need no special case for it. On a CPU, all-gather and
reduce-scatter consist of sends and receives between all pairs of ranks. Gloo's own collectives take
up to three times as long, use more of the processor (docs/log.md), and add in low precision. What
other modules need of groups, pending results and messages (`point_to_point.py`) is imported from
here too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from megaframe.distributed.group import ALONE, Group, Ring, gather_single, scatter_single
from megaframe.distributed.pending import Pending, start_pending
from megaframe.distributed.point_to_point import exchange_pairwise, receive, send, shift_ring
from megaframe.distributed.traffic import Traffic, WaitTimer

__all__ = [
    "ALONE",
    "Group",
    "Pending",
    "Reduction",
    "Ring",
    "Traffic",
    "WaitTimer",
    "all_gather",
    "all_gather_",
    "all_gather_v",
    "all_reduce",
    "all_to_all",
    "all_to_all_v",
    "barrier",
    "exchange_messages",
    "exchange_pairwise",
    "get_own_part",
    "receive",
    "reduce_scatter",
    "reduce_scatter_",
    "reduce_scatter_v",
    "send",
    "shift_ring",
    "start_collective",
    "sum_into",
]

Reduction = Literal["sum", "max", "min"]
_OPERATIONS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}


def all_reduce(tensor: Tensor, group: Group, how: Reduction = "sum") -> Pending[Tensor]:
    """Reduce a tensor in place over the group.

    Args:
        tensor: Of the same shape on all ranks; overwritten.
        group: The ranks.
        how: The operation.

    Returns:
        The same tensor.
    """
    if group.handle is None:
        return Pending(tensor)
    # The bytes of a ring: a reduce-scatter and an all-gather.
    group.traffic.count(2 * tensor.nbytes * (group.size - 1) // group.size)
    operation = _OPERATIONS[how]
    return start_collective(
        tensor,
        group,
        lambda: dist.all_reduce(tensor, operation, group.handle, async_op=True),
        "all_reduce",
    )


def all_gather(tensor: Tensor, group: Group) -> Pending[Tensor]:
    """Gather the tensors [R, ...] of all ranks of the group, concatenated: [size * R, ...]."""
    if group.handle is None:
        return Pending(tensor)
    tensor = tensor.contiguous()
    out = tensor.new_empty((group.size * tensor.shape[0], *tensor.shape[1:]))
    group.traffic.count(tensor.nbytes * (group.size - 1))
    if group.should_send_pairwise(tensor):
        # Views of the result: what arrives needs no copy.
        parts = out.view(group.size, *tensor.shape)
        parts[group.index].copy_(tensor)
        return exchange_pairwise(
            out, [tensor] * group.size, parts, group, kind="all_gather", like=out
        )
    return start_collective(
        out, group, lambda: gather_single(out, tensor, group.handle, async_op=True), "all_gather"
    )


def reduce_scatter(tensor: Tensor, group: Group) -> Pending[Tensor]:
    """Sum the tensors [size * R, ...] of all ranks; the result is this rank's part [R, ...]."""
    if group.handle is None:
        return Pending(tensor)
    tensor = tensor.contiguous()
    out = tensor.new_empty((tensor.shape[0] // group.size, *tensor.shape[1:]))
    group.traffic.count(out.nbytes * (group.size - 1))
    if group.should_send_pairwise(tensor):
        leaving = tensor.view(group.size, *out.shape)
        coming = list(torch.empty_like(leaving))
        # This rank's own part takes its place among the others, without being sent.
        coming[group.index] = leaving[group.index]
        # Called after all parts have arrived, so that each rank sums them in the order of ranks.
        add = partial(sum_into, out, coming)
        return exchange_pairwise(out, leaving, coming, group, add, kind="reduce_scatter", like=out)
    return start_collective(
        out,
        group,
        lambda: scatter_single(out, tensor, group=group.handle, async_op=True),
        "reduce_scatter",
    )


def all_to_all(tensor: Tensor, group: Group) -> Pending[Tensor]:
    """Exchange parts of a tensor [size, ...]: part i goes to rank i of the group, and part i of the
    result comes from rank i."""
    if group.handle is None:
        return Pending(tensor)
    tensor = tensor.contiguous()
    out = torch.empty_like(tensor)
    group.traffic.count(tensor.nbytes // group.size * (group.size - 1))
    return start_collective(
        out,
        group,
        lambda: dist.all_to_all_single(out, tensor, group=group.handle, async_op=True),
        "all_to_all",
    )


def sum_into(out: Tensor, parts: Sequence[Tensor]) -> None:
    """Write the sum of all parts, in order, into `out`. Adds in fp32 at least and rounds once."""
    # A copy even if it has this type already: parts[0] may be the caller's tensor.
    total = parts[0].to(torch.promote_types(out.dtype, torch.float32), copy=True)
    for part in parts[1:]:
        total += part
    out.copy_(total)


def start_collective(
    out: Tensor,
    group: Group,
    start: Callable[[], dist.Work | None],
    kind: str,
    *,
    variable_size: bool = False,
) -> Pending[Tensor]:
    """Start a collective over a group.

    Args:
        out: Its result.
        group: The ranks.
        start: Starts it and returns torch's work.
        kind: Its name.
        variable_size: Whether the shape of `out` differs between ranks.

    Returns:
        `out`. In a serial group it is complete when this returns.
    """
    group.check_collective(kind, None if variable_size else out)
    traffic = group.traffic
    pending = start_pending(
        out, group, start, kind, timer=traffic.collective_timer, size=traffic.take_latest()
    )
    if group.serial:
        pending.wait()
    return pending


def barrier(group: Group) -> None:
    """Wait until every rank of the group has called this.

    Args:
        group: The ranks to wait for.

    Raises:
        LostRanks: If one of them does not call it.
    """
    if group.handle is not None:
        group.check_collective("barrier", None)
        start = partial(dist.barrier, group.handle, async_op=True)
        start_pending(None, group, start, "barrier", timer=group.traffic.collective_timer).wait()


def get_own_part(flat: Tensor, group: Group) -> Tensor:
    """Return this rank's part of `flat`, a view."""
    length = len(flat) // group.size
    return flat[group.index * length :][:length]


def reduce_scatter_(flat: Tensor, group: Group, buffer: Tensor | None = None) -> Pending[Tensor]:
    """Reduce-scatter in place: this rank's part becomes its sum over the ranks.

    Args:
        flat: Parts of equal length for all ranks, rank after rank. The content of the other parts
            becomes undefined.
        group: The ranks.
        buffer: For the parts that arrive on a CPU, with the length of all parts but one; None to
            allocate it.

    Returns:
        This rank's part, a view of `flat`.
    """
    own_part = get_own_part(flat, group)
    if group.handle is None:
        return Pending(own_part)
    group.traffic.count(own_part.nbytes * (group.size - 1))
    if not group.should_send_pairwise(flat):
        return start_collective(
            own_part,
            group,
            lambda: scatter_single(own_part, flat, group=group.handle, async_op=True),
            "reduce_scatter",
        )
    parts = flat.view(group.size, -1)
    arriving = list(torch.empty_like(parts[1:]) if buffer is None else buffer.view_as(parts[1:]))

    def add() -> None:
        # In the order of ranks after this one's own part, which is already in place.
        for other in arriving:
            own_part.add_(other)

    received = [*arriving[: group.index], own_part, *arriving[group.index :]]
    return exchange_pairwise(
        own_part, parts, received, group, add, kind="reduce_scatter", like=own_part
    )


def all_gather_(flat: Tensor, group: Group) -> Pending[Tensor]:
    """All-gather in place: fill each other part from its rank. The result is all of `flat`."""
    if group.handle is None:
        return Pending(flat)
    own_part = get_own_part(flat, group)
    group.traffic.count(own_part.nbytes * (group.size - 1))
    if not group.should_send_pairwise(flat):
        return start_collective(
            flat,
            group,
            lambda: gather_single(flat, own_part, group.handle, async_op=True),
            "all_gather",
        )
    parts = flat.view(group.size, -1)
    return exchange_pairwise(
        flat, [own_part] * group.size, parts, group, kind="all_gather", like=flat
    )


def exchange_messages(messages: Tensor, group: Group) -> Pending[Tensor]:
    """Send one message to each other rank and receive one from each.

    Args:
        messages: [size - 1, ...], in the order of ranks without this one.
        group: The ranks.

    Returns:
        What arrived, in the same order and shape.
    """
    if group.handle is None:
        return Pending(messages)
    out = torch.empty_like(messages)
    # One row to and from every rank but this one.
    splits = [int(other != group.index) for other in range(group.size)]
    group.traffic.count(messages.nbytes)
    return start_collective(
        out,
        group,
        lambda: dist.all_to_all_single(
            out, messages, splits, splits, group=group.handle, async_op=True
        ),
        "exchange",
    )


def all_to_all_v(
    parts: Tensor, send_counts: Sequence[int], receive_counts: Sequence[int], group: Group
) -> Pending[Tensor]:
    """Exchange parts of any sizes.

    Args:
        parts: Rows for all ranks, rank after rank, [sum(leaving), ...].
        send_counts: How many rows go to each rank.
        receive_counts: How many rows come from each rank.
        group: The ranks.

    Returns:
        The rows from all ranks, rank after rank, [sum(coming), ...].
    """
    if group.handle is None:
        return Pending(parts)
    parts = parts.contiguous()
    out = parts.new_empty((sum(receive_counts), *parts.shape[1:]))
    # Bytes of a row. What a rank keeps for itself is not counted.
    size = parts.nbytes // max(1, len(parts))
    group.traffic.count((len(parts) - send_counts[group.index]) * size)
    group.check_parts(parts, send_counts, receive_counts)
    return start_collective(
        out,
        group,
        lambda: dist.all_to_all_single(
            out, parts, list(receive_counts), list(send_counts), group.handle, async_op=True
        ),
        "all_to_all",
        variable_size=True,
    )


def all_gather_v(tensor: Tensor, sizes: Sequence[int], group: Group) -> Pending[Tensor]:
    """Gather the tensors of all ranks.

    Args:
        tensor: Rows of this rank.
        sizes: How many rows each rank has.
        group: The ranks.

    Returns:
        The rows of all ranks, rank after rank, [sum(sizes), ...].
    """
    if group.handle is None:
        return Pending(tensor)
    tensor = tensor.contiguous()
    out = tensor.new_empty((sum(sizes), *tensor.shape[1:]))
    # Views of the result, of different sizes.
    parts = list(out.split(list(sizes)))
    group.traffic.count(tensor.nbytes * (group.size - 1))
    if not group.should_send_pairwise(tensor):
        return start_collective(
            out,
            group,
            lambda: dist.all_gather(parts, tensor, group.handle, async_op=True),
            "all_gather",
        )
    parts[group.index].copy_(tensor)
    return exchange_pairwise(out, [tensor] * group.size, parts, group, kind="all_gather", like=out)


def reduce_scatter_v(tensor: Tensor, sizes: Sequence[int], group: Group) -> Pending[Tensor]:
    """Sum the tensors of all ranks.

    Args:
        tensor: Rows for all ranks, rank after rank, [sum(sizes), ...].
        sizes: How many rows belong to each rank.
        group: The ranks.

    Returns:
        The sum of this rank's rows, [sizes[index], ...].
    """
    if group.handle is None:
        return Pending(tensor)
    tensor = tensor.contiguous()
    parts = list(tensor.split(list(sizes)))
    own_part = parts[group.index]
    out = torch.empty_like(own_part)
    group.traffic.count(tensor.nbytes - own_part.nbytes)
    if not group.should_send_pairwise(tensor):
        return start_collective(
            out,
            group,
            lambda: dist.reduce_scatter(out, parts, group=group.handle, async_op=True),
            "reduce_scatter",
            variable_size=True,
        )
    received = [torch.empty_like(own_part) for _ in parts]
    received[group.index] = own_part
    add = partial(sum_into, out, received)
    return exchange_pairwise(out, parts, received, group, add, kind="reduce_scatter", like=tensor)
