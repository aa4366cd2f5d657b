"""Collectives, labelled by axis, counted in bytes and asynchronous.

Every collective returns a `Pending`: its tensor can be reached through `wait()` only. A group of
one rank communicates nothing, so no caller needs a special case for it. On a CPU, gathering and
scattering are made of sends and receives between all pairs and a sum at home in the order of the
ranks: gloo's own take up to three times as long and more of the processor (docs/log.md), and add in
low precision.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Generic, Literal, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from megaframe.comm.order import Order
from megaframe.comm.place import Place, named
from megaframe.errors import LostRanks

T = TypeVar("T")
Reduction = Literal["sum", "max", "min"]
_OPERATIONS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}

_NOISE = re.compile(r"^\[\S+:\d+\] |\. This is typically caused by.*", re.DOTALL)
"""What gloo puts around its reason: a place in its source, and advice."""


@dataclass
class Traffic:
    """What one rank has handed to the collectives of a group since the last `take()`."""

    bytes: int = 0
    calls: int = 0

    def count(self, size: int) -> None:
        """Add one call that moves `size` bytes."""
        self.bytes += size
        self.calls += 1

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
    `place` is told of every wait. `order`, where there is one, compares what the ranks start.
    """

    axes: tuple[str, ...]
    ranks: tuple[int, ...]
    index: int
    handle: dist.ProcessGroup | None
    serial: bool = False
    traffic: Traffic = field(default_factory=Traffic)
    place: Place = field(default_factory=Place)
    order: Order | None = None

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.ranks)

    @property
    def others(self) -> tuple[int, ...]:
        """All ranks but this one."""
        return self.ranks[: self.index] + self.ranks[self.index + 1 :]

    def begin(self, kind: str, tensor: Tensor | None, *, alike: bool = True) -> None:
        """Something is about to start; raises `OutOfStep` where ranks are compared and differ.
        tensor: of one type and shape on all ranks. alike: whether they start it in one action."""
        if self.order is not None and self.handle is not None:
            shape = (
                ["", "any shape"] if tensor is None else [str(tensor.dtype), str([*tensor.shape])]
            )
            axes, first = " x ".join(self.axes), self.index == 0
            self.order.begin(self.handle.group_name, axes, first, [kind, *shape], alike)


ALONE = Group((), (0,), 0, None)
"""A group of one rank, for what runs without a mesh."""


@dataclass(frozen=True)
class Ring:
    """Ranks in a circle: which of how many this is, and links to the next one and from the one
    before."""

    index: int = 0
    size: int = 1
    next: Group = ALONE
    before: Group = ALONE


class Pending(Generic[T]):
    """A result still in flight. Forgetting to wait is a type error, not a race.

    work: what torch started for it in `group`, None when there is nothing to wait for. too: what
    `wait()` also waits for. last: what makes the result of all that has come. kind: what it is.
    """

    def __init__(
        self,
        value: T,
        work: dist.Work | None = None,
        group: Group | None = None,
        too: Pending[Tensor] | None = None,
        last: Callable[[], object] | None = None,
        kind: str = "",
    ) -> None:
        self._value = value
        self._work = work
        self._group = group
        self._too = too
        self._last = last
        self._kind = kind

    def wait(self) -> T:
        """The result, once it is there. Raises `LostRanks` when it does not come."""
        if self._work is not None:
            assert self._group is not None, "work belongs to a group"
            place = self._group.place
            begun = place.wait(self)
            try:
                self._work.wait()
            except RuntimeError as error:
                raise _lost(self._group, error) from error
            place.go_on(begun)
            self._work = None
        if self._too is not None:
            self._too.wait()
            self._too = None
        if self._last is not None:
            self._last()
            self._last = None
        return self._value

    def waits_for(self) -> tuple[str, tuple[int, ...]]:
        """What `wait()` waits for in words, and the ranks that have a part in it."""
        assert self._group is not None, "work belongs to a group"
        return _in_words(self._kind, self._group), self._group.ranks

    def arrived(self) -> bool:
        """Whether `wait()` would return at once."""
        here = self._work is None or self._work.is_completed()
        return here and (self._too is None or self._too.arrived())


def all_reduce(tensor: Tensor, group: Group, how: Reduction = "sum") -> Pending[Tensor]:
    """Reduce `tensor` in place over the group; bytes moved are counted for a ring."""
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
    """The tensors [R, ...] of all ranks of the group, one after the other: [size * R, ...]."""
    if group.handle is None:
        return Pending(tensor)
    tensor = tensor.contiguous()
    out = tensor.new_empty((group.size * tensor.shape[0], *tensor.shape[1:]))
    group.traffic.count(tensor.nbytes * (group.size - 1))
    if tensor.device.type == "cpu":
        parts = out.view(group.size, *tensor.shape)
        parts[group.index].copy_(tensor)
        return to_each(out, [tensor] * group.size, parts, group, kind="all_gather", like=out)
    return collective(
        out,
        group,
        lambda: dist.all_gather_into_tensor(out, tensor, group.handle, async_op=True),
        "all_gather",
    )


