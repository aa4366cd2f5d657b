"""Ledger: the time that a run has lost, by cause, over all its starts.

What a process loses after its last line only the next one can count, so what is known is kept in a
file of the run folder beside the metrics, which forget the steps that are run again.
"""

from __future__ import annotations

import json
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from megaframe.comm.watch import ENDED_FILE
from megaframe.meter.sinks import METRICS_FILE, cannot_write

FAULTS = "faults"
"""Folder of the run folder for what faults leave behind."""
LEDGER_FILE = "ledger.jsonl"
CAUSES = ("detection", "restart", "load", "repeat", "save")
"""detection: from the last line to the end of a run that hung. restart: from there, or from the
last line, to the next start of this program. load: from there to the first step, and on a way back.
repeat: steps that had been done before. save: what steps waited for saves."""
_TAIL = 1 << 18
"""Bytes at the end of the metrics in which the last line lies."""


class Ledger:
    """Of the run in a folder. Made before anything of an earlier start is changed there. Only the
    first rank keeps one; that of others counts and writes nothing. clock: seconds since the epoch.
    """

    def __init__(self, run: Path, *, keep: bool, clock: Callable[[], float] = time.time) -> None:
        self._run, self._folder, self._clock = run, run / FAULTS, clock
        self._keep = keep
        self._totals: defaultdict[str, float] = defaultdict(float)
        self._unwritten: defaultdict[str, float] = defaultdict(float)
        self._reached = 0
        self._started = self._mark = clock()
        self._first = self._started
        if keep and (run / METRICS_FILE).exists():
            self._read()
            self._since_last_sign()
        elif keep:
            with suppress(OSError):  # what cannot be written is told when it is written
                (self._folder / LEDGER_FILE).unlink()  # of a run that is not here any more

    def starts_at(self, step: int) -> None:
        """The run continues after this step; what came before was loading."""
        self.lose("load", self._clock() - self._mark)
        since = {"since": self._started, "reached": self._reached}
        self._write({"event": "start", "step": step, **since})
        self._mark = self._clock()

    def lose(self, cause: str, seconds: float) -> None:
        """So much time is lost."""
        if self._keep and seconds > 0:
            self._totals[cause] += seconds
            self._unwritten[cause] += seconds
            self._write({"event": "lost", "cause": cause, "seconds": seconds})

    def goes_back(self, to: int, why: str) -> None:
        """The run has gone back to a checkpoint; what it did beyond has to be done again."""
        now = self._clock()
        self.lose("load", now - self._mark)
        self._mark = now
        self._write({"event": "back", "step": to, "reached": self._reached, "why": why})

    def saved(self, step: int) -> None:
        """A checkpoint is there, so that a start that finds none is no first one."""
        self._write({"event": "saved", "step": step})

    def step(self, number: int, saving: float) -> dict[str, float]:
        """A step is done, of which `saving` seconds were waits for saves. Returns the time lost by
        cause since the step before, for its line."""
        now = self._clock()
        if number <= self._reached:
            self.lose("repeat", now - self._mark - saving)
        self.lose("save", saving)
        self._mark, self._reached = now, max(self._reached, number)
        lost, self._unwritten = self._unwritten, defaultdict(float)
        return {cause: lost[cause] for cause in CAUSES}

    def summary(self) -> str:
        """One line on where the time of all starts went."""
        whole = max(self._clock() - self._first, 1e-9)
        lost = sum(self._totals.values())
        parts = ", ".join(f"{cause} {self._totals[cause] / whole:.1%}" for cause in CAUSES)
        return (
            f"effective time {max(0.0, 1 - lost / whole):.1%} of {whole:,.0f} s since the first "
            f"start; lost: {parts}"
        )

    def _read(self) -> None:
        """What earlier starts have lost and how far they came."""
        for entry in _entries(self._folder / LEDGER_FILE):
            if isinstance(entry.get("seconds"), float):
                self._totals[str(entry.get("cause"))] += entry["seconds"]
            if isinstance(entry.get("reached"), int):
                self._reached = max(self._reached, entry["reached"])
            if isinstance(entry.get("since"), float):
                self._first = min(self._first, entry["since"])
        lines = _steps(_entries(self._run / METRICS_FILE, last=True))
        self._reached = max((self._reached, *lines))

    def _since_last_sign(self) -> None:
        """Lose the time since the last line of the process before."""
        sign = (self._run / METRICS_FILE).stat().st_mtime
        ends = [entry.get("at") for entry in _entries(self._folder / ENDED_FILE)]
        ended = [at for at in ends if isinstance(at, float) and sign < at < self._started]
        self.lose("detection", (min(ended) - sign) if ended else 0.0)
        self.lose("restart", self._started - (min(ended) if ended else sign))

    def _write(self, entry: dict[str, Any]) -> None:
        if not self._keep:
            return
        path = self._folder / LEDGER_FILE
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            with open(path, "a", encoding="utf-8") as file:
                file.write(json.dumps({"at": self._clock(), **entry}) + "\n")
        except OSError as error:
            raise cannot_write(path, error) from None


def last_saved(run: Path) -> tuple[int, int] | None:
    """The last steps of which the run in a folder has a line, and a checkpoint has been saved; None
    where it has saved none, or has no metrics any more."""
    lines = _steps(_entries(run / METRICS_FILE, last=True))
    entries = _entries(run / FAULTS / LEDGER_FILE)
    saved = _steps(entry for entry in entries if entry.get("event") == "saved")
    return (max(lines), saved[-1]) if lines and saved else None


def _steps(entries: Iterable[dict[str, Any]]) -> list[int]:
    return [entry["step"] for entry in entries if isinstance(entry.get("step"), int)]


def _entries(path: Path, *, last: bool = False) -> list[dict[str, Any]]:
    """The objects in a file of lines, or the `last` few of many; a torn line is none."""
    if not path.exists():
        return []
    with open(path, "rb") as file:
        if last:
            file.seek(max(0, path.stat().st_size - _TAIL))
        lines = file.read().splitlines()
    found = []
    for line in lines:
        try:
            entry = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(entry, dict):
            found.append(entry)
    return found
