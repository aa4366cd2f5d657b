"""Each start of a run sees a fresh store, without the keys of earlier starts."""

import threading
from datetime import timedelta

import pytest
from torch.distributed import HashStore

from megaframe.distributed.rendezvous import find_fresh_store


def start(store, ranks, world, timeout=5.0):
    """Return the store that each of these ranks gets, or None for a rank that gave up."""
    found = {}

    def run(rank):
        try:
            found[rank] = find_fresh_store(store.clone(), rank, world, timeout)
        except RuntimeError:
            found[rank] = None

    threads = [threading.Thread(target=run, args=(rank,)) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


@pytest.mark.parametrize("before", [(), (0, 1, 2), (1, 2), (0, 1)])
def test_what_an_earlier_start_left_is_not_there(before):
    store = HashStore()
    store.set_timeout(timedelta(seconds=0.3))
    if before:
        for left in start(store, before, 3, 0.3).values():
            if left is not None:
                left.set("verdict", "old")
    store.set_timeout(timedelta(seconds=5))
    found = start(store, (2, 1, 0), 3)
    found[1].set("verdict", "new")
    for rank in range(3):
        assert found[rank].get("verdict") == b"new"
    again = start(store, (0, 1, 2), 3)
    assert not again[0].check(["verdict"])
