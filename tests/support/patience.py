"""How tests wait for other processes and threads: for what they wait for, not for a time."""

import time
from pathlib import Path

from megaframe import errors

PATIENCE = 300.0
"""Seconds after which it will not happen any more. A busy machine may need more than one minute to
start a few ranks; a test that passes never waits for so long."""


def wait_until(condition, *processes, describe=str):
    """Wait until a condition is true.

    Args:
        condition: Called again and again.
        processes: They run meanwhile; it is an error if one of them ends first.
        describe: Called for the message of the error.
    """
    deadline = time.monotonic() + PATIENCE
    while not condition():
        ended = [process for process in processes if process.poll() is not None]
        assert not ended and time.monotonic() < deadline, describe()
        time.sleep(0.02)


def count_lines(path):
    """Return how many lines a file has so far, 0 if there is none."""
    return path.read_text().count("\n") if path.exists() else 0


def report_at_once():
    """Let ranks of this process report a mistake without waiting for the first one's report. Only a
    launcher's output is shorter for that wait, of four seconds."""
    errors._REPORT_DELAY = 0.0


def is_running(process):
    """Return whether a process is still running; a zombie is not."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
