"""Connections: the sockets beneath this process's gloo groups, and a way to end all waits on them.

Gloo waits until its timeout and cannot be told to give up: `abort` does nothing for its groups
(torch 2.13). If the sockets beneath it are shut down, all waits end at once, here and on the other
side, with the error of a broken connection. Gloo does not say which sockets are its own. They are
found as the sockets that appear while a group is made, except those of the store, whose server may
run in this process and accepts connections at any time.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_OPEN = Path("/proc/self/fd")


class Connections:
    """The gloo sockets of one mesh. store_port: the port on which the store listens."""

    def __init__(self, store_port: int) -> None:
        self._store_port = store_port
        self._known: set[tuple[int, str]] = set()

    @contextmanager
    def made(self) -> Iterator[None]:
        """Return a context in which a group is made, and whose new sockets become known."""
        before = _sockets()
        yield
        self._known |= _sockets() - before

    def cut(self) -> bool:
        """Shut down all known sockets; may be called again. Returns whether any socket is known."""
        for number, name in self._known:
            with suppress(OSError), socket.socket(fileno=os.dup(number)) as one:
                # A number that was closed may belong to another file now. Listening sockets are
                # left alone, because gloo ends the process if it can no longer listen.
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
    """Return number and name of every open socket; empty if the system does not list them."""
    found = set()
    with suppress(OSError):
        for number in os.listdir(_OPEN):
            with suppress(OSError):
                name = os.readlink(_OPEN / number)
                if name.startswith("socket:"):
                    found.add((int(number), name))
    return found
