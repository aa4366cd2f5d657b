"""Each start of a run sees a fresh store, without the keys of earlier starts."""

import os
import socket
import threading
from datetime import timedelta

import pytest
from patience import PATIENCE
from torch.distributed import HashStore

from megaframe.distributed.rendezvous import find_fresh_store, get_launcher_store
from megaframe.errors import UserError


def start(store, ranks, world, timeout=PATIENCE):
    """Return the store that each of these ranks gets, or None for a rank that gave up."""
    stores = {}

    def run(rank):
        try:
            stores[rank] = find_fresh_store(store.clone(), rank, world, timeout)
        except RuntimeError:
            stores[rank] = None

    threads = [threading.Thread(target=run, args=(rank,)) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return stores


@pytest.mark.parametrize("before", [(), (0, 1, 2), (1, 2), (0, 1)])
def test_what_an_earlier_start_left_is_not_there(before):
    store = HashStore()
    store.set_timeout(timedelta(seconds=0.3))
    if before:
        for left in start(store, before, 3, 0.3).values():
            if left is not None:
                left.set("verdict", "old")
    store.set_timeout(timedelta(seconds=PATIENCE))
    stores = start(store, (2, 1, 0), 3)
    stores[1].set("verdict", "new")
    for rank in range(3):
        assert stores[rank].get("verdict") == b"new"
    later_stores = start(store, (0, 1, 2), 3)
    assert not later_stores[0].check(["verdict"])


def test_a_busy_port_is_named_with_who_has_it(monkeypatch):
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
        monkeypatch.setenv("MASTER_ADDR", "localhost")
        monkeypatch.setenv("MASTER_PORT", str(port))
        expected = rf"MASTER_PORT={port}: process {os.getpid()} \(.* listens"
        with pytest.raises(UserError, match=expected):
            get_launcher_store(0, 2, timeout=5)
