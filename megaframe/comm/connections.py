"""Connections: the sockets beneath this process's gloo groups, and how to end every wait on them.

Gloo waits for what does not come until its timeout, and cannot be told to give up: `abort` of its
groups does nothing (torch 2.13). Sockets that are shut down beneath it end all waits at once, here
and on the other side, as errors like those of a connection that broke. Which sockets are gloo's is
not told either: they are those that are there after a group is made, and were not before, but for
those of the store, whose server may be in this process and takes connections at any time.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_OPEN = Path("/proc/self/fd")


class Connections:
    """Those of one mesh. store_port: that on which the store listens."""

    def __init__(self, store_port: int) -> None:
        self._store_port = store_port
        self._known: set[tuple[int, str]] = set()

    @contextmanager
    def made(self) -> Iterator[None]:
        """Within it a group is made."""
        before = _sockets()
        yield
        self._known |= _sockets() - before

    def cut(self) -> bool:
        """Shut them all down, as often as it is called. Returns whether any is known."""
        for number, name in self._known:
            with suppress(OSError), socket.socket(fileno=os.dup(number)) as one:
                # A number that has been closed may be something else by now; and gloo ends the
                # process when it can no longer listen.
                same = os.readlink(_OPEN / str(one.fileno())) == name
                listens = one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
                if same and not listens and self._is_between_ranks(one):
                    one.shutdown(socket.SHUT_RDWR)
        return bool(self._known)

    def _is_between_ranks(self, one: socket.socket) -> bool:
        if one.family not in (socket.AF_INET, socket.AF_INET6):
            return False
        return self._store_port not in (one.getsockname()[1], one.getpeername()[1])


def _sockets() -> set[tuple[int, str]]:
    """Number and name of every open socket; empty where the system does not tell."""
    found = set()
    with suppress(OSError):
        for number in os.listdir(_OPEN):
            with suppress(OSError):
                name = os.readlink(_OPEN / number)
                if name.startswith("socket:"):
                    found.add((int(number), name))
    return found
