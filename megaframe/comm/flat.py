"""Collectives on a flat buffer that every rank of a group has whole, in place: of as many equal
parts as there are ranks, part i belongs to rank i; and of messages about its parts.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from megaframe.comm import Group, Pending, collective, to_each
from megaframe.comm.group import gather_single, scatter_single


def part(flat: Tensor, group: Group) -> Tensor:
    """This rank's part of `flat`, a view."""
    length = len(flat) // group.size
    return flat[group.index * length :][:length]


def reduce_scatter_(flat: Tensor, group: Group, room: Tensor | None = None) -> Pending[Tensor]:
    """This rank's part becomes its sum over the ranks, and is the result; what the other parts
    become is undefined. room: for the parts that arrive on a CPU, as long as all but one; else it
    is made."""
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
    """The other parts become those of their ranks; the result is all of `flat`."""
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
    """[size - 1, ...], one for each other rank, in their order: the like, one from each."""
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
