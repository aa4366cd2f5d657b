"""Connections: the sockets beneath this process's gloo groups: how many there are, and a way to end
all waits on them.

Gloo waits until its timeout and cannot be told to give up: `abort` does nothing for its groups
(torch 2.13). If the sockets beneath it are shut down, all waits end at once, here and on the other
side, with the error of a broken connection. Gloo does not say which sockets are its own, but it is
the only user of sockets here that limits the time of a send in the kernel (`SO_SNDTIMEO`, set to
the timeout of the group once two ranks are connected).
"""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_OPEN = Path("/proc/self/fd")
_LAZY = "TORCH_GLOO_LAZY_INIT"
_TIMEVAL = 16
"""Bytes of a limit of time of a socket."""


@contextmanager
def made_lazily() -> Iterator[None]:
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


def cut() -> None:
    """Shut down all connections of gloo groups in this process."""
    for one in _connected():
        with suppress(OSError):
            one.shutdown(socket.SHUT_RDWR)


def connected() -> int:
    """Return the number of connections of gloo groups in this process."""
    return sum(1 for _ in _connected())


def _connected() -> Iterator[socket.socket]:
    """Yield each connection; none if the system does not list the open files of a process."""
    with suppress(OSError):
        for number in os.listdir(_OPEN):
            with suppress(OSError), _copied(int(number)) as copy:
                if stat.S_ISSOCK(os.fstat(copy).st_mode):
                    one = socket.socket(fileno=copy)
                    try:
                        if any(one.getsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _TIMEVAL)):
                            yield one
                    finally:
                        one.detach()


@contextmanager
def _copied(number: int) -> Iterator[int]:
    """Return a context with a copy of an open file, which cannot become another one meanwhile."""
    copy = os.dup(number)
    try:
        yield copy
    finally:
        os.close(copy)
