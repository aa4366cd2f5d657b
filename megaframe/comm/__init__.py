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
from types import TracebackType
from typing import Any, Generic, Literal, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from megaframe.errors import LostRanks

T = TypeVar("T")
Reduction = Literal["sum", "max", "min"]
_OPERATIONS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}

_NOISE = re.compile(r"^\[\S+:\d+\] |\. This is typically caused by.*", re.DOTALL)
"""What gloo puts around its reason: a place in its source, and advice."""


class Waits(Protocol):
    """What the waits for transfers are charged to: a context that each of them runs in. asks:
    whether a wait is to find out first if it has to wait at all."""

    asks: bool

    def start(self) -> Any:
        """The time at which a transfer starts, as `landed` takes it."""

    def __enter__(self) -> None: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...

    def landed(self, started: Any, size: int, late: bool) -> None:
        """The wait that just ended was for `size` bytes. late: as far as is known, they were not
        there before it."""


class Unwatched:
    """Charges waits to nothing."""

    asks = False

    def start(self) -> None: ...

    def __enter__(self) -> None: ...

    def __exit__(self, *error: object) -> None: ...

    def landed(self, started: Any, size: int, late: bool) -> None: ...


UNWATCHED = Unwatched()


@dataclass
class Traffic:
    """What one rank has handed to the collectives of a group since the last `take()`.

    waits: what waits for the collectives are charged to. messages: the like for what is sent and
    received singly.
    """

    bytes: int = 0
    calls: int = 0
    waits: Waits = UNWATCHED
    messages: Waits = UNWATCHED
    _latest: int = 0

    def count(self, size: int) -> None:
        """Add one call that moves `size` bytes."""
        self.bytes += size
        self.calls += 1
        self._latest = size

    def latest(self) -> int:
        """Bytes of the call that was counted last; zero when asked again."""
        size, self._latest = self._latest, 0
        return size

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
    `wait()` also waits for. last: what makes the result of all that has come. waits: what the wait
    is charged to. size: bytes that it is for.
    """

    def __init__(
        self,
        value: T,
        work: dist.Work | None = None,
        group: Group | None = None,
        too: Pending[Tensor] | None = None,
        last: Callable[[], object] | None = None,
        waits: Waits = UNWATCHED,
        size: int = 0,
    ) -> None:
        self._value = value
        self._work = work
        self._group = group
        self._too = too
        self._last = last
        self._waits, self._size = waits, size
        self._started = waits.start()

    def wait(self) -> T:
        """The result, once it is there. Raises `LostRanks` when it does not come."""
        if self._work is self._too is self._last is None:
            return self._value
        late = not (self._waits.asks and self.arrived())
        with self._waits:
            self._finish()
        self._waits.landed(self._started, self._size, late)
        return self._value

    def _finish(self) -> None:
        if self._work is not None:
            try:
                self._work.wait()
            except RuntimeError as error:
                raise _lost(self._group, error) from error
            self._work = None
        if self._too is not None:
            self._too.wait()
            self._too = None
        if self._last is not None:
            self._last()
            self._last = None

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
        tensor, group, lambda: dist.all_reduce(tensor, operation, group.handle, async_op=True)
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
        return to_each(out, [tensor] * group.size, parts, group)
    return collective(
        out, group, lambda: dist.all_gather_into_tensor(out, tensor, group.handle, async_op=True)
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
        return to_each(out, leaving, coming, group, lambda: sum_into(out, coming))
    return collective(
        out,
        group,
        lambda: dist.reduce_scatter_tensor(out, tensor, group=group.handle, async_op=True),
    )


def all_to_all(tensor: Tensor, group: Group) -> Pending[Tensor]:
    """[size, ...]: part i goes to rank i of the group, and part i of the result came from it."""
    if group.handle is None:
        return Pending(tensor)
    tensor = tensor.contiguous()
    out = torch.empty_like(tensor)
    group.traffic.count(tensor.nbytes // group.size * (group.size - 1))
    return collective(
        out, group, lambda: dist.all_to_all_single(out, tensor, group=group.handle, async_op=True)
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
) -> Pending[Tensor]:
    """leaving[i] goes to rank i of the group, for all but this one, and coming[i] comes from it;
    `out` is there after that and `last`. Every rank turns to the next ones first, so that not all
    send to the same one. What is empty is not sent."""
    size = group.traffic.latest()
    pending: Pending[Tensor] | None = None
    others = [(group.index + step) % group.size for step in range(1, group.size)]
    for there in reversed(others):
        if not coming[there].numel():
            continue
        receive = partial(dist.irecv, coming[there], group=group.handle, group_src=there)
        pending = _started(out, group, receive, pending)
    for there in others:
        if not leaving[there].numel():
            continue
        send = partial(dist.isend, leaving[there], group=group.handle, group_dst=there)
        pending = _started(out, group, send, pending)
    pending = Pending(out, too=pending, last=last, waits=group.traffic.waits, size=size)
    if group.serial:
        pending.wait()
    return pending


def collective(out: Tensor, group: Group, start: Callable[[], dist.Work | None]) -> Pending[Tensor]:
    """What `start` starts over a group, of which `out` is the result."""
    traffic = group.traffic
    pending = _started(out, group, start, waits=traffic.waits, size=traffic.latest())
    if group.serial:
        pending.wait()
    return pending


def send(tensor: Tensor, link: Group) -> Pending[Tensor]:
    """Send to the other rank of a link. The tensor must not change before it has left."""
    link.traffic.count(tensor.nbytes)
    other = 1 - link.index
    start = partial(dist.isend, tensor, group=link.handle, group_dst=other)
    return _started(tensor, link, start, waits=link.traffic.messages)


def receive(into: Tensor, link: Group, too: Pending[Tensor] | None = None) -> Pending[Tensor]:
    """Receive from the other rank of a link, in the order in which it sends; with `too`, what
    must be done as well before it is there."""
    other = 1 - link.index
    start = partial(dist.irecv, into, group=link.handle, group_src=other)
    return _started(into, link, start, too, link.traffic.messages, into.nbytes)


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
        try:
            with group.traffic.waits:
                dist.barrier(group.handle)
        except RuntimeError as error:
            raise _lost(group, error) from error


def _started(
    tensor: Tensor,
    group: Group,
    start: Callable[[], dist.Work | None],
    too: Pending[Tensor] | None = None,
    waits: Waits = UNWATCHED,
    size: int = 0,
) -> Pending[Tensor]:
    try:
        return Pending(tensor, start(), group, too, waits=waits, size=size)
    except RuntimeError as error:  # a connection that is known to be gone fails at once
        raise _lost(group, error) from error


def _lost(group: Group | None, error: RuntimeError) -> LostRanks:
    assert group is not None, "work belongs to a group"
    others = [rank for rank in group.ranks if rank != group.ranks[group.index]]
    reason = _NOISE.sub("", str(error).strip())
    names = ", ".join(map(str, others[:8])) + (" ..." if len(others) > 8 else "")
    return LostRanks(
        f"rank {group.ranks[group.index]} lost contact over {' x '.join(group.axes)} "
        f"with rank{'s' * (len(others) > 1)} {names}: {reason}",
        others,
    )
