"""Rank progress: where a rank is in its work; recorded by the working thread, read by the watchdog.

It is always recorded, because once a hang is noticed it is too late to start. This is cheap: a few
assignments for each action, and two clock readings for each wait. Only this module can tell work
from waiting, so it also counts the time that a rank is busy, without the waits in between: that of
the host (`RankProgress.take_busy`), and if asked to, that of a device that runs asynchronously
(`DeviceTimer`).
"""

from __future__ import annotations

import json
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from threading import Lock
from typing import Protocol

from megaframe.errors import LostRanks

_MAX_NAMED = 8
"""Ranks, and things that ranks do, that a text names at most."""


class Waitable(Protocol):
    """What a rank can wait for."""

    def describe_wait(self) -> str:
        """Return what is waited for, in words."""


class DeviceEvent(Protocol):
    """A position in the queue of work of a device, such as a CUDA event with a time."""

    def query(self) -> bool:
        """Return whether the device has passed it."""

    def elapsed_time(self, end: DeviceEvent) -> float:
        """Return the milliseconds from here to `end`. The device must have passed both."""


@dataclass
class DeviceTimes:
    """What a device did in finished steps.

    Attributes:
        steps: Their number.
        busy: Seconds of work without waits, by kind of action. If the host launches work later than
            the device could do it, they include what the device waits for the host.
    """

    steps: int = 0
    busy: dict[str, float] = field(default_factory=dict)

    def add(self, other: DeviceTimes) -> None:
        """Add the times of other steps."""
        self.steps += other.steps
        for kind, seconds in other.busy.items():
            self.busy[kind] = self.busy.get(kind, 0.0) + seconds


@dataclass
class _TimedAction:
    kind: str
    begin: DeviceEvent
    waits: list[tuple[DeviceEvent, DeviceEvent]] = field(default_factory=list)
    end: DeviceEvent | None = None

    def measure_seconds(self) -> float:
        """Return the seconds from begin to end without waits; the device has passed the end."""
        assert self.end is not None, "its step is over"
        waited = sum(start.elapsed_time(end) for start, end in self.waits)
        return (self.begin.elapsed_time(self.end) - waited) / 1e3


class DeviceTimer:
    """Measures how long one device works on each kind of action, without its waits for other ranks.

    The host launches work long before the device does it, so the times of the device are those
    between events in its queue.
    """

    def __init__(self) -> None:
        self._actions: list[_TimedAction] = []
        self._steps: deque[list[_TimedAction]] = deque()
        self._open: _TimedAction | None = None

    def begin_action(self, kind: str | None, event: DeviceEvent) -> None:
        """Record that the device ends an action at `event` and begins the next one.

        Args:
            kind: What the time of the next action is counted under, None not to count it.
            event: The position in the device's queue.
        """
        if self._open is not None:
            self._open.end = event
            self._actions.append(self._open)
        self._open = None if kind is None else _TimedAction(kind, event)

    def record_wait(self, start: DeviceEvent, end: DeviceEvent) -> None:
        """Record that the device may wait for other ranks between two events."""
        if self._open is not None:
            self._open.waits.append((start, end))

    def take_times(self) -> DeviceTimes:
        """End a step. Return the times of all steps that the device has finished since the last
        call."""
        self._steps.append(self._actions)
        self._actions = []
        times = DeviceTimes()
        # Steps that the device has not passed stay for a later call: nobody waits for these times.
        while self._steps and _is_finished(self._steps[0]):
            times.steps += 1
            for action in self._steps.popleft():
                times.busy[action.kind] = (
                    times.busy.get(action.kind, 0.0) + action.measure_seconds()
                )
        return times


def _is_finished(actions: list[_TimedAction]) -> bool:
    if not actions:
        return True
    last = actions[-1].end
    return last is not None and last.query()


@dataclass(frozen=True)
class _DeviceWork:
    """Work that the host has queued on a device.

    Attributes:
        end: The event after it.
        activity: The action or other part of a step that it belongs to.
        waits: Its waits for other ranks.
    """

    end: DeviceEvent
    activity: str
    waits: Sequence[Waitable]


@dataclass(frozen=True)
class RankStatus:
    """What one rank was doing when its watchdog looked.

    Attributes:
        rank: The rank.
        activity: For example `step 17, action 4B2`.
        waiting: What it waits for, empty if it waits for no rank.
        parts_begun: Number of parts of steps that it has begun so far; the rank with the smallest
            one is furthest behind.
        can_restart: Whether it is in the loop over steps, no signal has asked it to leave, and its
            device is usable.
    """

    rank: int
    activity: str
    waiting: str
    parts_begun: int
    can_restart: bool = False

    def encode(self) -> str:
        """Return the status as one line."""
        return json.dumps(asdict(self))

    @staticmethod
    def decode(text: str) -> RankStatus:
        """Return the status that `encode` made this text from."""
        return RankStatus(**json.loads(text))

    def __str__(self) -> str:
        return f"{self.activity}, {self.waiting or 'waiting for no rank'}"