def reduce_scatter(tensor: Tensor, group: Group) -> Pending[Tensor]:
    """This rank's part [R, ...] of the sum of the tensors [size * R, ...] of all ranks."""
    if group.handle is None:
        return Pending(tensor)
    tensor = tensor.contiguous()
    out = tensor.new_empty((tensor.shape[0] // group.size, *tensor.shape[1:]))
    group.traffic.count(out.nbytes * (group.size - 1))
    if tensor.device.type == "cpu":
        leaving = tensor.view(group.size, *out.shape)
        coming = list(torch.empty_like(leaving))
        coming[group.index] = leaving[group.index]
        add = partial(sum_into, out, coming)
        return to_each(out, leaving, coming, group, add, kind="reduce_scatter", like=out)
    return collective(
        out,
        group,
        lambda: dist.reduce_scatter_tensor(out, tensor, group=group.handle, async_op=True),
        "reduce_scatter",
    )


def all_to_all(tensor: Tensor, group: Group) -> Pending[Tensor]:
    """[size, ...]: part i goes to rank i of the group, and part i of the result came from it."""
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
    """The sum of all parts in their order, rounded once."""
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
    """leaving[i] goes to rank i of the group, for all but this one, and coming[i] comes from it;
    `out` is there after that and `last`. Every rank turns to the next ones first, so that not all
    send to the same one. What is empty is not sent. kind, like: as of `collective`."""
    group.begin(kind, like)
    pending: Pending[Tensor] | None = None
    others = [(group.index + step) % group.size for step in range(1, group.size)]
    for there in reversed(others):
        if not coming[there].numel():
            continue
        receive = partial(dist.irecv, coming[there], group=group.handle, group_src=there)
        pending = _started(out, group, receive, kind, pending)
    for there in others:
        if not leaving[there].numel():
            continue
        send = partial(dist.isend, leaving[there], group=group.handle, group_dst=there)
        pending = _started(out, group, send, kind, pending)
    pending = Pending(out, too=pending, last=last)
    if group.serial:
        pending.wait()
    return pending


def collective(
    out: Tensor,
    group: Group,
    start: Callable[[], dist.Work | None],
    kind: str,
    *,
    uneven: bool = False,
) -> Pending[Tensor]:
    """What `start` starts over a group, of which `out` is the result. kind: its name. uneven:
    whether ranks have results of other shapes."""
    group.begin(kind, None if uneven else out)
    pending = _started(out, group, start, kind)
    if group.serial:
        pending.wait()
    return pending


def send(tensor: Tensor, link: Group, to: int | None = None) -> Pending[Tensor]:
    """Send to the other rank of a link, or to rank `to` of any group. The tensor must not change
    before it has left."""
    link.traffic.count(tensor.nbytes)
    other = 1 - link.index if to is None else to
    if to is None:
        link.begin("transfer", tensor, alike=False)
    start = partial(dist.isend, tensor, group=link.handle, group_dst=other)
    return _started(tensor, link, start, "send")


def receive(
    into: Tensor, link: Group, too: Pending[Tensor] | None = None, source: int | None = None
) -> Pending[Tensor]:
    """Receive from the other rank of a link, or from rank `source` of any group, in the order in
    which it sends; with `too`, what must be done as well before it is there."""
    other = 1 - link.index if source is None else source
    if source is None:
        link.begin("transfer", into, alike=False)
    start = partial(dist.irecv, into, group=link.handle, group_src=other)
    return _started(into, link, start, "receive", too)


def pass_on(tensor: Tensor, ring: Ring) -> Pending[Tensor]:
    """Send to the next rank of a ring of at least two, and receive the like from the one before. A
    serial ring has finished both before this returns."""
    tensor = tensor.contiguous()
    leaving = send(tensor, ring.next)
    coming = receive(torch.empty_like(tensor), ring.before, leaving)
    if ring.next.serial:
        coming.wait()
    return coming


def barrier(group: Group) -> None:
    """Return once every rank of the group is here. Raises `LostRanks` when one does not come."""
    if group.handle is not None:
        group.begin("barrier", None)
        try:
            work = dist.barrier(group.handle, async_op=True)
        except RuntimeError as error:
            raise _lost(group, error) from error
        Pending(None, work, group, kind="barrier").wait()


def _started(
    tensor: Tensor,
    group: Group,
    start: Callable[[], dist.Work | None],
    kind: str,
    too: Pending[Tensor] | None = None,
) -> Pending[Tensor]:
    try:
        return Pending(tensor, start(), group, too, kind=kind)
    except RuntimeError as error:  # a connection that is known to be gone fails at once
        raise _lost(group, error) from error


def _in_words(kind: str, group: Group) -> str:
    """`all_reduce over data with rank 2`, `receive over pipeline from rank 1`."""
    preposition = {"send": "to", "receive": "from"}.get(kind, "with")
    return f"{kind} over {' x '.join(group.axes)} {preposition} {named(group.others)}"


def _lost(group: Group | None, error: RuntimeError) -> LostRanks:
    assert group is not None, "work belongs to a group"
    reason = _NOISE.sub("", str(error).strip())
    return LostRanks(
        f"rank {group.ranks[group.index]} lost contact over {' x '.join(group.axes)} "
        f"with {named(group.others)}: {reason}",
        group.others,
    )
