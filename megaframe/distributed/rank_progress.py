"""Place: where a rank is in its work; recorded by the working thread and read by the watch.

It is always recorded, because once a hang is noticed it is too late to start. This is cheap: a few
assignments for each action, and two clock readings for each wait. Only this module can tell work
from waiting, so it also counts the time that a rank is busy, without the waits in between: that of
the host, and if asked to, that of a device that runs asynchronously (`comm.busy`).
"""

from __future__ import annotations

import json
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from threading import Lock
from typing import Protocol

from megaframe.distributed.device_time import DeviceBusy, Mark
from megaframe.errors import LostRanks

_TOLD = 8
"""Ranks, and things that ranks do, that a text names at most."""


class Waiting(Protocol):
    """What a rank can wait for."""

    def waits_for(self) -> str:
        """Return it in words."""


@dataclass(frozen=True)
class _Given:
    """Work that the host has queued on a device.

    end: the mark after it.
    doing: the action or other part of a step that it belongs to.
    waits: its waits for other ranks.
    """

    end: Mark
    doing: str
    waits: Sequence[Waiting]


@dataclass(frozen=True)
class Sight:
    """What one rank was doing when its watch looked.

    doing: for example `step 17, action 4B2`.
    waiting: what it waits for, empty if it waits for no rank.
    beat: number of parts of steps that it has begun so far; the smallest one is furthest behind.
    steady: as in `Place`, no signal has asked the rank to leave, and its device is usable.
    """

    rank: int
    doing: str
    waiting: str
    beat: int
    steady: bool = False

    def encode(self) -> str:
        """Return the sight as one line."""
        return json.dumps(asdict(self))

    @staticmethod
    def decode(text: str) -> Sight:
        """Return the sight that `encode` made this text from."""
        return Sight(**json.loads(text))

    def __str__(self) -> str:
        return f"{self.doing}, {self.waiting or 'waiting for no rank'}"


