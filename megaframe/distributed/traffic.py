"""Traffic: counts what a rank hands to the collectives of a group, and names what its waits for
them are charged to. That is a protocol here, because a step is timed on a higher floor."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Protocol

from megaframe.distributed.rank_progress import RankProgress, Waitable


class WaitTimer(Protocol):
    """What waits for transfers are charged to: a context that each wait runs in.

    Attributes:
        checks_arrival: Whether a wait must first check whether it has to wait at all.
    """

    checks_arrival: bool

    def start(self) -> Any:
        """Return the time at which a transfer starts, to be passed to `record_arrival`."""

    def __enter__(self) -> None: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...

    def record_arrival(self, started: Any, size: int, late: bool) -> None:
        """Record that a wait has just ended.

        Args:
            started: What `start` returned when the transfer started.
            size: Bytes that were waited for.
            late: As far as is known, they had not arrived before the wait.
        """


class NoWaitTimer:
    """Charges waits to nothing."""

    checks_arrival = False

    def start(self) -> None: ...

    def __enter__(self) -> None: ...

    def __exit__(self, *error: object) -> None: ...

    def record_arrival(self, started: Any, size: int, late: bool) -> None: ...


NO_WAIT_TIMER = NoWaitTimer()


@dataclass
class Traffic:
    """What one rank has handed to the collectives of a group since the last `take()`.

    Attributes:
        bytes: Bytes of all calls.
        calls: Number of calls.
        collective_timer: What waits for collectives are charged to.
        message_timer: What waits for single sends and receives are charged to.
    """

    bytes: int = 0
    calls: int = 0
    collective_timer: WaitTimer = NO_WAIT_TIMER
    message_timer: WaitTimer = NO_WAIT_TIMER
    _latest: int = 0

    def count(self, size: int) -> None:
        """Add one call that moves `size` bytes."""
        self.bytes += size
        self.calls += 1
        self._latest = size

    def add(self, size: int, calls: int) -> None:
        """Add several calls, which move `size` bytes in total."""
        self.bytes += size
        self.calls += calls

    def take_latest(self) -> int:
        """Return the bytes of the last counted call, and zero until another call is counted."""
        size, self._latest = self._latest, 0
        return size

    def take(self) -> tuple[int, int]:
        """Return (bytes, calls) so far, and start again from zero."""
        totals = self.bytes, self.calls
        self.bytes = self.calls = 0
        return totals


@dataclass
class CapturedTransfers:
    """The transfers of captured work.

    Attributes:
        name: Name of the work, for the watchdog.
        progress: Where its waits are recorded.
        waits: Its waits for other ranks.
        counts: Bytes and calls of each traffic.
    """

    name: str
    progress: RankProgress
    waits: Sequence[Waitable]
    counts: Sequence[tuple[Traffic, int, int]] = ()

    def replay(self, launch: Callable[[], None]) -> None:
        """Run the work by calling `launch`, and report its transfers."""
        self.progress.begin_part(self.name, None, "F")
        launch()
        # A replay runs none of the code that records waits and counts bytes, so both are reported
        # here.
        for waiting in self.waits:
            self.progress.record_device_wait(waiting)
        for traffic, size, calls in self.counts:
            traffic.add(size, calls)


@contextmanager
def capture_transfers(
    name: str, progress: RankProgress, traffics: Sequence[Traffic]
) -> Iterator[CapturedTransfers]:
    """Return a context in which transfers are recorded and not counted; each call of
    `CapturedTransfers.replay` reports them.

    Args:
        name: Name of the work, for the watchdog.
        progress: Records the waits of this rank.
        traffics: The traffic of the groups that transfer in the context.
    """
    before = [(traffic.bytes, traffic.calls) for traffic in traffics]
    with progress.capture_waits() as waits:
        captured = CapturedTransfers(name, progress, waits)
        yield captured
    captured.counts = [
        (traffic, traffic.bytes - size, traffic.calls - calls)
        for traffic, (size, calls) in zip(traffics, before, strict=True)
    ]
    # The capture itself has transferred nothing: what it counted is taken back.
    for traffic, size, calls in captured.counts:
        traffic.add(-size, -calls)