class RankProgress:
    """Where this rank is in its work.

    Attributes:
        leave_signal: The signal that asked the process to leave, 0 for none.
        step: The current step.
        in_step_loop: Whether the rank is in the loop over steps, neither at its end nor leaving it
            because of an error of its own.
        transfers_ended: Whether the transfers of this rank were ended for an in-process restart, so
            that what they returned must not be used.
        device_usable: Returns whether this process can go on using its device.
        record_event: May be set if the device runs asynchronously, so that the device and not the
            host waits for other ranks. Puts an event into the device's queue of work.
        device_timer: May be set together with `record_event`, to count how long the device is busy.
    """

    def __init__(self) -> None:
        self.record_event: Callable[[], DeviceEvent] | None = None
        self.device_timer: DeviceTimer | None = None
        self.leave_signal = self.step = 0
        self.in_step_loop = self.transfers_ended = False
        self.device_usable: Callable[[], bool] = lambda: True
        # The device: work it has not finished, waits of the part that the host is queueing, and the
        # oldest work with the time since which `has_device_stalled` has seen it there.
        self._device_work: deque[_DeviceWork] = deque()
        self._device_work_lock = Lock()
        self._device_waits: list[Waitable] = []
        self._captured_waits: list[Waitable] | None = None
        self._oldest_work: tuple[_DeviceWork | None, float] = None, 0.0
        # The host: its activity, part or action, and wait.
        self._activity, self._activity_start = "", 0.0
        self._part = ""
        self._action: object = None
        self._kind: str | None = None
        self._part_start = self._part_waited = 0
        self._waiting: Waitable | None = None
        self._event_before_wait: DeviceEvent | None = None
        self._busy: Counter[str] = Counter()
        self._parts_begun = 0

    def begin_activity(self, activity: str) -> None:
        """Record the start of an activity with a time limit, such as `step 17`; empty for one
        without a limit."""
        self.begin_part("", None)
        self._activity, self._activity_start = activity, time.monotonic()
        self._parts_begun += 1

    def begin_part(self, part: str, action: object, kind: str | None = None) -> None:
        """Record the start of the next part of the activity, or of an action of the schedule.

        Args:
            part: The part in words, such as `data`; empty for an action.
            action: The action, None for a part.
            kind: What its time without waits is counted under, None not to count it.
        """
        # Not `self.action`, which would make a text of every action.
        is_working = self._action is not None or self._part != ""
        needed = is_working or self.device_timer is not None
        if self.record_event is not None and needed and self._captured_waits is None:
            event = self.record_event()
            if is_working:
                work = _DeviceWork(event, self._describe_activity(), self._device_waits)
                self._device_work.append(work)
                self._device_waits = []
                # Called for its effect: drops the work that the device has finished, so that the
                # queue stays short.
                self._find_unfinished_work()
            if self.device_timer is not None:
                self.device_timer.begin_action(kind, event)
        now = time.perf_counter_ns()
        if self._kind is not None:
            # Without the waits in between.
            self._busy[self._kind] += now - self._part_start - self._part_waited
        self._part, self._action, self._kind = part, action, kind
        self._part_start, self._part_waited = now, 0
        self._parts_begun += 1

    def begin_wait(self, waiting: Waitable) -> int:
        """Record the start of a wait. Returns the time to pass to `end_wait`."""
        self._waiting = waiting
        self._event_before_wait = self._record_timed_event()
        return time.perf_counter_ns()

    def end_wait(self, begun: int) -> None:
        """Record the end of the wait that `begin_wait` returned the time of."""
        self._waiting = None
        self._part_waited += time.perf_counter_ns() - begun
        if self._event_before_wait is not None and self.device_timer is not None:
            after = self._record_timed_event()
            assert after is not None, "a wait is recorded as a whole or not at all"
            self.device_timer.record_wait(self._event_before_wait, after)

    def _record_timed_event(self) -> DeviceEvent | None:
        # Work under capture gets no events: they would be part of the graph.
        if self.device_timer is None or self.record_event is None:
            return None
        return self.record_event() if self._captured_waits is None else None

    def record_device_wait(
        self, waiting: Waitable, is_done: Callable[[], bool] = lambda: False
    ) -> None:
        """Record that the host's wait is over but the device still waits, unless `is_done`."""
        if self._captured_waits is not None:
            self._captured_waits.append(waiting)  # `is_done` must not query work under capture
        elif self.record_event is not None and not is_done():
            self._device_waits.append(waiting)

    @contextmanager
    def capture_waits(self) -> Iterator[Sequence[Waitable]]:
        """Return a context whose device work is captured and not run, so it leaves no events. The
        context's value lists the waits in it, which are passed to `record_device_wait` each time
        the captured work runs."""
        waits: list[Waitable] = []
        self._captured_waits = waits
        try:
            yield waits
        finally:
            self._captured_waits = None

    def check_not_ended(self) -> None:
        """Raise `LostRanks` if the transfers of this rank were ended. To be called before what has
        come over them is used on the host, or another one is started."""
        if self.transfers_ended:
            raise LostRanks("transfers were ended, so that the ranks can restart", ())

    def has_activity_exceeded(self, limit: float) -> bool:
        """Return whether the current activity takes more than `limit` seconds; 0 is no limit."""
        return bool(limit and self._activity) and time.monotonic() - self._activity_start > limit

    def has_device_stalled(self, limit: float) -> bool:
        """Return whether the device has been at one part of a step that waits for other ranks for
        more than `limit` seconds. Must be called repeatedly: time counts from the first call that
        saw the device there."""
        work, now = self._find_unfinished_work(), time.monotonic()
        # The device has moved on since the last call, so the time starts again.
        if work is not self._oldest_work[0]:
            self._oldest_work = work, now
        return work is not None and bool(work.waits) and now - self._oldest_work[1] > limit

    def _find_unfinished_work(self) -> _DeviceWork | None:
        """Return the oldest work that the device has not finished, None if there is none."""
        with self._device_work_lock:  # the watchdog's thread calls this too
            while self._device_work:
                work = self._device_work[0]
                if not work.end.query():
                    return work
                self._device_work.popleft()
        return None

    @property
    def action(self) -> str:
        """The current part or action, in words."""
        return str(self._action) if self._action is not None else self._part

    def take_busy(self) -> dict[str, float]:
        """Return the seconds of work without waits since the last call, by kind of action."""
        busy, self._busy = self._busy, Counter()
        return {kind: nanoseconds / 1e9 for kind, nanoseconds in busy.items()}

    def read_status(self, rank: int) -> RankStatus:
        """Return what this rank is doing now."""
        activity, text = self._describe_activity(), ""
        work = self._find_unfinished_work()
        if work is not None:
            text = " or ".join(dict.fromkeys(waiting.describe_wait() for waiting in work.waits))
            activity = f"{work.activity} on its device"
        elif (waiting := self._waiting) is not None:
            text = waiting.describe_wait()
        can_restart = self.in_step_loop and not self.leave_signal and self.device_usable()
        waits_in = text and f"waiting in {text}"
        return RankStatus(rank, activity, waits_in, self._parts_begun, can_restart)

    def _describe_activity(self) -> str:
        # Each attribute is read once: the working thread may change it meanwhile.
        activity, action, part = self._activity or "between steps", self._action, self._part
        if action is not None:
            return f"{activity}, action {action}"
        return f"{activity}, {part}" if part else activity

    @property
    def is_waiting(self) -> bool:
        """Whether this rank or its device is waiting for other ranks."""
        work = self._find_unfinished_work()
        return bool(work.waits) if work is not None else self._waiting is not None


