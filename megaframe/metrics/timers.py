"""Where the time of a step goes.

Exactly one part is charged at any moment: a nested timer takes its time from the outer one, so the
parts sum to the step to the nanosecond. The host only notes the moments at which the part changes;
durations are added up when somebody asks for them. The same notes can therefore be events of a
GPU's stream, whose times are known only when the stream has passed them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import torch

Part = Literal[
    "compute", "bubble", "optimizer", "data", "checkpoint", "evaluation", "sampling", "other"
]
PARTS: tuple[Part, ...] = get_args(Part)
"""`bubble` is the time that a stage waits for the work of its neighbours; `other` is time that no
timer claims. In addition there is `communication/AXES` for every set of axes: the waits for
transfers over them."""
COMMUNICATION = "communication/"
_UNDIVIDED = ("checkpoint", "evaluation", "sampling")
"""Parts that are also charged with the waits within them."""
_PIPELINE = f"{COMMUNICATION}pipeline"

Clock = Callable[[], Any]
Elapsed = Callable[[Any, Any], int]


class DeviceClock:
    """A clock whose moments are events of a GPU's stream. The time between two of them is what the
    stream took, including its waits for other streams, and not what the host took."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.current_stream(device)
        self._latest: torch.cuda.Event | None = None

    def __call__(self) -> torch.cuda.Event:
        """Return the current moment in the order of this stream, whichever stream the caller works
        on. No time passes while work is captured into a graph, because that work does not run
        yet."""
        if self._latest is None or not torch.cuda.is_current_stream_capturing():
            self._latest = torch.cuda.Event(enable_timing=True)
            self._latest.record(self._stream)
        return self._latest

    def measure_between(self, start: torch.cuda.Event, end: torch.cuda.Event) -> int:
        """Return the nanoseconds between two events; waits until both have passed."""
        end.synchronize()
        return round(start.elapsed_time(end) * 1e6)


@dataclass(frozen=True)
class TransferRecord:
    """One transfer: when it was started, and when the wait for it began and ended.

    Attributes:
        axes: The axes over which it went.
        part: What the wait was charged to.
        size: Its size in bytes.
        started: When it was started.
        waited: When the wait began.
        ended: When the wait ended.
        late: Whether it had not arrived when the wait began.
    """

    axes: str
    part: str
    size: int
    started: Any
    waited: Any
    ended: Any
    late: bool


@dataclass
class StepTimeline:
    """What a timer noted between two calls of `take()`.

    Attributes:
        begin: The moment at which the first part starts.
        between: Returns the nanoseconds between two moments.
        transit: Nanoseconds that a message takes on a free link, by the part that waits for it are
            charged to.
        marks: Parts and the moments at which they end.
        transfers: The transfers that were waited for.
        actions: Name, kind, start and end of each action, if they are followed.
    """

    begin: Any
    between: Elapsed
    transit: Mapping[str, int]
    marks: list[tuple[str, Any]] = field(default_factory=list)
    transfers: list[TransferRecord] = field(default_factory=list)
    actions: list[tuple[str, str, Any, Any]] = field(default_factory=list)

    def list_intervals(self) -> Iterator[tuple[str, int]]:
        """Yield parts and nanoseconds in order. A wait for a message is communication for as long
        as the message takes on a free link; the rest is bubble, because the sender was not done."""
        before = self.begin
        for part, mark in self.marks:
            passed = self.between(before, mark)
            before = mark
            free = self.transit.get(part)
            if free is None:
                yield part, passed
            else:
                yield "bubble", passed - min(passed, free)
                yield _PIPELINE, min(passed, free)

    def sum_parts(self) -> dict[str, int]:
        """Return the nanoseconds of each part."""
        nanoseconds: dict[str, int] = dict.fromkeys(PARTS, 0)
        for part, passed in self.list_intervals():
            nanoseconds[part] = nanoseconds.get(part, 0) + passed
        return nanoseconds

    def compute_rates(self) -> dict[str, float]:
        """Return bytes per second over each set of axes. Messages count with their time on a free
        link. Other transfers count only if most of their time was waited for, because only then is
        it known when they ended. Transfers over the same axes are assumed to run one after the
        other."""
        sizes: dict[str, int] = {}
        times: dict[str, int] = {}
        last: dict[str, Any] = {}
        for transfer in self.transfers:
            passed = self.between(transfer.started, transfer.ended)
            if transfer.axes in last:
                passed = min(passed, self.between(last[transfer.axes], transfer.ended))
            last[transfer.axes] = transfer.ended
            end_is_known = (
                transfer.late and 2 * self.between(transfer.waited, transfer.ended) > passed
            )
            if transfer.part in self.transit:
                passed, end_is_known = self.transit[transfer.part], True
            if end_is_known and passed > 0:
                sizes[transfer.axes] = sizes.get(transfer.axes, 0) + transfer.size
                times[transfer.axes] = times.get(transfer.axes, 0) + passed
        return {axes: size / (times[axes] / 1e9) for axes, size in sizes.items()}


