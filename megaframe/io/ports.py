"""Ports of this machine, for ranks that meet on it."""

from __future__ import annotations

import socket


def find_free_port() -> int:
    """Return a port of the loopback interface that nothing uses."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port