def blame_for_hang(statuses: Mapping[int, RankStatus], world: int) -> tuple[int, ...]:
    """Return the ranks to blame for a hang, ascending.

    Those that have not answered; else those that wait for no rank; else, if all wait for each
    other, those that are furthest behind.

    Args:
        statuses: The status of each rank that has answered.
        world: The number of ranks.
    """
    silent = [rank for rank in range(world) if rank not in statuses]
    if silent:
        return tuple(silent)
    working = [rank for rank, status in statuses.items() if not status.waiting]
    if working:
        return tuple(sorted(working))
    fewest = min(status.parts_begun for status in statuses.values())
    return tuple(sorted(rank for rank, of in statuses.items() if of.parts_begun == fewest))


def describe_statuses(statuses: Sequence[RankStatus]) -> str:
    """Return in words what the ranks do; ranks that do the same are named together. Of more than 8
    different things it tells the first 8."""
    ranks_by_text: dict[str, list[int]] = {}
    for status in statuses:
        ranks_by_text.setdefault(str(status), []).append(status.rank)
    named = list(ranks_by_text.items())[:_MAX_NAMED]
    num_unnamed = len(statuses) - sum(len(ranks) for _, ranks in named)
    texts = [f"{name_ranks(ranks)}: {text}" for text, ranks in named]
    return "; ".join(texts) + f"; {num_unnamed} ranks elsewhere" * (num_unnamed > 0)


def name_ranks(ranks: Sequence[int]) -> str:
    """Return for example `rank 3` or `ranks 0, 1, 2`. Of more than 8 ranks it names the first 8."""
    few = ", ".join(map(str, ranks[:_MAX_NAMED]))
    few += f" and {len(ranks) - _MAX_NAMED} more" * (len(ranks) > _MAX_NAMED)
    return f"rank{'s' * (len(ranks) > 1)} {few}"
