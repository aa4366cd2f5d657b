"""Open files: whether a process may open as many as its connections need.

A rank that runs out of them fails in the middle of making groups, with an error that no other rank
understands. So they are counted before anything is connected.
"""

from __future__ import annotations

import os
import resource
from contextlib import suppress
from pathlib import Path

from megaframe.errors import UserError

_PER_GROUP = 4
"""Files of a gloo group besides its connections: what it listens on and polls (torch 2.13)."""
_RESERVE = 256
"""Files for everything else, such as data, checkpoints, links and logs. What NCCL opens is not
counted; NCCL raises the limit for itself (`setFilesLimit` in its bootstrap.cc)."""


def of_group(size: int) -> int:
    """Return the files that a rank opens for a gloo group in which all ranks are connected."""
    return size - 1 + _PER_GROUP


def make_room(needed: int, what: str, process: int = 0) -> None:
    """Let a process open `needed` more files than it has open, and some for everything else. The
    soft limit is raised to the hard one if it is too low.

    what: what they are for, for the message.
    process: id of the process, 0 for this one.
    Raises `UserError` if the hard limit is too low.
    """
    needed += _opened(process) + _RESERVE
    try:
        soft, hard = _limits(process)
        if resource.RLIM_INFINITY in (soft, hard) or needed <= soft:
            return
        if needed <= hard:
            _limits(process, (hard, hard))
            return
    except (OSError, AttributeError):  # another user's process, or a system without `prlimit`
        return
    enough = 1 << (needed - 1).bit_length()
    raise UserError(
        f"{what} need up to {needed} open files, and the hard limit of "
        f"{f'process {process}' if process else 'this process'} is {hard}. Before the launcher "
        f"starts, raise it: `ulimit -Hn {enough}` in a root shell, LimitNOFILE={enough} in the "
        f"systemd unit of the launcher (slurmd, containerd), or --ulimit nofile={enough}:{enough} "
        "for a container"
    )


def _limits(process: int, wanted: tuple[int, int] | None = None) -> tuple[int, int]:
    """Return the soft and hard limit of a process, after setting them to `wanted`."""
    if process:
        return resource.prlimit(process, resource.RLIMIT_NOFILE, *([wanted] if wanted else []))
    if wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, wanted)
    return resource.getrlimit(resource.RLIMIT_NOFILE)


def _opened(process: int) -> int:
    """Return the number of files that a process has open; 0 if the system does not tell."""
    with suppress(OSError):
        return len(os.listdir(Path("/proc") / (str(process) if process else "self") / "fd"))
    return 0
