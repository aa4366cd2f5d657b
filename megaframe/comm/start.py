"""Start: a part of the launcher's store that no earlier start of the run has written into.

A launcher that starts ranks again keeps its store, with all that the dead have left there: verdicts
of the watch, addresses of process groups. How often it has started them it counts on each node for
itself, so no number of its own is known to all ranks; they agree on a name instead.
"""

from __future__ import annotations

import secrets
import time

from torch.distributed import PrefixStore, Store

_PAUSE = 0.02


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
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        if store.check(["start"]):
            name = store.get("start").decode()
            key = f"start/{name}/{rank}"
            store.set(key, mine)
            if store.check([f"{key}/heard"]) and store.get(f"{key}/heard").decode() == mine:
                return PrefixStore(f"start-{name}", store)
        time.sleep(_PAUSE)
    raise RuntimeError(f"rank 0 did not answer within {timeout:g} s")
