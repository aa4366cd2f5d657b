"""Downtime: the time that a run has lost, by cause, over all its starts.

The time that a process loses after its last metrics line can only be counted by the next process.
Therefore the ledger is a file in the run folder. It is separate from the metrics, because they drop
the lines of steps that are run again.

Time before a start is lost only if the launcher of the previous start has restarted the run.
Between two commands of a user the run was idle: that time is neither lost nor part of the whole.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from megaframe.distributed.fault_records import ENDED_FILE
from megaframe.errors import UserError
from megaframe.io.output_files import GrowingFile, OutputFiles
from megaframe.io.regular_file import delete_file
from megaframe.io.run_files import METRICS_FILE
from megaframe.io.untrusted import open_file
from megaframe.metrics.console import format_duration
from megaframe.metrics.sinks import open_growing
from megaframe.resilience.launcher import LauncherProcess

FAULTS = "faults"
"""Subfolder of the run folder for the ledger, stacks and other records of faults."""
LEDGER_FILE = "ledger.jsonl"
CAUSES = ("detection", "restart", "load", "repeat", "save")
"""detection: from the last line of a run that hung to its end. restart: from that end, or else from
the last line, to the next start of this program by the same launcher. load: from the start to the
first step, and when going back to a checkpoint. repeat: steps that had been done before. save:
waiting for saves."""
_TAIL_BYTES = 1 << 18
"""Bytes read from the end of the metrics; they contain the last line."""
_IDLE = "idle"
"""Event of a time between two commands."""


class _LastEntry(NamedTuple):
    """When the previous start of a run has written its last entry, and which launcher it had; None
    if the entries do not say."""

    at: float
    launcher: object


class DowntimeLedger:
    """The ledger of the run in a folder. Create it before any file of an earlier start is changed.

    Args:
        run_folder: The folder of the run.
        files: Those of the run, on the first rank; on others the ledger counts and writes nothing.
        launcher: Of this start.
        clock: Returns seconds since the epoch.
    """

    def __init__(
        self,
        run_folder: Path,
        files: OutputFiles | None,
        launcher: LauncherProcess,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._run, self._folder, self._clock = run_folder, run_folder / FAULTS, clock
        self._files = files
        self._file: GrowingFile | None = None
        keep = files is not None
        self._totals: defaultdict[str, float] = defaultdict(float)
        self._unwritten: defaultdict[str, float] = defaultdict(float)
        self._idle = 0.0
        self._reached = 0
        self._launcher = launcher
        self._started = self._mark = clock()
        self._first = self._started
        if keep and (run_folder / METRICS_FILE).exists():
            self._count_time_before_start(self._read())
        elif keep:
            with suppress(OSError):  # a folder that is not writable is reported on the first write
                # of a run that has been removed
                delete_file(self._folder / LEDGER_FILE, inside=run_folder)

    def record_start(self, step: int) -> None:
        """Record that the run continues after `step`. The time until now was spent on loading."""
        self.add_lost_time("load", self._clock() - self._mark)
        since = {"since": self._started, "reached": self._reached}
        self._write({"event": "start", "step": step, **since, "launcher": self._launcher.identity})
        self._mark = self._clock()

    def add_lost_time(self, cause: str, seconds: float) -> None:
        """Add lost time to a cause (one of `CAUSES`)."""
        if self._files is not None and seconds > 0:
            self._totals[cause] += seconds
            self._unwritten[cause] += seconds
            self._write({"event": "lost", "cause": cause, "seconds": seconds})

    def record_rollback(self, to: int, why: str) -> None:
        """Record that the run has gone back to the checkpoint of step `to`. Later steps that it had
        done will count as repeated."""
        now = self._clock()
        self.add_lost_time("load", now - self._mark)
        self._mark = now
        self._write({"event": "back", "step": to, "reached": self._reached, "why": why})

    def record_save(self, step: int) -> None:
        """Record that a checkpoint was saved. A start that then finds none is not a first start."""
        self._write({"event": "saved", "step": step})

    def record_step(self, number: int, saving: float) -> dict[str, float]:
        """Record that a step is done.

        Args:
            number: The step's number.
            saving: Seconds of it that were spent waiting for saves.

        Returns:
            The seconds lost since the previous step, by cause, for the metrics line.
        """
        now = self._clock()
        if number <= self._reached:
            self.add_lost_time("repeat", now - self._mark - saving)
        self.add_lost_time("save", saving)
        self._mark, self._reached = now, max(self._reached, number)
        lost, self._unwritten = self._unwritten, defaultdict(float)
        return {cause: lost[cause] for cause in CAUSES}

    def summarize(self) -> str:
        """Return a line that says how much of the time since the first start was effective, and
        what the rest was lost to."""
        elapsed = max(self._clock() - self._first - self._idle, 1e-9)
        lost = sum(self._totals.values())
        parts = ", ".join(f"{cause} {self._totals[cause] / elapsed:.1%}" for cause in CAUSES)
        idle = format_duration(self._idle)
        left_out = f", idle time between commands ({idle}) left out" if round(self._idle) else ""
        return (
            f"effective time {max(0.0, 1 - lost / elapsed):.1%} of {elapsed:,.0f} s since the "
            f"first start{left_out}; lost: {parts}"
        )

    def _read(self) -> _LastEntry:
        """Read how much time earlier starts have lost and which step they reached. Returns what the
        last of them has written."""
        last, launcher = 0.0, None
        for entry in _read_entries(self._run, f"{FAULTS}/{LEDGER_FILE}"):
            seconds, event = entry.get("seconds"), entry.get("event")
            if isinstance(seconds, float) and 0 <= seconds < math.inf:
                if event == _IDLE:
                    self._idle += seconds
                else:
                    self._totals[str(entry.get("cause"))] += seconds
            if isinstance(entry.get("reached"), int):
                self._reached = max(self._reached, entry["reached"])
            if isinstance(entry.get("since"), float):
                self._first = min(self._first, entry["since"])
            # A checkpoint is written beside the steps, and its time says nothing about theirs.
            if isinstance(entry.get("at"), float) and event != "saved":
                last = max(last, entry["at"])
            launcher = entry.get("launcher", launcher)
        lines = _list_step_numbers(_read_entries(self._run, METRICS_FILE, last=True))
        self._reached = max((self._reached, *lines))
        return _LastEntry(last, launcher)

    def _count_time_before_start(self, last: _LastEntry) -> None:
        """Count the time since the previous process has written its last line or entry, as lost if
        the launcher restarted the run, else as idle."""
        before = max(last.at, (self._run / METRICS_FILE).stat().st_mtime)
        ends = [entry.get("at") for entry in _read_entries(self._run, f"{FAULTS}/{ENDED_FILE}")]
        ended = min(
            (at for at in ends if isinstance(at, float) and before < at < self._started),
            default=before,
        )
        self.add_lost_time("detection", ended - before)
        if last.launcher == self._launcher.identity or self._launcher.has_restarted:
            self.add_lost_time("restart", self._started - ended)
        else:
            self._idle += max(0.0, self._started - ended)
            self._write({"event": _IDLE, "seconds": max(0.0, self._started - ended)})
        # If this start fails before a step, the next one counts from here.
        self._write({"event": "launch", "launcher": self._launcher.identity})

    def _write(self, entry: dict[str, Any]) -> None:
        if self._files is None:
            return
        if self._file is None:
            self._file = open_growing(self._files, f"{FAULTS}/{LEDGER_FILE}")
        self._file.append((json.dumps({"at": self._clock(), **entry}) + "\n").encode())


def find_last_saved(run_folder: Path) -> tuple[int, int] | None:
    """Return the last step in the metrics of the run in a folder, and the last step of which it has
    saved a checkpoint. None if it has saved none, or its metrics are gone."""
    lines = _list_step_numbers(_read_entries(run_folder, METRICS_FILE, last=True))
    entries = _read_entries(run_folder, f"{FAULTS}/{LEDGER_FILE}")
    saved = _list_step_numbers(entry for entry in entries if entry.get("event") == "saved")
    return (max(lines), saved[-1]) if lines and saved else None


def _list_step_numbers(entries: Iterable[dict[str, Any]]) -> list[int]:
    return [entry["step"] for entry in entries if isinstance(entry.get("step"), int)]


def _read_entries(run_folder: Path, name: str, *, last: bool = False) -> list[dict[str, Any]]:
    """Read the JSON objects of a file of lines in a run folder, skipping invalid lines. last: only
    those in the last `_TAIL_BYTES` bytes."""
    path = run_folder / name
    try:
        with open_file(path, inside=run_folder) as file:
            if last:
                file.seek(max(0, os.fstat(file.fileno()).st_size - _TAIL_BYTES))
            lines = file.read().splitlines()
    except FileNotFoundError:
        return []
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None
    entries = []
    for line in lines:
        try:
            entry = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(entry, dict):
            entries.append(entry)
    return entries
