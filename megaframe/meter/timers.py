"""Where the time of a step goes, on the host's clock.

Time is switched, not measured: at every moment exactly one part is being charged, so that nested
timers take their time from the outer one and the parts sum to the step to the nanosecond.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Literal, get_args

Part = Literal[
    "compute",
    "pipeline",
    "communication",
    "optimizer",
    "data",
    "checkpoint",
    "evaluation",
    "other",
]
PARTS: tuple[Part, ...] = get_args(Part)
"""`pipeline` is what a stage waits for its neighbours; `other` is what no timer claims."""


class StepTimer:
    """Splits the time between two `take()` into parts; for the one thread that runs the step.

    clock: a monotonic clock in nanoseconds.
    """

    __slots__ = ("_charged", "_clock", "_elapsed", "_mark", "_open", "_running", "_spans")

    def __init__(self, clock: Callable[[], int] = time.perf_counter_ns) -> None:
        self._clock = clock
        self._elapsed: dict[Part, int] = dict.fromkeys(PARTS, 0)
        self._charged: Part = "other"
        self._open: list[Part] = []
        self._mark = clock()
        self._running = False
        self._spans = {part: Span(self, part) for part in PARTS}

    def start(self) -> None:
        """Forget the time so far and start the first step; later calls do nothing, because a step
        starts where the one before it ended."""
        if not self._running:
            self._running = True
            self._elapsed = dict.fromkeys(PARTS, 0)
            self._mark = self._clock()

    def time(self, part: Part) -> Span:
        """A context whose time is charged to `part`."""
        return self._spans[part]

    def charged(self, part: Part) -> int:
        """Nanoseconds of a part since `start()` or the last `take()`, without what is being timed
        now."""
        return self._elapsed[part]

    def take(self) -> dict[Part, int]:
        """Nanoseconds of each part since `start()` or the last `take()`; starts again from zero.

        A part that is still being timed is charged up to now and goes on.
        """
        self._switch(self._charged)
        taken, self._elapsed = self._elapsed, dict.fromkeys(PARTS, 0)
        return taken

    def _switch(self, part: Part) -> None:
        now = self._clock()
        self._elapsed[self._charged] += now - self._mark
        self._mark = now
        self._charged = part


class Span:
    """One part's timer; made once, because a generator-based context costs more than it times."""

    __slots__ = ("_part", "_timer")

    def __init__(self, timer: StepTimer, part: Part) -> None:
        self._timer = timer
        self._part = part

    def __enter__(self) -> None:
        timer = self._timer
        timer._open.append(timer._charged)
        timer._switch(self._part)

    def __exit__(self, *error: object) -> None:
        timer = self._timer
        timer._switch(timer._open.pop())
