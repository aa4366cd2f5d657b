"""Where ranks of this machine meet: a free port, and the variables that tell them."""

from __future__ import annotations

import socket


def find_free_port() -> int:
    """Return a port of the loopback interface that nothing uses."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


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