class StepTimer:
    """Splits the time between two calls of `take()` into parts. Only one thread at a time, the one
    that runs the step, may use it.

    Args:
        clock: A monotonic clock, by default the host's in nanoseconds.
        between: Returns the nanoseconds between two of its moments.
    """

    def __init__(self, clock: Clock = time.perf_counter_ns, between: Elapsed | None = None) -> None:
        self.clock = clock
        self._between = between or _compute_elapsed
        self.checks_arrival = between is None
        self._charged: str = "other"
        self._open: list[tuple[str, Any]] = []
        self._waited: Any = None
        self._running = False
        self._transit: dict[str, int] = {}
        self._split = self._make_timeline(clock())
        self._spans: dict[str, PartTimer] = {}
        self.records_actions = False
        """Whether actions and all transfers are noted."""

    @staticmethod
    def make_for_device(device: torch.device) -> StepTimer:
        """Return the timer for steps that run on `device`."""
        if device.type != "cuda":
            return StepTimer()
        clock = DeviceClock(device)
        return StepTimer(clock, clock.measure_between)

    def start(self) -> None:
        """Start the first step, and forget the time before it. Later calls do nothing, because a
        step starts where the one before it ended."""
        if not self._running:
            self._running = True
            self._split = self._make_timeline(self.clock())

    def time(self, part: Part) -> PartTimer:
        """Return a context whose time is charged to `part`."""
        return self._get_part_timer(part)

    def time_waits(self, axes: str) -> TransferTimer:
        """Return the context of waits for collectives over `axes`."""
        return TransferTimer(self, COMMUNICATION + axes, axes)

    def time_messages(self, ends: tuple[int, int], free: float) -> TransferTimer:
        """Return the context of waits for messages over a link of the pipeline.

        Args:
            ends: Source and target of the messages, as coordinates on the pipeline axis.
            free: Seconds that a message takes if nothing else is on the link.
        """
        part = f"message/{ends[0]}>{ends[1]}"
        self._transit[part] = round(free * 1e9)
        return TransferTimer(self, part, "pipeline")

    def time_action(self, action: object, kind: str) -> AbstractContextManager[object]:
        """Return a context that notes when an action ran, if actions are followed."""
        return _ActionTimer(self, str(action), kind) if self.records_actions else _NO_TIMER

    def take(self) -> StepTimeline:
        """Return what was noted since `start()` or the last `take()`.

        The part that is being timed is charged up to now and continues in the next split.
        """
        self._switch(self._charged)
        timeline = self._split
        self._split = self._make_timeline(timeline.marks[-1][1])
        return timeline

    def _make_timeline(self, begin: Any) -> StepTimeline:
        return StepTimeline(begin, self._between, self._transit)

    def _get_part_timer(self, part: str) -> PartTimer:
        if part not in self._spans:
            self._spans[part] = PartTimer(self, part)
        return self._spans[part]

    def _switch(self, part: str) -> Any:
        now = self.clock()
        self._split.marks.append((self._charged, now))
        self._charged = part
        return now

    def _enter(self, part: str) -> None:
        outer = self._charged
        self._open.append((outer, self._switch(part)))

    def _leave(self) -> None:
        part, self._waited = self._open.pop()
        self._switch(part)


def _compute_elapsed(start: int, end: int) -> int:
    return end - start


class PartTimer:
    """The timer of one part. It is made only once, because a generator-based context costs more
    than what it times."""

    __slots__ = ("_part", "_timer")

    def __init__(self, timer: StepTimer, part: str) -> None:
        self._timer = timer
        self._part = part

    def __enter__(self) -> None:
        self._timer._enter(self._part)

    def __exit__(self, *error: object) -> None:
        self._timer._leave()


class TransferTimer(PartTimer):
    """The timer of waits over some axes. Waits within an evaluation or a checkpoint are charged to
    that part instead of these axes.

    Args:
        timer: The timer of the steps.
        part: The part of a step to which waits are charged.
        axes: Label of the axes.
    """

    __slots__ = ("_axes", "checks_arrival")

    def __init__(self, timer: StepTimer, part: str, axes: str) -> None:
        super().__init__(timer, part)
        self._axes = axes
        # The host cannot tell whether a GPU will have to wait, and must not ask during capture.
        self.checks_arrival = timer.checks_arrival

    def start(self) -> Any:
        """Return the time at which a transfer starts, as `record_arrival` takes it."""
        return self._timer.clock()

    def __enter__(self) -> None:
        charged = self._timer._charged
        self._timer._enter(charged if charged in _UNDIVIDED else self._part)

    def record_arrival(self, started: Any, size: int, late: bool) -> None:
        """Note a transfer that was waited for; see `WaitTimer`.

        Args:
            started: What `start` returned when the transfer started.
            size: Bytes that were waited for.
            late: As far as is known, they had not arrived before the wait.
        """
        timer = self._timer
        if size and (late or timer.records_actions) and timer._charged not in _UNDIVIDED:
            marks = timer._split.marks
            ended = marks[-1][1]
            record = TransferRecord(
                self._axes, self._part, size, started, timer._waited, ended, late
            )
            timer._split.transfers.append(record)


class _ActionTimer:
    def __init__(self, timer: StepTimer, name: str, kind: str) -> None:
        self._timer, self._name, self._kind = timer, name, kind

    def __enter__(self) -> None:
        self._start = self._timer.clock()

    def __exit__(self, *error: object) -> None:
        timer = self._timer
        timer._split.actions.append((self._name, self._kind, self._start, timer.clock()))


_NO_TIMER = nullcontext()
