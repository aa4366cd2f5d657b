"""Collectives, labelled by axis, counted in bytes and asynchronous.

Every collective returns a `Pending`: its tensor can be reached through `wait()` only. A group of
one rank communicates nothing, so no caller needs a special case for it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, Literal, TypeVar

import torch.distributed as dist
from torch import Tensor

T = TypeVar("T")
Reduction = Literal["sum", "max", "min"]
_OPERATIONS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}


@dataclass
class Traffic:
    """What one rank has handed to the collectives of a group since the last `take()`."""

    bytes: int = 0
    calls: int = 0

    def take(self) -> tuple[int, int]:
        """(bytes, calls) so far; starts again from zero."""
        taken = self.bytes, self.calls
        self.bytes = self.calls = 0
        return taken


@dataclass(frozen=True)
class Group:
    """The ranks that share this rank's coordinate on every axis but `axes`.

    `handle` is the process group of torch, None when the group is this rank alone.
    `serial` finishes every collective before returning, in the order of the calls.
    """

    axes: tuple[str, ...]
    ranks: tuple[int, ...]
    index: int
    handle: dist.ProcessGroup | None
    serial: bool = False
    traffic: Traffic = field(default_factory=Traffic)

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.ranks)


class Pending(Generic[T]):
    """A result still in flight. Forgetting to wait is a type error, not a race."""

    def __init__(self, value: T, finish: Callable[[], object] | None = None) -> None:
        self._value = value
        self._finish = finish

    def wait(self) -> T:
        """The result, once it is there."""
        if self._finish is not None:
            self._finish()
            self._finish = None
        return self._value


def all_reduce(tensor: Tensor, group: Group, how: Reduction = "sum") -> Pending[Tensor]:
    """Reduce `tensor` in place over the group; bytes moved are counted for a ring."""
    if group.handle is None:
        return Pending(tensor)
    group.traffic.calls += 1
    group.traffic.bytes += 2 * tensor.nbytes * (group.size - 1) // group.size
    work = dist.all_reduce(tensor, _OPERATIONS[how], group.handle, async_op=True)
    pending = Pending(tensor, work.wait)
    if group.serial:
        pending.wait()
        return Pending(tensor)
    return pending


def barrier(group: Group) -> None:
    """Return once every rank of the group is here."""
    if group.handle is not None:
        dist.barrier(group.handle)
