"""Pending: a result still in flight, and the only place where a rank waits for others.

Everything that records waits is called from here, so no layer needs a timer. Waits are recorded
twice: in `RankProgress` and by the timers of the traffic.
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

    A group of one rank communicates nothing: `Pending(value)` is done when it is made.
    """

    def __init__(
        self,
        value: T,
        work: dist.Work | None = None,
        group: Group | None = None,
        before: Pending[Tensor] | None = None,
        finish: Callable[[], object] | None = None,
        *,
        kind: str = "",
        timer: WaitTimer = NO_WAIT_TIMER,
        size: int = 0,
    ) -> None:
        """Hold a result until it is waited for.

        Args:
            value: The result, valid after `wait()`.
            work: torch's work for it on `group`, None if there is nothing to wait for.
            group: The group of `work`.
            before: Another pending result that `wait()` also waits for.
            finish: Called after all waits, to compute the result from what has arrived.
            kind: Name of the operation.
            timer: What the wait is charged to.
            size: Bytes that the wait is for.
        """
        self._value = value
        self._work = work
        self._group = group
        self._before = before
        self._finish_result = finish
        self._kind = kind
        self._timer, self._size = timer, size
        self._started = timer.start()

    def wait(self) -> T:
        """Wait for the result and return it.

        Raises:
            LostRanks: If the transfer fails.
        """
        if self._work is self._before is self._finish_result is None:
            return self._value
        # Asked before the wait, because afterwards everything has arrived.
        late = not (self._timer.checks_arrival and self.is_complete())
        # By the clock of the computing device, which may wait while the host does not.
        with self._timer:
            self._wait_for_all()
        self._timer.record_arrival(self._started, self._size, late)
        return self._value

    def _wait_for_all(self) -> None:
        if self._work is not None:
            assert self._group is not None, "work belongs to a group"
            progress = self._group.progress
            # By the host's clock, because a hang is explained by where the ranks were.
            begun = progress.begin_wait(self)
            try:
                self._work.wait()
            except RuntimeError as error:
                raise _make_lost_ranks(self._group, error) from error
            progress.end_wait(begun)
            # A transfer that was ended for a restart may return like a complete one, with unusable
            # content.
            progress.check_not_ended()
            # Not `self`: that would keep the result's memory until the device has passed the wait.
            progress.record_device_wait(
                _DeviceWait(self._kind, self._group), self._work.is_completed
            )
            # Drops torch's work, and with it what it holds. A second `wait()` has nothing to do.
            self._work = None
        if self._before is not None:
            self._before.wait()
            self._before = None
        if self._finish_result is not None:
            # After all transfers: this reads what has arrived.
            self._finish_result()
            self._finish_result = None

    def describe_wait(self) -> str:
        """Return what `wait()` waits for, in words."""
        assert self._group is not None, "work belongs to a group"
        return _describe_wait(self._kind, self._group)

    def is_complete(self) -> bool:
        """Return whether all transfers are done, so that `wait()` would not block."""
        work_done = self._work is None or self._work.is_completed()
        return work_done and (self._before is None or self._before.is_complete())


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
    before: Pending[Tensor] | None = None,
    *,
    timer: WaitTimer = NO_WAIT_TIMER,
    size: int = 0,
) -> Pending[T]:
    """Start an operation on a group.

    Args:
        value: The result, valid after `wait()`.
        group: The ranks.
        start: Starts the operation and returns torch's work, None if there is none to wait for.
        kind: Name of the operation.
        before: Another pending result that `wait()` also waits for.
        timer: What the wait is charged to.
        size: Bytes that the wait is for.

    Returns:
        The pending result.

    Raises:
        LostRanks: It fails at once, for example over a connection that is known to be broken, or
            transfers were ended.
    """
    group.progress.check_not_ended()
    try:
        work = start()
    except RuntimeError as error:
        raise _make_lost_ranks(group, error) from error
    return Pending(value, work, group, before, kind=kind, timer=timer, size=size)


def _describe_wait(kind: str, group: Group) -> str:
    """Describe a wait: `all_reduce over data with rank 2`, `receive over pipeline from rank 1`."""
    preposition = {"send": "to", "receive": "from"}.get(kind, "with")
    return f"{kind} over {' x '.join(group.axes)} {preposition} {name_ranks(group.others)}"


def _make_lost_ranks(group: Group, error: RuntimeError) -> LostRanks:
    reason = _NOISE.sub("", str(error).strip())
    return LostRanks(
        f"rank {group.ranks[group.index]} lost contact over {' x '.join(group.axes)} "
        f"with {name_ranks(group.others)}: {reason}",
        group.others,
    )


def copy_to_host(
    pending: Sequence[Pending[Tensor]], device: torch.device
) -> Callable[[], list[Tensor]]:
    """Start copying tensors to the host as soon as they are ready.

    Args:
        pending: The tensors.
        device: The device that they are on.

    Returns:
        A function that waits for the copies and returns them.
    """
    if device.type != "cuda":
        return lambda: [result.wait() for result in pending]
    # A separate stream. Waiting for a copy on the compute stream could also mean waiting for the
    # next step, which is queued there.
    stream = _get_copy_stream(device)
    # The copies start only after the work queued so far, which computes the tensors.
    stream.wait_stream(torch.cuda.current_stream(device))
    copies = []
    with torch.cuda.stream(stream):
        for tensor in (result.wait() for result in pending):
            tensor.record_stream(stream)  # its memory is not reused before the copy is done
            # Pinned memory: a copy to pageable memory would make the host wait.
            on_host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            copies.append(on_host.copy_(tensor, non_blocking=True))
        event = stream.record_event()

    def wait_for_copies() -> list[Tensor]:
        # The host waits for the copies alone. Until then their content is undefined.
        event.synchronize()
        return copies

    return wait_for_copies


@cache
def _get_copy_stream(device: torch.device) -> torch.cuda.Stream:
    """Return the one stream for all copies. Torch has a pool of only 32 streams, which NCCL's
    groups use too."""
    return torch.cuda.Stream(device)
