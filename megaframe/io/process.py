"""Processes of this machine, told apart from later ones that get the same number.

Process ids are reused, so a process is known by its id and its start. Both mean something only on
the machine, since it was booted, and in the namespace in which they were read, as containers on one
host count their processes separately.
"""

from __future__ import annotations

import os
from pathlib import Path


def read_start_time(process: int) -> int | None:
    """Return when a process started, in clock ticks since boot.

    None if there is no such process, if it has ended and its parent has not noticed, or on a system
    without /proc.
    """
    try:
        text = Path(f"/proc/{process}/stat").read_text()
    except OSError:
        return None
    # Counted from the closing parenthesis, because the name before it may hold spaces; `rest[18]`
    # is field 22 of proc(5), starttime.
    state, *fields = text.rpartition(")")[2].split()
    return None if state in "ZX" else int(fields[18])


def has_ended(process: int, start: int) -> bool:
    """Return whether the process with this id and start has ended.

    It must be of this `namespace`. Where other users' processes are hidden, one of theirs counts as
    running.
    """
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        pass
    return Path(f"/proc/{process}/stat").exists() and read_start_time(process) != start


def read_namespace() -> str:
    """Return what identifies the boot and the namespace in which this process's id is valid; empty
    if the system does not say."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""
