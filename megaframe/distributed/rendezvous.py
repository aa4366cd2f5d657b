"""Rendezvous: finds a part of the launcher's store that no earlier start of the run has written to.

A launcher that restarts ranks keeps its store, with everything that dead ranks have left in it:
verdicts of watchdogs, addresses of process groups. It counts restarts on each node separately, so
there is no restart number that all ranks know. They agree on a random name instead.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Iterator
from datetime import timedelta

from torch.distributed import DistNetworkError, PrefixStore, Store, rendezvous

from megaframe.distributed.failure_verdict import compute_polling_interval
from megaframe.distributed.rank_progress import name_ranks
from megaframe.errors import UserError
from megaframe.io.local_rendezvous import describe_listener

_PAUSE_RANGE = 0.001, 0.005
"""Seconds between two looks into the store: at first, and at most, unless there are very many
ranks."""
_REQUESTS = 4
"""Requests of a rank that looks whether rank 0 has heard it."""

_stores: dict[tuple[str | None, ...], tuple[Store, int, int]] = {}
"""The stores of this process, by address, port, rank and world."""


def is_store_at_agent() -> bool:
    """Return whether the launcher's agent on the first node holds the store, and not rank 0."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def get_launcher_store(rank: int, world: int, timeout: float) -> tuple[Store, int, int]:
    """Return the store of the launcher, as given by the environment, with the rank and world of
    this process in it.

    The store is kept for the life of the process, so that a later mesh need not connect to it
    again: connecting before the store exists means waits of up to a second between tries.

    Args:
        rank: The rank of this process.
        world: Number of ranks.
        timeout: Limit of every request to the store, in seconds.

    Raises:
        UserError: If this rank should hold the store, and another program has its port.
        RuntimeError: If the store cannot be reached in time.
    """
    where = (os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT"), str(rank), str(world))
    limit = timedelta(seconds=timeout)
    if where not in _stores:
        try:
            _stores[where] = next(rendezvous("env://", rank, world, timeout=limit))
        except DistNetworkError as error:
            if "EADDRINUSE" not in str(error):
                raise
            port = os.environ["MASTER_PORT"]
            raise UserError(
                f"MASTER_PORT={port}: {describe_listener(int(port))} listens at this port, where "
                f"the ranks should meet; set another one for all ranks"
            ) from None
    _stores[where][0].set_timeout(limit)
    return _stores[where]


def find_fresh_store(store: Store, rank: int, world: int, timeout: float) -> Store:
    """Return the part of the store that belongs to this start.

    Rank 0 publishes a random name. Every other rank answers under that name with a random number of
    its own, and accepts the name once rank 0 repeats the number. A name left by an earlier start
    may be answered too, but nobody repeats that answer. All answers are in one key, which rank 0
    alone reads, and it repeats all of them in one request: what the store has to do is proportional
    to the number of ranks.

    Args:
        store: The launcher's store, which an earlier start may have used.
        rank: The rank of this process.
        world: Number of ranks.
        timeout: Seconds within which all ranks must answer.

    Raises:
        RuntimeError: If not all ranks answer in time; on rank 0 it names those that do not.
    """
    token = secrets.token_hex(8)
    if rank == 0:
        return _collect_answers(store, token, world, timeout)
    answered = ""
    for pause in _poll_pauses(timeout, _REQUESTS * world):
        name = store.get("start").decode() if store.check(["start"]) else ""
        if name != answered:
            # Like `multi_set`, not in torch's stubs.
            store.append(_make_answer_key(name), f"{rank} {token}\n")  # type: ignore[attr-defined]
            answered = name
        heard = _make_heard_key(name, rank)
        if name and store.check([heard]) and store.get(heard).decode() == token:
            return PrefixStore(f"start-{name}", store)
        time.sleep(pause)
    raise RuntimeError(f"rank 0 did not answer within {timeout:g} s")


def _collect_answers(store: Store, name: str, world: int, timeout: float) -> Store:
    """Do rank 0's part of `find_fresh_store`."""
    other_ranks = range(1, world)
    answers: dict[int, str] = {}
    store.set("start", name)
    for pause in _poll_pauses(timeout, 1):
        answers = _read_answers(store, name)
        if answers.keys() >= set(other_ranks):
            keys = [_make_heard_key(name, rank) for rank in other_ranks]
            store.multi_set(keys, [answers[rank] for rank in other_ranks])  # type: ignore[attr-defined]
            return PrefixStore(f"start-{name}", store)
        time.sleep(pause)
    missing = [rank for rank in other_ranks if rank not in answers]
    raise RuntimeError(f"{name_ranks(missing)} did not answer within {timeout:g} s")


def _poll_pauses(timeout: float, requests: int) -> Iterator[float]:
    """Yield the seconds to pause before the next look into the store, twice as long each time.

    Args:
        timeout: Seconds after which no more pauses come.
        requests: How many requests the looks of all ranks make.
    """
    deadline, pause = time.monotonic() + timeout, _PAUSE_RANGE[0]
    while time.monotonic() < deadline:
        yield min(pause, compute_polling_interval(_PAUSE_RANGE[1], requests))
        pause *= 2


def _read_answers(store: Store, name: str) -> dict[int, str]:
    """Return the number of each rank that has answered to a name."""
    key = _make_answer_key(name)
    lines = store.get(key).decode().splitlines() if store.check([key]) else []
    return {int(rank): number for rank, number in map(str.split, lines)}


def _make_answer_key(name: str) -> str:
    return f"start/{name}/answered"


def _make_heard_key(name: str, rank: int) -> str:
    return f"start/{name}/{rank}"
