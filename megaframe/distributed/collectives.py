"""Collectives: asynchronous, labelled by axis, and counted in bytes.

Every collective returns a `Pending`, whose tensor can be reached only through `wait()`. A group of
one rank communicates nothing, so callers need no special case for it. On a CPU, all-gather and
reduce-scatter consist of sends and receives between all pairs of ranks, and each rank sums what it
gets in the order of ranks. Gloo's own collectives take up to three times as long, use more of the
processor (docs/log.md), and add in low precision.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from megaframe.distributed.group import ALONE, Group, Ring, gather_single, scatter_single
from megaframe.distributed.pending import Pending, started
from megaframe.distributed.traffic import Traffic, Waits

__all__ = [
    "ALONE",
    "Group",
    "Pending",
    "Reduction",
    "Ring",
    "Traffic",
    "Waits",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "barrier",
    "collective",
    "pass_on",
    "receive",
    "reduce_scatter",
    "send",
    "sum_into",
    "to_each",
]

Reduction = Literal["sum", "max", "min"]
_OPERATIONS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}


def all_reduce(tensor: Tensor, group: Group, how: Reduction = "sum") -> Pending[Tensor]:
    """Reduce `tensor` in place over the group. The bytes counted are those of a ring."""
    if group.handle is None:
        return Pending(tensor)
    group.traffic.count(2 * tensor.nbytes * (group.size - 1) // group.size)
    operation = _OPERATIONS[how]
    return collective(
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
    if group.in_pairs(tensor):
        parts = out.view(group.size, *tensor.shape)
        parts[group.index].copy_(tensor)
        return to_each(out, [tensor] * group.size, parts, group, kind="all_gather", like=out)
    return collective(
        out,
        group,
        lambda: gather_single(out, tensor, group.handle, async_op=True),
        "all_gather",
    )


def reduce_scatter(tensor: Tensor, group: Group) -> Pending[Tensor]:
    """Sum the tensors [size * R, ...] of all ranks; the result is this rank's part [R, ...]."""
    if group.handle is None:
        return Pending(tensor)
    tensor = tensor.contiguous()
    out = tensor.new_empty((tensor.shape[0] // group.size, *tensor.shape[1:]))
    group.traffic.count(out.nbytes * (group.size - 1))
    if group.in_pairs(tensor):
        leaving = tensor.view(group.size, *out.shape)
        coming = list(torch.empty_like(leaving))
        coming[group.index] = leaving[group.index]
        add = partial(sum_into, out, coming)
        return to_each(out, leaving, coming, group, add, kind="reduce_scatter", like=out)
    return collective(
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
    return collective(
        out,
        group,
        lambda: dist.all_to_all_single(out, tensor, group=group.handle, async_op=True),
        "all_to_all",
    )


def sum_into(out: Tensor, parts: Sequence[Tensor]) -> None:
    """Write the sum of all parts, in order, into `out`. Adds in fp32 at least and rounds once."""
    total = parts[0].to(torch.promote_types(out.dtype, torch.float32), copy=True)
    for part in parts[1:]:
        total += part
    out.copy_(total)


def to_each(
    out: Tensor,
    leaving: Sequence[Tensor] | Tensor,
    coming: Sequence[Tensor] | Tensor,
    group: Group,
    last: Callable[[], object] | None = None,
    *,
    kind: str,
    like: Tensor | None = None,
) -> Pending[Tensor]:
    """Send leaving[i] to rank i of the group and receive coming[i] from it, for all other ranks.
    Each rank starts with the ranks after it, so that they do not all send to the same one. Empty
    tensors are not sent.

    out: the result, ready after all transfers and the call of `last`.
    kind: name of the collective.
    like: a tensor whose type and shape are the same on all ranks, for `Group.begin`.
    """
    group.begin(kind, like)
    size = group.traffic.latest()
    others = [(group.index + step) % group.size for step in range(1, group.size)]
    receives = [(there, coming[there]) for there in reversed(others) if coming[there].numel()]
    sends = [(there, leaving[there]) for there in others if leaving[there].numel()]
    messages = _started_as_one(out, group, receives, sends, kind)
    pending = Pending(out, too=messages, last=last, waits=group.traffic.waits, size=size)
    if group.serial:
        pending.wait()
    return pending


def _started_as_one(
    out: Tensor,
    group: Group,
    receives: Sequence[tuple[int, Tensor]],
    sends: Sequence[tuple[int, Tensor]],
    kind: str,
) -> Pending[Tensor] | None:
    """Start receives from and sends to ranks of a group, each given as (rank, tensor), as one
    operation. Returns None if there are none.

    Over NCCL they must be one group of calls. The calls of a communicator otherwise run one after
    the other, and the host waits in the first one to a rank until that rank makes the matching
    call. Ranks in a ring that all send first would wait for each other forever. Gloo's calls do
    not wait, so there they are started one by one.
    """
    starts: list[Callable[[], dist.Work | None]] = [
        partial(dist.irecv, tensor, group=group.handle, group_src=rank) for rank, tensor in receives
    ]
    starts += [
        partial(dist.isend, tensor, group=group.handle, group_dst=rank) for rank, tensor in sends
    ]
    pending: Pending[Tensor] | None = None
    if starts and group.in_groups(out):
        starts = [partial(_grouped, starts, group, out.device)]
    for start in starts:
        pending = started(out, group, start, kind, pending)
    return pending


def _grouped(
    starts: Sequence[Callable[[], dist.Work | None]], group: Group, device: torch.device
) -> dist.Work:
    """Start sends and receives of a group as one operation of NCCL, and return its work."""
    # What `dist.batch_isend_irecv` does, which takes only groups that torch has registered.
    with dist._coalescing_manager(group.handle, device, async_ops=True) as calls:
        for start in starts:
            start()
    (work,) = calls.works
    return work


def collective(
    out: Tensor,
    group: Group,
    start: Callable[[], dist.Work | None],
    kind: str,
    *,
    uneven: bool = False,
) -> Pending[Tensor]:
    """Start a collective over a group by calling `start`.

    out: its result.
    kind: its name.
    uneven: the shape of `out` differs between ranks.
    """
    group.begin(kind, None if uneven else out)
    traffic = group.traffic
    pending = started(out, group, start, kind, waits=traffic.waits, size=traffic.latest())
    if group.serial:
        pending.wait()
    return pending


def send(tensor: Tensor, link: Group, to: int | None = None) -> Pending[Tensor]:
    """Send to the other rank of a link, or to rank `to` of any group. The tensor must not change
    until the send is done."""
    link.traffic.count(tensor.nbytes)
    other = 1 - link.index if to is None else to
    link.begin_message(tensor, link.index, other)
    start = partial(dist.isend, tensor, group=link.handle, group_dst=other)
    return started(tensor, link, start, "send", waits=link.traffic.messages)


def receive(into: Tensor, link: Group, source: int | None = None) -> Pending[Tensor]:
    """Receive from the other rank of a link, or from rank `source` of any group, in the order in
    which it sends."""
    other = 1 - link.index if source is None else source
    link.begin_message(into, other, link.index)
    start = partial(dist.irecv, into, group=link.handle, group_src=other)
    messages = link.traffic.messages
    return started(into, link, start, "receive", waits=messages, size=into.nbytes)


def pass_on(tensor: Tensor, into: Tensor, ring: Ring, *, back: bool = False) -> Pending[Tensor]:
    """Send to the next rank of a ring of at least two and receive from the one before, or with
    `back` the other way round, as one operation. In a serial ring both are done when this
    returns."""
    group, tensor = ring.group, tensor.contiguous()
    to, source = (ring.before, ring.next) if back else (ring.next, ring.before)
    group.begin("pass_on back" if back else "pass_on", None)
    group.begin_message(tensor, group.index, to)
    group.begin_message(into, source, group.index)
    group.traffic.count(tensor.nbytes)
    messages = _started_as_one(into, group, [(source, into)], [(to, tensor)], "pass_on")
    pending = Pending(into, too=messages, waits=group.traffic.waits, size=into.nbytes)
    if group.serial:
        pending.wait()
    return pending


def barrier(group: Group) -> None:
    """Wait until every rank of the group has called this. Raises `LostRanks` if one does not."""
    if group.handle is not None:
        group.begin("barrier", None)
        start = partial(dist.barrier, group.handle, async_op=True)
        started(None, group, start, "barrier", waits=group.traffic.waits).wait()
