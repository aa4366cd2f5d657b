"""Gloo sockets: those beneath this process's gloo groups: how many there are, and a way to end
all waits on them.

Gloo waits until its timeout and cannot be told to give up: `abort` does nothing for its groups
(torch 2.13). If the sockets beneath it are shut down, all waits end at once, here and on the other
side, with the error of a broken connection. Gloo does not say which sockets are its own, but it is
the only user of sockets here that limits the time of a send in the kernel (`SO_SNDTIMEO`, set to
the timeout of the group once two ranks are connected).
"""

from __future__ import annotations

import os
import resource
import socket
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from megaframe.errors import UserError

_FILE_DESCRIPTORS = Path("/proc/self/fd")
_LAZY = "TORCH_GLOO_LAZY_INIT"
_TIMEVAL = 16
"""Bytes of a limit of time of a socket."""


@contextmanager
def connect_lazily() -> Iterator[None]:
    """Return a context in which gloo groups are made without connections. Two ranks of such a group
    connect at their first message, so that a rank never connects to all others unless it sends to
    all of them. The first message waits until the other rank sends or receives, too; this is for
    groups whose members do the same in the same order."""
    before = os.environ.get(_LAZY)
    os.environ[_LAZY] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_LAZY]
        else:
            os.environ[_LAZY] = before


def shut_down_sockets() -> None:
    """Shut down all connections of gloo groups in this process."""
    for connection in _list_sockets():
        with suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)


def count_sockets() -> int:
    """Return the number of connections of gloo groups in this process."""
    return sum(1 for _ in _list_sockets())


def _list_sockets() -> Iterator[socket.socket]:
    """Yield each connection; none if the system does not list the open files of a process."""
    with suppress(OSError):
        for number in os.listdir(_FILE_DESCRIPTORS):
            with suppress(OSError), _duplicate(int(number)) as copy:
                if stat.S_ISSOCK(os.fstat(copy).st_mode):
                    opened = socket.socket(fileno=copy)
                    try:
                        if any(opened.getsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _TIMEVAL)):
                            yield opened
                    finally:
                        opened.detach()


@contextmanager
def _duplicate(number: int) -> Iterator[int]:
    """Return a context with a copy of an open file, which cannot become another one meanwhile."""
    copy = os.dup(number)
    try:
        yield copy
    finally:
        os.close(copy)


_PER_GROUP = 4
"""Files of a gloo group besides its connections: what it listens on and polls (torch 2.13)."""
_RESERVE = 256
"""Files for everything else, such as data, checkpoints, links and logs. What NCCL opens is not
counted; NCCL raises the limit for itself (`setFilesLimit` in its bootstrap.cc)."""


def count_files_of_group(size: int) -> int:
    """Return the files that a rank opens for a gloo group in which all ranks are connected."""
    return size - 1 + _PER_GROUP


def reserve_open_files(needed: int, purpose: str, process: int = 0) -> None:
    """Let a process open `needed` more files than it has open, and some for everything else. The
    soft limit is raised to the hard one if it is too low.

    Args:
        needed: Number of files.
        purpose: What they are for, for the message.
        process: Id of the process, 0 for this one.

    Raises:
        UserError: The hard limit is too low.
    """
    needed += _count_open_files(process) + _RESERVE
    try:
        soft, hard = _read_file_limits(process)
        if resource.RLIM_INFINITY in (soft, hard) or needed <= soft:
            return
        if needed <= hard:
            _set_file_limits(process, (hard, hard))
            return
    except (OSError, AttributeError):  # another user's process, or a system without `prlimit`
        return
    enough = 1 << (needed - 1).bit_length()
    raise UserError(
        f"{purpose} need up to {needed} open files, and the hard limit of "
        f"{f'process {process}' if process else 'this process'} is {hard}. Before the launcher "
        f"starts, raise it: `ulimit -Hn {enough}` in a root shell, LimitNOFILE={enough} in the "
        f"systemd unit of the launcher (slurmd, containerd), or --ulimit nofile={enough}:{enough} "
        "for a container"
    )


def _read_file_limits(process: int) -> tuple[int, int]:
    """Return the soft and the hard limit of a process, 0 for this one."""
    if process:
        return resource.prlimit(process, resource.RLIMIT_NOFILE)
    return resource.getrlimit(resource.RLIMIT_NOFILE)


def _set_file_limits(process: int, limits: tuple[int, int]) -> None:
    """Set the soft and the hard limit of a process, 0 for this one."""
    if process:
        resource.prlimit(process, resource.RLIMIT_NOFILE, limits)
    else:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def _count_open_files(process: int) -> int:
    """Return the number of files that a process has open; 0 if the system does not tell."""
    with suppress(OSError):
        return len(os.listdir(Path("/proc") / (str(process) if process else "self") / "fd"))
    return 0
