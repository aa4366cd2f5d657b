"""Place: where in its work a rank is, kept by the thread that works and read by the watch.

It is always kept, because a hang is found when it is too late to ask: an action costs one
assignment, and a wait two readings of the clock. What is a wait and what is work is known only
here, so the time that a rank is busy, whatever it waits for in between, is counted here too.
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


class Waiting(Protocol):
    """What a rank can wait for."""

    def waits_for(self) -> tuple[str, tuple[int, ...]]:
        """In words, and the ranks that have a part in it, this one too."""


class Mark(Protocol):
    """A place in the work of a device."""

    def query(self) -> bool:
        """Whether the device has passed it."""


@dataclass(frozen=True)
class _Given:
    """What the host has given a device to do: an action or another part of a step, and the waits
    for others in it. end: behind it."""

    end: Mark
    doing: str
    waits: Sequence[Waiting]


@dataclass(frozen=True)
class Sight:
    """What one rank was seen doing. doing: `step 17, action 4B2`. waiting: what it waits for, empty
    where it waits for no rank; then `others` have a part in it. beat: passes begun so far. steady:
    as of `Place`, and not asked to leave."""

    rank: int
    doing: str
    waiting: str
    others: tuple[int, ...]
    beat: int
    steady: bool = False

    def encode(self) -> str:
        """As one line."""
        return json.dumps(asdict(self))

    @staticmethod
    def decode(text: str) -> Sight:
        """The sight that was encoded."""
        known = json.loads(text)
        return Sight(**{**known, "others": tuple(known["others"])})

    def __str__(self) -> str:
        return f"{self.doing}, {self.waiting or 'waiting for no rank'}"


class Place:
    """This rank's. told: a signal that asked the process to leave, 0 for none. steady: it is in
    the loop over steps, and neither at its end nor leaving it for an error of its own. step: the
    one under way. mark: leaves a mark in the work of a device that does later what the host gives
    it, and then is what waits for others; may be set."""

    def __init__(self) -> None:
        self.mark: Callable[[], Mark] | None = None
        self._given: deque[_Given] = deque()
        self._looking = Lock()
        self._waits: list[Waiting] = []
        self._recorded: list[Waiting] | None = None
        self._first: tuple[_Given | None, float] = None, 0.0
        self.told = self.step = 0
        self.steady = False
        self._doing, self._since = "", 0.0
        self._action: object = None
        self._part = ""
        self._waiting: Waiting | None = None
        self._kind: str | None = None
        self._mark = self._waited = 0
        self._busy: Counter[str] = Counter()
        self._beat = 0

    def begin(self, doing: str) -> None:
        """Something that is to end in time begins, such as `step 17`; empty for what may take as
        long as it likes."""
        self.act("", None)
        self._doing, self._since = doing, time.monotonic()
        self._beat += 1

    def act(self, part: str, action: object, kind: str | None = None) -> None:
        """The next part of it begins, such as `data`, or an action of the schedule. kind: under
        which its time without waiting is counted, None where it is not."""
        if self.mark is not None and self.action and self._recorded is None:
            self._given.append(_Given(self.mark(), self._doing_now(), self._waits))
            self._waits = []
            self._under_way()
        now = time.perf_counter_ns()
        if self._kind is not None:
            self._busy[self._kind] += now - self._mark - self._waited
        self._part, self._action, self._kind = part, action, kind
        self._mark, self._waited = now, 0
        self._beat += 1

    def wait(self, waiting: Waiting) -> int:
        """A wait begins. Returns what `go_on` is told at its end."""
        self._waiting = waiting
        return time.perf_counter_ns()

    def left(self, waiting: Waiting, done: Callable[[], bool] = lambda: False) -> None:
        """What the host has waited for, the device still does, unless it is `done`."""
        if self._recorded is not None:
            self._recorded.append(waiting)  # and of what is recorded nobody may ask
        elif self.mark is not None and not done():
            self._waits.append(waiting)

    @contextmanager
    def recording(self) -> Iterator[Sequence[Waiting]]:
        """What is given to a device in it is recorded, and not done: it leaves no marks. Gives the
        waits in it, for `left` whenever it is done."""
        waits: list[Waiting] = []
        self._recorded = waits
        try:
            yield waits
        finally:
            self._recorded = None

    def go_on(self, begun: int) -> None:
        """The wait that began then is over."""
        self._waiting = None
        self._waited += time.perf_counter_ns() - begun

    def overrun(self, limit: float) -> bool:
        """Whether what is to end in time has not ended within so many seconds; 0 is no limit."""
        return bool(limit and self._doing) and time.monotonic() - self._since > limit

    def stalled(self, limit: float) -> bool:
        """Whether the device has waited for others in one part of a step for more than so many
        seconds, as far as is known from asking again and again."""
        first, now = self._under_way(), time.monotonic()
        if first is not self._first[0]:
            self._first = first, now
        return first is not None and bool(first.waits) and now - self._first[1] > limit

    def _under_way(self) -> _Given | None:
        """What the device has not done yet and was given first."""
        with self._looking:  # the watch asks as well
            while self._given:
                first = self._given[0]
                if not first.end.query():
                    return first
                self._given.popleft()
        return None

    @property
    def action(self) -> str:
        """The part or action under way, in words."""
        return str(self._action) if self._action is not None else self._part

    def take_busy(self) -> dict[str, float]:
        """Seconds of work without waiting since the last call, by kind of action."""
        busy, self._busy = self._busy, Counter()
        return {kind: nanoseconds / 1e9 for kind, nanoseconds in busy.items()}

    def seen(self, rank: int) -> Sight:
        """What this rank does now."""
        doing, text, others = self._doing_now(), "", tuple[int, ...]()
        given = self._under_way()
        if given is not None:
            known = [waiting.waits_for() for waiting in given.waits]
            text = " or ".join(dict.fromkeys(words for words, _ in known))
            others = tuple(sorted({rank for _, ranks in known for rank in ranks}))
            doing = f"{given.doing} on its device"
        elif (waiting := self._waiting) is not None:
            text, others = waiting.waits_for()
        steady = self.steady and not self.told
        return Sight(rank, doing, text and f"waiting in {text}", others, self._beat, steady)

    def _doing_now(self) -> str:
        doing, action, part = self._doing or "between steps", self._action, self._part
        if action is not None:
            return f"{doing}, action {action}"
        return f"{doing}, {part}" if part else doing

    @property
    def waits(self) -> bool:
        """Whether this rank waits for others, or its device does."""
        given = self._under_way()
        return bool(given.waits) if given is not None else self._waiting is not None


def held_up_by(seen: Mapping[int, Sight], world: int) -> tuple[int, ...]:
    """The ranks to blame for a hang, ascending: those that nobody has seen; else those that wait
    for no rank; else, where all wait for each other, those that have done least."""
    silent = [rank for rank in range(world) if rank not in seen]
    if silent:
        return tuple(silent)
    at_work = [rank for rank, sight in seen.items() if not sight.waiting]
    if at_work:
        return tuple(sorted(at_work))
    first = min(sight.beat for sight in seen.values())
    return tuple(sorted(rank for rank, sight in seen.items() if sight.beat == first))


def gathered(sights: Sequence[Sight]) -> str:
    """What ranks do, those that do the same together."""
    alike: dict[str, list[int]] = {}
    for sight in sights:
        alike.setdefault(str(sight), []).append(sight.rank)
    return "; ".join(f"{named(ranks)}: {text}" for text, ranks in alike.items())


def named(ranks: Sequence[int]) -> str:
    """`rank 3`, or `ranks 0, 1, 2`; the first few of many."""
    few = ", ".join(map(str, ranks[:8])) + f" and {len(ranks) - 8} more" * (len(ranks) > 8)
    return f"rank{'s' * (len(ranks) > 1)} {few}"
