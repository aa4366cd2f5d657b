"""In-place collectives on a flat buffer that every rank of a group has whole, and an exchange of
messages about its parts. The buffer has as many equal parts as the group has ranks; part i belongs
to rank i.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from megaframe.distributed.collectives import Group, Pending, collective, to_each
from megaframe.distributed.group import gather_single, scatter_single


def part(flat: Tensor, group: Group) -> Tensor:
    """Return this rank's part of `flat`, a view."""
    length = len(flat) // group.size
    return flat[group.index * length :][:length]


def reduce_scatter_(flat: Tensor, group: Group, room: Tensor | None = None) -> Pending[Tensor]:
    """Reduce-scatter in place: this rank's part becomes its sum over the ranks, and is the result.
    The content of the other parts becomes undefined.

    room: buffer for the parts that arrive on a CPU, with the length of all parts but one; None to
    allocate it.
    """
    own = part(flat, group)
    if group.handle is None:
        return Pending(own)
    group.traffic.count(own.nbytes * (group.size - 1))
    if not group.in_pairs(flat):
        return collective(
            own,
            group,
            lambda: scatter_single(own, flat, group=group.handle, async_op=True),
            "reduce_scatter",
        )
    parts = flat.view(group.size, -1)
    arriving = list(torch.empty_like(parts[1:]) if room is None else room.view_as(parts[1:]))

    def add() -> None:
        for other in arriving:
            own.add_(other)

    coming = [*arriving[: group.index], own, *arriving[group.index :]]
    return to_each(own, parts, coming, group, add, kind="reduce_scatter", like=own)


def all_gather_(flat: Tensor, group: Group) -> Pending[Tensor]:
    """All-gather in place: fill each other part from its rank. The result is all of `flat`."""
    if group.handle is None:
        return Pending(flat)
    own = part(flat, group)
    group.traffic.count(own.nbytes * (group.size - 1))
    if not group.in_pairs(flat):
        return collective(
            flat,
            group,
            lambda: gather_single(flat, own, group.handle, async_op=True),
            "all_gather",
        )
    parts = flat.view(group.size, -1)
    return to_each(flat, [own] * group.size, parts, group, kind="all_gather", like=flat)


def exchange(messages: Tensor, group: Group) -> Pending[Tensor]:
    """Send one message to each other rank and receive one from each. `messages` and the result are
    [size - 1, ...], in the order of ranks without this one."""
    if group.handle is None:
        return Pending(messages)
    out = torch.empty_like(messages)
    splits = [int(other != group.index) for other in range(group.size)]
    group.traffic.count(messages.nbytes)
    return collective(
        out,
        group,
        lambda: dist.all_to_all_single(
            out, messages, splits, splits, group=group.handle, async_op=True
        ),
        "exchange",
    )
