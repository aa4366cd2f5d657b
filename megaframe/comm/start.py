"""Start: finds a part of the launcher's store that no earlier start of the run has written to.

A launcher that restarts ranks keeps its store, with everything that dead ranks have left in it:
verdicts of the watch, addresses of process groups. It counts restarts on each node separately, so
there is no restart number that all ranks know. They agree on a random name instead.
"""

from __future__ import annotations

import os
import secrets
import time
from datetime import timedelta

from torch.distributed import PrefixStore, Store, rendezvous

_PAUSES = 0.001, 0.05
"""Seconds between two looks into the store: at first, and at most."""

_stores: dict[tuple[str | None, ...], tuple[Store, int, int]] = {}
"""The stores of this process, by address, port, rank and world."""


def launcher_store(rank: int, world: int, timeout: float) -> tuple[Store, int, int]:
    """Return the store of the launcher, as given by the environment, with the rank and world of
    this process in it.

    The store is kept for the life of the process, so that a later mesh need not connect to it
    again: connecting before the store exists means waits of up to a second between tries.
    Raises `RuntimeError` if the store cannot be reached in time.
    """
    where = (os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT"), str(rank), str(world))
    limit = timedelta(seconds=timeout)
    if where not in _stores:
        _stores[where] = next(rendezvous("env://", rank, world, timeout=limit))
    _stores[where][0].set_timeout(limit)
    return _stores[where]


def fresh_store(store: Store, rank: int, world: int, timeout: float) -> Store:
    """Return the part of the store that belongs to this start.

    Rank 0 publishes a random name. Every other rank answers under that name with a random number of
    its own, and accepts the name once rank 0 repeats the number. A name left by an earlier start
    may be answered too, but nobody repeats that answer.
    Raises `RuntimeError` if not all ranks answer in time.
    """
    mine = secrets.token_hex(8)
    if rank == 0:
        store.set("start", mine)
        for other in range(1, world):
            answer = store.get(f"start/{mine}/{other}")  # blocks until the rank has answered
            store.set(f"start/{mine}/{other}/heard", answer.decode())
        return PrefixStore(f"start-{mine}", store)
    deadline, pause = time.monotonic() + timeout, _PAUSES[0]
    while time.monotonic() < deadline:
        if store.check(["start"]):
            name = store.get("start").decode()
            key = f"start/{name}/{rank}"
            store.set(key, mine)
            if store.check([f"{key}/heard"]) and store.get(f"{key}/heard").decode() == mine:
                return PrefixStore(f"start-{name}", store)
        time.sleep(pause)
        pause = min(2 * pause, _PAUSES[1])
    raise RuntimeError(f"rank 0 did not answer within {timeout:g} s")
