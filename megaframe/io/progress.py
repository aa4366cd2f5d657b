"""How far a command is, and how fast: on standard error, so that results stay alone on standard
output.

On a terminal it is one line, which is written over; in a log, where nobody waits for the next one,
a line now and then.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import TextIO

_TERMINAL_SECONDS = 0.2
_LOG_SECONDS = 15.0
"""Seconds between two lines. A command that takes less says nothing in a log."""
_CLEAR = "\r\x1b[K"
"""Begins a line of a terminal again."""


class Progress:
    """Progress of one piece of work, until the context is left.

    Args:
        what: Its name, the beginning of each line.
        unit: What is counted.
        stream: Where lines go; standard error by default.
        is_shown: Whether lines are written while it lasts, and not only its speed at the end.
        says_speed: Whether its speed is said at the end in a log, too.
        clock: Returns seconds.
    """

    def __init__(
        self,
        what: str,
        unit: str = "tokens",
        stream: TextIO | None = None,
        *,
        is_shown: bool = True,
        says_speed: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._what, self._unit, self._clock = what, unit, clock
        self._stream = sys.stderr if stream is None else stream
        self._on_terminal = self._stream.isatty()
        self._is_shown, self._says_speed = is_shown, says_speed
        self._begin = self._last = clock()
        self._done = 0

    def __enter__(self) -> Progress:
        return self

    def report(self, done: int, total: int) -> None:
        """Say how much of the work is done, if it is time to."""
        self._done = done
        now = self._clock()
        pause = _TERMINAL_SECONDS if self._on_terminal else _LOG_SECONDS
        if self._is_shown and now - self._last >= pause:
            self._last = now
            rate = done / (now - self._begin)
            left = f", {(total - done) / rate:,.0f} s left" if rate else ""
            text = f"{self._what}: {done:,} of {total:,} {self._unit}, {rate:,.0f} a second{left}"
            self._write(f"{_CLEAR}{text}" if self._on_terminal else f"{text}\n")

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """On a terminal, replace the line by the speed; after an error only remove it."""
        clear = _CLEAR * (self._is_shown and self._on_terminal)
        if kind is not None:
            self._write(clear)
            return
        if not (self._on_terminal or self._says_speed):
            return
        seconds = max(self._clock() - self._begin, 1e-9)
        text = f"{self._what}: {self._done:,} {self._unit} in {seconds:.1f} s"
        self._write(f"{clear}{text}, {self._done / seconds:,.0f} a second\n")

    def _write(self, text: str) -> None:
        self._stream.write(text)
        self._stream.flush()
