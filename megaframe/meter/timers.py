"""Where the time of a step goes.

Time is switched, not measured: at every moment exactly one part is being charged, so that nested
timers take their time from the outer one and the parts sum to the step to the nanosecond. The host
only notes when it switched; what that comes to is added up when somebody asks, so that the same
notes can be events of a GPU's stream, whose times are known when the stream has passed them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import torch

Part = Literal["compute", "bubble", "optimizer", "data", "checkpoint", "evaluation", "other"]
PARTS: tuple[Part, ...] = get_args(Part)
"""`bubble` is what a stage waits for work of its neighbours; `other` is what no timer claims. To
these comes `communication/AXES` for every set of axes: what waits for transfers over them took."""
COMMUNICATION = "communication/"
_WHOLE = ("checkpoint", "evaluation")
"""Parts that keep what is waited for in them."""
_PIPELINE = f"{COMMUNICATION}pipeline"

Clock = Callable[[], Any]
Between = Callable[[Any, Any], int]


class DeviceClock:
    """A clock that is an event of a GPU's stream: what lies between two of them is what the stream
    took, waits for other streams included, and not what the host took."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.current_stream(device)
        self._latest: torch.cuda.Event | None = None

    def __call__(self) -> torch.cuda.Event:
        """Now, in the order of the stream, wherever the caller's own work goes. No time passes
        while work is captured into a graph: it does not run yet."""
        if self._latest is None or not torch.cuda.is_current_stream_capturing():
            self._latest = torch.cuda.Event(enable_timing=True)
            self._latest.record(self._stream)
        return self._latest

    def between(self, start: torch.cuda.Event, end: torch.cuda.Event) -> int:
        """Nanoseconds; waits until both have passed."""
        end.synchronize()
        return round(start.elapsed_time(end) * 1e6)


@dataclass(frozen=True)
class Flight:
    """One transfer over `axes`: when it was started, when the wait for it began and ended. part:
    what the wait was charged to. late: it was not there when the wait began."""

    axes: str
    part: str
    size: int
    started: Any
    waited: Any
    ended: Any
    late: bool


@dataclass
class Split:
    """What a timer noted between two `take()`: after `begin` the part that each moment of `marks`
    ends. transit: nanoseconds that a message takes on a free link, by the part that is charged with
    the waits for it. actions: name, kind, start and end of each, where they are followed."""

    begin: Any
    between: Between
    transit: Mapping[str, int]
    marks: list[tuple[str, Any]] = field(default_factory=list)
    flights: list[Flight] = field(default_factory=list)
    actions: list[tuple[str, str, Any, Any]] = field(default_factory=list)

    def intervals(self) -> Iterator[tuple[str, int]]:
        """Parts and nanoseconds in their order. Of a wait for a message the transfer is what the
        message takes on a free link, and the rest the bubble: its maker was not done."""
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

    def parts(self) -> dict[str, int]:
        """Nanoseconds of each part."""
        found: dict[str, int] = dict.fromkeys(PARTS, 0)
        for part, passed in self.intervals():
            found[part] = found.get(part, 0) + passed
        return found

    def rates(self) -> dict[str, float]:
        """Bytes a second over each set of axes: of messages on a free link, of other transfers
        where most of their time was waited for, because of those alone is known when they ended.
        One at a time, in their order."""
        sizes: dict[str, int] = {}
        times: dict[str, int] = {}
        last: dict[str, Any] = {}
        for one in self.flights:
            passed = self.between(one.started, one.ended)
            if one.axes in last:
                passed = min(passed, self.between(last[one.axes], one.ended))
            last[one.axes] = one.ended
            seen = one.late and 2 * self.between(one.waited, one.ended) > passed
            if one.part in self.transit:
                passed, seen = self.transit[one.part], True
            if seen and passed > 0:
                sizes[one.axes] = sizes.get(one.axes, 0) + one.size
                times[one.axes] = times.get(one.axes, 0) + passed
        return {axes: size / (times[axes] / 1e9) for axes, size in sizes.items()}


