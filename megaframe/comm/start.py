"""Start: a part of the launcher's store that no earlier start of the run has written into.

A launcher that starts ranks again keeps its store, with all that the dead have left there: verdicts
of the watch, addresses of process groups. How often it has started them it counts on each node for
itself, so no number of its own is known to all ranks; they agree on a name instead.
"""

from __future__ import annotations

import os
import secrets
import time
from datetime import timedelta

from torch.distributed import PrefixStore, Store, rendezvous

_PAUSES = 0.001, 0.05
"""Seconds between two looks into the store: the first ones, and the longest."""

_stores: dict[tuple[str | None, ...], tuple[Store, int, int]] = {}
"""Of this process, by where they are and who asks."""


def launcher_store(rank: int, world: int, timeout: float) -> tuple[Store, int, int]:
    """The store of whoever launched this process, as the environment names it, with the rank and
    world of this process in it. One for the life of the process: a later mesh need not find it, and
    who finds it before it is there waits for up to a second before looking again.

    Raises `RuntimeError` when it is not there in time.
    """
    where = (os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT"), str(rank), str(world))
    limit = timedelta(seconds=timeout)
    if where not in _stores:
        _stores[where] = next(rendezvous("env://", rank, world, timeout=limit))
    _stores[where][0].set_timeout(limit)
    return _stores[where]


def fresh_store(store: Store, rank: int, world: int, timeout: float) -> Store:
    """The store of this start. Rank 0 makes up a name, each other rank answers to it with a number
    of its own, and believes the name when rank 0 repeats that number: a name that was left behind
    by another start is answered, too, but nobody repeats the answer.

    Raises `RuntimeError` when not all ranks answer in time.
    """
    mine = secrets.token_hex(8)
    if rank == 0:
        store.set("start", mine)
        for other in range(1, world):
            answer = store.get(f"start/{mine}/{other}")  # waits for it
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
