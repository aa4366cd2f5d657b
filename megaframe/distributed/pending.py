"""Pending: a result still in flight, and the only place where a rank waits for others.

Everything that records waits is called from here, so no layer needs a timer. Waits are recorded
twice. The rank's place records them by the host's clock, because a hang is explained by where the
ranks were. The `waits` of the traffic record them by the clock of the computing device, which may
wait while the host does not.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Generic, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from megaframe.distributed.group import Group
from megaframe.distributed.rank_progress import name_ranks
from megaframe.distributed.traffic import NO_WAIT_TIMER, WaitTimer
from megaframe.errors import LostRanks

T = TypeVar("T")

_NOISE = re.compile(r"^\[\S+:\d+\] |\. This is typically caused by.*", re.DOTALL)
"""What gloo adds to the reason of an error: a position in its source, and advice."""


class Pending(Generic[T]):
    """A result still in flight. Forgetting to wait is a type error, not a race.

    work: torch's work for it on `group`, None if there is nothing to wait for.
    too: another pending result that `wait()` also waits for.
    last: called after all waits, to compute the result from what has arrived.
    kind: name of the operation.
    waits: what the wait is charged to.
    size: bytes that the wait is for.
    """

    def __init__(
        self,
        value: T,
        work: dist.Work | None = None,
        group: Group | None = None,
        too: Pending[Tensor] | None = None,
        last: Callable[[], object] | None = None,
        *,
        kind: str = "",
        waits: WaitTimer = NO_WAIT_TIMER,
        size: int = 0,
    ) -> None:
        self._value = value
        self._work = work
        self._group = group
        self._too = too
        self._last = last
        self._kind = kind
        self._waits, self._size = waits, size
        self._started = waits.start()

    def wait(self) -> T:
        """Wait for the result and return it. Raises `LostRanks` if the transfer fails."""
        if self._work is self._too is self._last is None:
            return self._value
        late = not (self._waits.checks_arrival and self.is_complete())
        with self._waits:
            self._finish()
        self._waits.record_arrival(self._started, self._size, late)
        return self._value

    def _finish(self) -> None:
        if self._work is not None:
            assert self._group is not None, "work belongs to a group"
            progress = self._group.progress
            begun = progress.begin_wait(self)
            try:
                self._work.wait()
            except RuntimeError as error:
                raise _lost_ranks(self._group, error) from error
            progress.end_wait(begun)
            progress.check_not_ended()
            progress.record_device_wait(
                _DeviceWait(self._kind, self._group), self._work.is_completed
            )
            self._work = None
        if self._too is not None:
            self._too.wait()
            self._too = None
        if self._last is not None:
            self._last()
            self._last = None

    def describe_wait(self) -> str:
        """Return what `wait()` waits for, in words."""
        assert self._group is not None, "work belongs to a group"
        return _describe_wait(self._kind, self._group)

    def is_complete(self) -> bool:
        """Return whether all transfers are done, so that `wait()` would not block."""
        here = self._work is None or self._work.is_completed()
        return here and (self._too is None or self._too.is_complete())


@dataclass(frozen=True)
class _DeviceWait:
    """What a device waits for, without a reference to the result."""

    kind: str
    group: Group

    def describe_wait(self) -> str:
        """Return the same as `Pending.describe_wait`."""
        return _describe_wait(self.kind, self.group)


def start_pending(
    value: T,
    group: Group,
    start: Callable[[], dist.Work | None],
    kind: str,
    too: Pending[Tensor] | None = None,
    *,
    waits: WaitTimer = NO_WAIT_TIMER,
    size: int = 0,
) -> Pending[T]:
    """Start an operation on a group by calling `start`, and return its pending result. Raises
    `LostRanks` if it fails at once, for example over a connection that is known to be broken, or
    if transfers were ended. For the other arguments see `Pending`."""
    group.progress.check_not_ended()
    try:
        work = start()
    except RuntimeError as error:
        raise _lost_ranks(group, error) from error
    return Pending(value, work, group, too, kind=kind, waits=waits, size=size)


def _describe_wait(kind: str, group: Group) -> str:
    """Describe a wait: `all_reduce over data with rank 2`, `receive over pipeline from rank 1`."""
    preposition = {"send": "to", "receive": "from"}.get(kind, "with")
    return f"{kind} over {' x '.join(group.axes)} {preposition} {name_ranks(group.others)}"


def _lost_ranks(group: Group, error: RuntimeError) -> LostRanks:
    reason = _NOISE.sub("", str(error).strip())
    return LostRanks(
        f"rank {group.ranks[group.index]} lost contact over {' x '.join(group.axes)} "
        f"with {name_ranks(group.others)}: {reason}",
        group.others,
    )


def copy_to_host(
    pending: Sequence[Pending[Tensor]], device: torch.device
) -> Callable[[], list[Tensor]]:
    """Start copying tensors to the host as soon as they are ready. Returns a function that waits
    for the copies and returns them.

    On a GPU the copies run on a separate stream. Waiting for a copy on the compute stream could
    also mean waiting for the next step, which is queued there.
    """
    if device.type != "cuda":
        return lambda: [one.wait() for one in pending]
    stream = _stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    host = []
    with torch.cuda.stream(stream):
        for tensor in (one.wait() for one in pending):
            tensor.record_stream(stream)
            landing = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            host.append(landing.copy_(tensor, non_blocking=True))
        event = stream.record_event()

    def landed() -> list[Tensor]:
        event.synchronize()
        return host

    return landed


@cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    """Return the one stream for all copies. Torch has a pool of only 32 streams, which NCCL's
    groups use too."""
    return torch.cuda.Stream(device)