class Place:
    """Where this rank is in its work.

    told: the signal that asked the process to leave, 0 for none.
    step: the current step.
    steady: the rank is in the loop over steps, neither at its end nor leaving it because of an
    error of its own.
    ended: the transfers of this rank were ended for an in-process restart, so that what they
    returned must not be used.
    usable: returns whether this process can go on using its device.
    mark: may be set if the device runs asynchronously, so that the device and not the host waits
    for other ranks. Puts a mark into the device's queue of work.
    device: may be set together with `mark`, to count how long the device is busy.
    """

    def __init__(self) -> None:
        self.mark: Callable[[], Mark] | None = None
        self.device: DeviceBusy | None = None
        self._given: deque[_Given] = deque()
        self._looking = Lock()
        self._waits: list[Waiting] = []
        self._recorded: list[Waiting] | None = None
        self._first: tuple[_Given | None, float] = None, 0.0
        self.told = self.step = 0
        self.steady = self.ended = False
        self.usable: Callable[[], bool] = lambda: True
        self._doing, self._since = "", 0.0
        self._action: object = None
        self._part = ""
        self._waiting: Waiting | None = None
        self._before: Mark | None = None
        self._kind: str | None = None
        self._mark = self._waited = 0
        self._busy: Counter[str] = Counter()
        self._beat = 0

    def begin(self, doing: str) -> None:
        """Record the start of an activity with a time limit, such as `step 17`; empty for one
        without a limit."""
        self.act("", None)
        self._doing, self._since = doing, time.monotonic()
        self._beat += 1

    def act(self, part: str, action: object, kind: str | None = None) -> None:
        """Record the start of the next part of the activity, such as `data`, or of an action of the
        schedule. kind: what its time without waits is counted under, None not to count it."""
        needed = self.action or self.device is not None
        if self.mark is not None and needed and self._recorded is None:
            mark = self.mark()
            if self.action:
                self._given.append(_Given(mark, self._doing_now(), self._waits))
                self._waits = []
                self._under_way()
            if self.device is not None:
                self.device.act(kind, mark)
        now = time.perf_counter_ns()
        if self._kind is not None:
            self._busy[self._kind] += now - self._mark - self._waited
        self._part, self._action, self._kind = part, action, kind
        self._mark, self._waited = now, 0
        self._beat += 1

    def wait(self, waiting: Waiting) -> int:
        """Record the start of a wait. Returns the time to pass to `go_on` at its end."""
        self._waiting = waiting
        self._before = self._timed_mark()
        return time.perf_counter_ns()

    def _timed_mark(self) -> Mark | None:
        timed = self.device is not None and self.mark is not None and self._recorded is None
        return self.mark() if timed and self.mark is not None else None

    def left(self, waiting: Waiting, done: Callable[[], bool] = lambda: False) -> None:
        """Record that the host's wait is over but the device still waits, unless `done`."""
        if self._recorded is not None:
            self._recorded.append(waiting)  # `done` must not query work under recording
        elif self.mark is not None and not done():
            self._waits.append(waiting)

    @contextmanager
    def recording(self) -> Iterator[Sequence[Waiting]]:
        """Return a context whose device work is recorded and not run, so it leaves no marks. The
        context's value lists the waits in it, which are passed to `left` each time the recorded
        work runs."""
        waits: list[Waiting] = []
        self._recorded = waits
        try:
            yield waits
        finally:
            self._recorded = None

    def check(self) -> None:
        """Raise `LostRanks` if the transfers of this rank were ended. To be called before what has
        come over them is used on the host, or another one is started."""
        if self.ended:
            raise LostRanks("transfers were ended, so that the ranks can restart", ())

    def go_on(self, begun: int) -> None:
        """Record the end of the wait that `wait` returned the time of."""
        self._waiting = None
        self._waited += time.perf_counter_ns() - begun
        if self._before is not None and self.device is not None:
            after = self._timed_mark()
            assert after is not None, "a wait is recorded as a whole or not at all"
            self.device.wait(self._before, after)

    def overrun(self, limit: float) -> bool:
        """Return whether the current activity takes more than `limit` seconds; 0 is no limit."""
        return bool(limit and self._doing) and time.monotonic() - self._since > limit

    def stalled(self, limit: float) -> bool:
        """Return whether the device has been at one part of a step that waits for other ranks for
        more than `limit` seconds. Must be called repeatedly: time counts from the first call that
        saw the device there."""
        first, now = self._under_way(), time.monotonic()
        if first is not self._first[0]:
            self._first = first, now
        return first is not None and bool(first.waits) and now - self._first[1] > limit

    def _under_way(self) -> _Given | None:
        """Return the oldest work that the device has not finished, None if there is none."""
        with self._looking:  # the watch's thread calls this too
            while self._given:
                first = self._given[0]
                if not first.end.query():
                    return first
                self._given.popleft()
        return None

    @property
    def action(self) -> str:
        """The current part or action, in words."""
        return str(self._action) if self._action is not None else self._part

    def take_busy(self) -> dict[str, float]:
        """Return the seconds of work without waits since the last call, by kind of action."""
        busy, self._busy = self._busy, Counter()
        return {kind: nanoseconds / 1e9 for kind, nanoseconds in busy.items()}

    def seen(self, rank: int) -> Sight:
        """Return what this rank is doing now."""
        doing, text = self._doing_now(), ""
        given = self._under_way()
        if given is not None:
            text = " or ".join(dict.fromkeys(waiting.waits_for() for waiting in given.waits))
            doing = f"{given.doing} on its device"
        elif (waiting := self._waiting) is not None:
            text = waiting.waits_for()
        steady = self.steady and not self.told and self.usable()
        return Sight(rank, doing, text and f"waiting in {text}", self._beat, steady)

    def _doing_now(self) -> str:
        doing, action, part = self._doing or "between steps", self._action, self._part
        if action is not None:
            return f"{doing}, action {action}"
        return f"{doing}, {part}" if part else doing

    @property
    def waits(self) -> bool:
        """Whether this rank or its device is waiting for other ranks."""
        given = self._under_way()
        return bool(given.waits) if given is not None else self._waiting is not None


def held_up_by(seen: Mapping[int, Sight], world: int) -> tuple[int, ...]:
    """Return the ranks to blame for a hang, ascending: those that have not answered; else those
    that wait for no rank; else, if all wait for each other, those that are furthest behind."""
    silent = [rank for rank in range(world) if rank not in seen]
    if silent:
        return tuple(silent)
    at_work = [rank for rank, sight in seen.items() if not sight.waiting]
    if at_work:
        return tuple(sorted(at_work))
    first = min(sight.beat for sight in seen.values())
    return tuple(sorted(rank for rank, sight in seen.items() if sight.beat == first))


def gathered(sights: Sequence[Sight]) -> str:
    """Return in words what the ranks do; ranks that do the same are named together. Of more than 8
    different things it tells the first 8."""
    alike: dict[str, list[int]] = {}
    for sight in sights:
        alike.setdefault(str(sight), []).append(sight.rank)
    told = list(alike.items())[:_TOLD]
    rest = len(sights) - sum(len(ranks) for _, ranks in told)
    texts = [f"{named(ranks)}: {text}" for text, ranks in told]
    return "; ".join(texts) + f"; {rest} ranks elsewhere" * (rest > 0)


def named(ranks: Sequence[int]) -> str:
    """Return for example `rank 3` or `ranks 0, 1, 2`. Of more than 8 ranks it names the first 8."""
    few = ", ".join(map(str, ranks[:_TOLD]))
    few += f" and {len(ranks) - _TOLD} more" * (len(ranks) > _TOLD)
    return f"rank{'s' * (len(ranks) > 1)} {few}"
