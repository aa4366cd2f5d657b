"""Runs a command with a time limit; everything that it started ends with it.

Its output is passed on line by line, so nothing is lost if it is ended.
"""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
LAST = 4000
"""Characters of an error output that are kept."""
_GRACE = 5.0
"""Seconds between the request to end and the kill."""


@dataclass(frozen=True)
class TimedResult:
    """How a command ended, and after how many seconds.

    Attributes:
        code: None if its time was up.
        errors: The end of its stderr.
    """

    code: int | None
    lines: Sequence[str]
    errors: str
    seconds: float

    def explain_failure(self) -> str:
        """Return in one line why it did not end well."""
        if self.code is None:
            return f"not finished after {self.seconds:.0f} s"
        if self.code < 0:
            return f"ended by {signal.Signals(-self.code).name}"
        lines = self.errors.strip().splitlines() or [f"status {self.code} and no message"]
        return lines[-1].strip()[:200]


def run_limited(
    command: Sequence[str],
    seconds: float,
    environment: Mapping[str, str] | None = None,
    note: Callable[[str], None] | None = None,
    quiet: float = math.inf,
) -> TimedResult:
    """Run the command in the root of the project. quiet: seconds without a line after which it is
    ended too.

    Args:
        note: Is given each line as it comes.
    """
    lines: list[str] = []
    late = threading.Event()
    begun = time.monotonic()
    timer = threading.Timer(0.0, late.set)
    with tempfile.TemporaryFile("w+", errors="replace") as errors:
        # It gets a process group of its own, so that what it starts can be ended with it.
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            errors="replace",
            start_new_session=True,
            # Background jobs of a shell ignore SIGINT, and whatever they start would inherit that.
            preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
        )

        def end(how: signal.Signals) -> None:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, how)

        def end_late() -> None:
            late.set()
            # On SIGINT, Python prints where it was.
            end(signal.SIGINT)
            begin(_GRACE, end, signal.SIGKILL)

        def begin(seconds_left: float, function: Callable[..., None], *arguments: Any) -> None:
            nonlocal timer
            timer.cancel()
            timer = threading.Timer(max(seconds_left, 0.0), function, arguments)
            timer.start()

        begin(min(seconds, quiet), end_late)
        try:
            assert process.stdout is not None
            for line in process.stdout:
                if not late.is_set():
                    begin(min(begun + seconds - time.monotonic(), quiet), end_late)
                lines.append(line.rstrip("\n"))
                if note is not None:
                    note(lines[-1])
            code = process.wait()
        finally:
            timer.cancel()
            end(signal.SIGKILL)
            process.wait()
        errors.seek(0)
        written = errors.read()[-LAST:]
    passed = time.monotonic() - begun
    return TimedResult(None if late.is_set() else code, lines, written, passed)


def parse_object(line: str) -> dict[str, Any] | None:
    """Return the JSON object in a line, or None if it is something else: libraries print too."""
    if not line.startswith("{"):
        return None
    try:
        value = json.loads(line)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def write_json(path: Path, value: Any) -> None:
    """Write the file completely or not at all."""
    write_text(path, json.dumps(value, indent=1) + "\n")


def write_text(path: Path, text: str) -> None:
    """Write the file completely or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f"{path.name}.new")
    try:
        new.write_text(text, encoding="utf-8")
        os.replace(new, path)
    except OSError:
        new.unlink(missing_ok=True)
        raise
