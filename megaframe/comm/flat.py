"""Collectives on a flat buffer that every rank of a group has whole, in place: of as many equal
parts as there are ranks, part i belongs to rank i; and of messages about its parts.

gloo's own reduce-scatter and all-gather are slower than the messages that they come to, so on a CPU
each part goes straight to its rank, and there is summed.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from megaframe.comm import Group, Pending, _collective, _started


def part(flat: Tensor, group: Group) -> Tensor:
    """This rank's part of `flat`, a view."""
    length = len(flat) // group.size
    return flat[group.index * length :][:length]


def reduce_scatter_(flat: Tensor, group: Group) -> Pending[Tensor]:
    """This rank's part becomes its sum over the ranks, and is the result; what the other parts
    become is undefined."""
    own = part(flat, group)
    if group.handle is None:
        return Pending(own)
    group.traffic.count(own.nbytes * (group.size - 1))
    if flat.is_cuda:
        return _collective(
            own,
            group,
            lambda: dist.reduce_scatter_tensor(own, flat, group=group.handle, async_op=True),
        )
    parts = flat.view(group.size, -1)
    arriving = torch.empty_like(parts[1:])
    pending: Pending[Tensor] | None = None
    for distance, into in enumerate(arriving, 1):
        to, source = _neighbours(group, distance)
        pending = _send(parts[to], group, to, pending)
        pending = _receive(into, group, source, pending)
    assert pending is not None, "a group with a handle has more than one rank"

    def add() -> Tensor:
        for other in arriving:
            own.add_(other)
        return own

    return _finished(pending, add, group)


def all_gather_(flat: Tensor, group: Group) -> Pending[Tensor]:
    """The other parts become those of their ranks; the result is all of `flat`."""
    if group.handle is None:
        return Pending(flat)
    own = part(flat, group)
    group.traffic.count(own.nbytes * (group.size - 1))
    if flat.is_cuda:
        return _collective(
            flat,
            group,
            lambda: dist.all_gather_into_tensor(flat, own, group.handle, async_op=True),
        )
    parts = flat.view(group.size, -1)
    pending: Pending[Tensor] | None = None
    for distance in range(1, group.size):
        to, source = _neighbours(group, distance)
        pending = _send(own, group, to, pending)
        pending = _receive(parts[source], group, source, pending)
    assert pending is not None, "a group with a handle has more than one rank"
    return _finished(pending, lambda: flat, group)


def exchange(messages: Tensor, group: Group) -> Pending[Tensor]:
    """[size - 1, ...], one for each other rank, in their order: the like, one from each."""
    if group.handle is None:
        return Pending(messages)
    out = torch.empty_like(messages)
    splits = [int(other != group.index) for other in range(group.size)]
    group.traffic.count(messages.nbytes)
    return _collective(
        out,
        group,
        lambda: dist.all_to_all_single(
            out, messages, splits, splits, group=group.handle, async_op=True
        ),
    )


def _neighbours(group: Group, distance: int) -> tuple[int, int]:
    """Places of the ranks that many steps after and before this one."""
    return (group.index + distance) % group.size, (group.index - distance) % group.size


def _send(tensor: Tensor, group: Group, to: int, too: Pending[Tensor] | None) -> Pending[Tensor]:
    return _started(
        tensor, group, lambda: dist.isend(tensor, group=group.handle, group_dst=to), too
    )


def _receive(
    into: Tensor, group: Group, source: int, too: Pending[Tensor] | None
) -> Pending[Tensor]:
    return _started(
        into, group, lambda: dist.irecv(into, group=group.handle, group_src=source), too
    )


class _Finished(Pending[Tensor]):
    """What is made of the values that arrive, by the one who waits for them."""

    def __init__(self, before: Pending[Tensor], finish: Callable[[], Tensor]) -> None:
        self._before: Pending[Tensor] | None = before
        self._finish = finish

    def wait(self) -> Tensor:
        if self._before is not None:
            self._before.wait()
            self._before = None
            self._value = self._finish()
        return self._value

    def arrived(self) -> bool:
        return self._before is None or self._before.arrived()


def _finished(
    before: Pending[Tensor], finish: Callable[[], Tensor], group: Group
) -> Pending[Tensor]:
    pending = _Finished(before, finish)
    if group.serial:
        pending.wait()
    return pending
