"""Point-to-point communication: messages between two ranks, around a ring, and between all pairs
of ranks. Like the collectives, each returns a `Pending` and is counted in bytes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from megaframe.distributed.group import Group, Ring
from megaframe.distributed.pending import Pending, start_pending


def send(tensor: Tensor, link: Group, to: int | None = None) -> Pending[Tensor]:
    """Send a tensor.

    Args:
        tensor: It must not change until the send is done.
        link: A group of two ranks, or any group.
        to: Index of the receiving rank; None for the other rank of a link.

    Returns:
        The same tensor.
    """
    link.traffic.count(tensor.nbytes)
    other = 1 - link.index if to is None else to
    link.check_message(tensor, link.index, other)
    start = partial(dist.isend, tensor, group=link.handle, group_dst=other)
    return start_pending(tensor, link, start, "send", timer=link.traffic.message_timer)


def receive(into: Tensor, link: Group, source: int | None = None) -> Pending[Tensor]:
    """Receive a tensor. Tensors arrive in the order in which a rank sends them.

    Args:
        into: Where to receive it.
        link: A group of two ranks, or any group.
        source: Index of the sending rank; None for the other rank of a link.

    Returns:
        `into`.
    """
    other = 1 - link.index if source is None else source
    link.check_message(into, other, link.index)
    start = partial(dist.irecv, into, group=link.handle, group_src=other)
    messages = link.traffic.message_timer
    return start_pending(into, link, start, "receive", timer=messages, size=into.nbytes)


def shift_ring(
    tensor: Tensor, into: Tensor, ring: Ring, *, reverse: bool = False
) -> Pending[Tensor]:
    """Send to the next rank of a ring and receive from the one before, as one operation.

    Args:
        tensor: It must not change until the result has been waited for.
        into: Where to receive.
        ring: A ring of at least two ranks. In a serial one both are done when this returns.
        reverse: The other way round: send to the rank before and receive from the next.

    Returns:
        `into`.
    """
    group, tensor = ring.group, tensor.contiguous()
    to, source = (ring.before, ring.next) if reverse else (ring.next, ring.before)
    group.check_collective("shift_ring back" if reverse else "shift_ring", None)
    group.check_message(tensor, group.index, to)
    group.check_message(into, source, group.index)
    group.traffic.count(tensor.nbytes)
    # Sent and received as one operation, because every rank of the ring does both.
    messages = _start_batched(into, group, [(source, into)], [(to, tensor)], "shift_ring")
    pending = Pending(into, before=messages, timer=group.traffic.collective_timer, size=into.nbytes)
    if group.serial:
        pending.wait()
    return pending


def exchange_pairwise(
    out: Tensor,
    leaving: Sequence[Tensor] | Tensor,
    coming: Sequence[Tensor] | Tensor,
    group: Group,
    finish: Callable[[], object] | None = None,
    *,
    kind: str,
    like: Tensor | None = None,
) -> Pending[Tensor]:
    """Send leaving[i] to rank i of the group and receive coming[i] from it, for all other ranks.

    Args:
        out: The result, ready after all transfers and the call of `finish`.
        leaving: A tensor for each rank. They must not change until all transfers are done.
        coming: Where to receive from each rank.
        group: The ranks.
        finish: Computes the result from what has arrived; None if `coming` are parts of it.
        kind: Name of the collective.
        like: A tensor whose type and shape are the same on all ranks, for
            `Group.check_collective`.

    Returns:
        `out`.
    """
    group.check_collective(kind, like)
    size = group.traffic.take_latest()
    # Each rank starts with the ranks after it, so that they do not all send to the same one.
    peers = [(group.index + step) % group.size for step in range(1, group.size)]
    # Empty tensors are neither sent nor received; both ends know the sizes.
    receives = [(peer, coming[peer]) for peer in reversed(peers) if coming[peer].numel()]
    sends = [(peer, leaving[peer]) for peer in peers if leaving[peer].numel()]
    messages = _start_batched(out, group, receives, sends, kind)
    pending = Pending(
        out, before=messages, finish=finish, timer=group.traffic.collective_timer, size=size
    )
    if group.serial:
        pending.wait()
    return pending


def _start_batched(
    out: Tensor,
    group: Group,
    receives: Sequence[tuple[int, Tensor]],
    sends: Sequence[tuple[int, Tensor]],
    kind: str,
) -> Pending[Tensor] | None:
    """Start receives from and sends to ranks of a group, each given as (rank, tensor), as one
    operation. Returns None if there are none.

    What is sent must not change, and what is received must not be read, until the result has been
    waited for.
    """
    starts: list[Callable[[], dist.Work | None]] = [
        partial(dist.irecv, tensor, group=group.handle, group_src=rank) for rank, tensor in receives
    ]
    starts += [
        partial(dist.isend, tensor, group=group.handle, group_dst=rank) for rank, tensor in sends
    ]
    pending: Pending[Tensor] | None = None
    # Over NCCL they must be one group of calls. The calls of a communicator otherwise run one after
    # the other, and the host waits in the first one to a rank until that rank makes the matching
    # call. Ranks in a ring that all send first would wait for each other forever. Gloo's calls do
    # not wait, so there they are started one by one.
    if starts and group.should_batch_messages(out):
        starts = [partial(_start_coalesced, starts, group, out.device)]
    for start in starts:
        # Each one waits for those before it too, so waiting for the last waits for all.
        pending = start_pending(out, group, start, kind, pending)
    return pending


def _start_coalesced(
    starts: Sequence[Callable[[], dist.Work | None]], group: Group, device: torch.device
) -> dist.Work:
    """Start sends and receives of a group as one operation of NCCL, and return its work."""
    # What `dist.batch_isend_irecv` does, which takes only groups that torch has registered.
    with dist._coalescing_manager(group.handle, device, async_ops=True) as calls:
        for start in starts:
            start()
    (work,) = calls.works
    return work
