"""Where ranks of this machine meet: a free port, who has one that is not, and the variables that
tell them."""

from __future__ import annotations

import errno
import os
import secrets
import socket
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

_LISTENING = "0A"
"""State of a socket that listens, in Linux' tables."""
_MAX_COMMAND = 100
_ANY_PORTS = Path("/proc/sys/net/ipv4/ip_local_port_range")
"""First and last of the ports that Linux gives to whoever asks for any."""
_FIRST_PORT = 10000
"""Few services have one above it, and Linux' own begin at 32768 unless they are set."""
_PORTS_TRIED = 100


def find_free_port() -> int:
    """Return a port of the loopback interface that nothing uses.

    Time passes until the caller listens there. So it is none of those that the system itself gives
    to whoever asks for any port, where they are known and leave others.
    """
    try:
        others = int(_ANY_PORTS.read_text().split()[0]) - _FIRST_PORT
    except OSError:  # not Linux
        others = 0
    for _ in range(_PORTS_TRIED if others >= _PORTS_TRIED else 0):
        port = _FIRST_PORT + secrets.randbelow(others)
        if not is_port_in_use("127.0.0.1", port):
            return port
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        return port


def is_port_in_use(host: str, port: int) -> bool:
    """Return whether a program listens at an address, if that is one of this machine."""
    try:
        socket.create_server((host, port)).close()
    except OSError as error:
        return error.errno == errno.EADDRINUSE
    return False


def describe_listener(port: int) -> str:
    """Return who listens at a port of this machine, for a message: `process 123 (python x.py)`."""
    sockets = {f"socket:[{inode}]" for inode in _list_listening_inodes(port)}
    for process in Path("/proc").glob("[0-9]*") if sockets else ():
        with suppress(OSError):  # it has ended
            if not sockets & set(_list_open_files(process)):
                continue
            words = (process / "cmdline").read_bytes().decode(errors="replace").split("\0")
            return f"process {process.name} ({' '.join(words).strip()[:_MAX_COMMAND]})"
    return "another program"


def _list_open_files(process: Path) -> Iterator[str]:
    """Yield what a process has open, as far as this user may know; `process` is its folder."""
    with suppress(OSError):
        for descriptor in (process / "fd").iterdir():
            with suppress(OSError):  # closed meanwhile
                yield os.readlink(descriptor)


def _list_listening_inodes(port: int) -> Iterator[str]:
    """Yield the inodes of sockets that listen at a port; none without Linux' tables."""
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with suppress(OSError):
            for line in Path(table).read_text().splitlines()[1:]:
                columns = line.split()  # number, address:port, remote, state, ..., inode
                if columns[3] == _LISTENING and int(columns[1].rpartition(":")[2], 16) == port:
                    yield columns[9]


def make_rank_environment(rank: int, world: int, port: int) -> dict[str, str]:
    """Return the variables that torchrun sets for a rank of this machine.

    Args:
        rank: The rank.
        world: Number of ranks, all on this machine.
        port: A port at which they meet.
    """
    variables = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
    return {
        **{name: str(value) for name, value in variables.items()},
        **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)},
    }