class StepTimer:
    """Splits the time between two `take()` into parts; for the one thread at a time that runs the
    step.

    clock: a monotonic clock, by default the host's in nanoseconds. between: nanoseconds from one of
    its moments to another.
    """

    def __init__(self, clock: Clock = time.perf_counter_ns, between: Between | None = None) -> None:
        self.clock = clock
        self._between = between or _passed
        self.asks = between is None
        self._charged: str = "other"
        self._open: list[tuple[str, Any]] = []
        self._waited: Any = None
        self._running = False
        self._transit: dict[str, int] = {}
        self._split = self._new(clock())
        self._spans: dict[str, Span] = {}
        self.following = False
        """Whether actions and all transfers are noted."""

    @staticmethod
    def on(device: torch.device) -> StepTimer:
        """The timer of steps that run on a device."""
        if device.type != "cuda":
            return StepTimer()
        clock = DeviceClock(device)
        return StepTimer(clock, clock.between)

    def start(self) -> None:
        """Forget the time so far and start the first step; later calls do nothing, because a step
        starts where the one before it ended."""
        if not self._running:
            self._running = True
            self._split = self._new(self.clock())

    def time(self, part: Part) -> Span:
        """A context whose time is charged to `part`."""
        return self._span(part)

    def waits(self, axes: str) -> Wait:
        """What waits for collectives over `axes` are charged to."""
        return Wait(self, COMMUNICATION + axes, axes)

    def messages(self, ends: tuple[int, int], free: float) -> Wait:
        """What waits for messages over a link of the pipeline are charged to. free: seconds that a
        message takes when nothing else is on its way."""
        part = f"message/{ends[0]}>{ends[1]}"
        self._transit[part] = round(free * 1e9)
        return Wait(self, part, "pipeline")

    def follow(self, action: object, kind: str) -> AbstractContextManager[object]:
        """A context that notes when an action ran, while actions are followed."""
        return _Following(self, str(action), kind) if self.following else _NOTHING

    def take(self) -> Split:
        """What was noted since `start()` or the last `take()`.

        A part that is still being timed is charged up to now and goes on.
        """
        self._switch(self._charged)
        taken = self._split
        self._split = self._new(taken.marks[-1][1])
        return taken

    def _new(self, begin: Any) -> Split:
        return Split(begin, self._between, self._transit)

    def _span(self, part: str) -> Span:
        if part not in self._spans:
            self._spans[part] = Span(self, part)
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


def _passed(start: int, end: int) -> int:
    return end - start


class Span:
    """One part's timer; made once, because a generator-based context costs more than it times."""

    __slots__ = ("_part", "_timer")

    def __init__(self, timer: StepTimer, part: str) -> None:
        self._timer = timer
        self._part = part

    def __enter__(self) -> None:
        self._timer._enter(self._part)

    def __exit__(self, *error: object) -> None:
        self._timer._leave()


class Wait(Span):
    """The timer of waits over some axes. What an evaluation or a checkpoint waits for stays
    theirs."""

    __slots__ = ("_axes", "asks")

    def __init__(self, timer: StepTimer, part: str, axes: str) -> None:
        super().__init__(timer, part)
        self._axes = axes
        # The host cannot tell whether a GPU will have to wait, and must not ask while it captures.
        self.asks = timer.asks

    def start(self) -> Any:
        """Now."""
        return self._timer.clock()

    def __enter__(self) -> None:
        charged = self._timer._charged
        self._timer._enter(charged if charged in _WHOLE else self._part)

    def landed(self, started: Any, size: int, late: bool) -> None:
        """See `comm.Waits`."""
        timer = self._timer
        if size and (late or timer.following) and timer._charged not in _WHOLE:
            marks = timer._split.marks
            ended = marks[-1][1]
            flight = Flight(self._axes, self._part, size, started, timer._waited, ended, late)
            timer._split.flights.append(flight)


class _Following:
    def __init__(self, timer: StepTimer, name: str, kind: str) -> None:
        self._timer, self._name, self._kind = timer, name, kind

    def __enter__(self) -> None:
        self._start = self._timer.clock()

    def __exit__(self, *error: object) -> None:
        timer = self._timer
        timer._split.actions.append((self._name, self._kind, self._start, timer.clock()))


_NOTHING = nullcontext()
