"""Many ranks as threads of one process, each with its real watchdog and a real store."""

import io
import os
import sys
import threading
import time
from collections import Counter
from datetime import timedelta

import torch
import torch.distributed as dist
from patience import PATIENCE

from megaframe.distributed import gloo_sockets, rendezvous, watchdog
from megaframe.distributed.collectives import all_reduce
from megaframe.distributed.failure_verdict import FailureStore
from megaframe.distributed.mesh import Mesh
from megaframe.distributed.rank_progress import RankProgress
from megaframe.distributed.rendezvous import find_fresh_store
from megaframe.distributed.watchdog import Watchdog
from megaframe.errors import LostRanks
from megaframe.layout import Layout


class RequestLog:
    """A store that writes down each request once it is answered, as its kind and first key, and the
    bytes it read."""

    def __init__(self, store):
        self.store, self.asked, self.bytes = store, Counter(), 0

    def clone(self):
        return self

    def __getattr__(self, name):
        def call(*arguments):
            key = arguments[0] if isinstance(arguments[0], str) else arguments[0][0]
            answer = getattr(self.store, name)(*arguments)
            self.asked[name, key] += 1
            self.bytes += len(answer) if isinstance(answer, bytes) else 0
            return answer

        return call


class JudgesClock:
    """The time of watchdogs by how often a judge has looked: it stands still until all ranks have
    reported. So a judge has judged before the others, who wait a little longer, think that it is
    lost, however busy the machine is."""

    TIMES = (0.0, 1.3, 2.45, 2.55, 2.65)
    """Seconds after so many looks. The fourth is between the judge's time and that of others, and
    so is the next, which others see while the judge reads for the last time."""
    TICK = 0.52
    """Seconds of each later look."""

    def __init__(self, stores, reports):
        """Count the looks of the ranks with these stores, and how many of them have reported:
        `reports` has the number that is to come, by key."""
        self._stores, self._reports = stores.values(), reports
        self._lock, self._looks_before = threading.Lock(), 0

    def monotonic(self):
        with self._lock:
            asked = [store.asked for store in self._stores]
            looks = max(requests["check", "answered"] for requests in asked)
            if any(
                sum(requests["append", key] > 0 for requests in asked) < number
                for key, number in self._reports.items()
            ):
                self._looks_before = looks
            looks -= self._looks_before
            last = len(self.TIMES) - 1
            return self.TIMES[min(looks, last)] + self.TICK * max(0, looks - last)

    def sleep(self, seconds):
        time.sleep(seconds)


class TestedWatchdog(Watchdog):
    def _exit(self, verdict, lost=None):
        self.verdict = verdict
        super()._exit(verdict, lost)

    def _dump_stacks(self, verdict):
        """Write nothing: this process has the stacks of many ranks."""


class WaitOverData:
    def describe_wait(self):
        return "all_reduce over data with rank 1"


def end_thread(status):
    raise SystemExit(status)


def connect(port, master=False):
    return dist.TCPStore(
        "127.0.0.1",
        port,
        is_master=master,
        timeout=timedelta(seconds=PATIENCE),
        wait_for_workers=False,
    )


def run_in_threads(call, ranks):
    threads = [threading.Thread(target=call, args=(rank,)) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def start(world):
    """Return the requests of each rank that starts."""
    host = connect(0, master=True)
    counted = {rank: RequestLog(connect(host.port)) for rank in range(world)}
    prefixed, rendezvous.PrefixStore = rendezvous.PrefixStore, lambda prefix, store: prefix
    try:
        run_in_threads(lambda rank: find_fresh_store(counted[rank], rank, world, PATIENCE), counted)
    finally:
        rendezvous.PrefixStore = prefixed
    return [store.asked for store in counted.values()]


def lose(world, victim, fault, dead_judge=False):
    """Lose one rank of a world: kill its watchdog, or let it work on. Returns, for each other rank,
    the verdict's ranks and text, its requests, and the bytes that it read.

    how: `lost` (those in a group with it lose contact) or `late` (every rank waits too long).
    dead_judge: a rank that is lost itself was the first to ask whether it is the judge.
    """
    host = connect(0, master=True)
    layout = Layout(tensor=4, data=world // 4)
    stores = {rank: RequestLog(connect(host.port)) for rank in range(world)}
    leave, os._exit, errors = os._exit, end_thread, sys.stderr
    sys.stderr = io.StringIO()
    if not dead_judge:  # who never looks
        lost = fault == "lost"
        reports = {"answered": world - lost, "lost": (layout.tensor - 1) * lost}
        watchdog.time = JudgesClock(stores, reports)
    progress = {rank: RankProgress() for rank in range(world)}
    if dead_judge:
        assert FailureStore(stores[victim], victim, world).try_become_judge(0)
    try:
        watches = {
            rank: TestedWatchdog(stores[rank], layout, rank, 30.0, progress[rank], lambda: "")
            for rank in range(world)
            if rank != victim or fault == "late"
        }
        for rank, watch in watches.items():
            progress[rank].begin_activity("step 7")
            if rank != victim:
                progress[rank].begin_wait(WaitOverData())
            if fault == "late":
                watch.limit = 0.5
        if fault == "lost":
            group = layout.list_members(victim, "tensor")

            def lose_contact(rank):
                others = [other for other in group if other != rank]
                watches[rank].leave(LostRanks(f"rank {rank} lost contact", others))

            run_in_threads(lose_contact, [rank for rank in group if rank != victim])
        for rank, watch in watches.items():
            if fault == "lost" and rank in group:
                watch._stop.set()  # its working thread has ended the rank
            watch._thread.join()
        return {
            rank: (watch.verdict.ranks, watch.verdict.text, stores[rank].asked, stores[rank].bytes)
            for rank, watch in watches.items()
        }
    finally:
        os._exit, sys.stderr, watchdog.time = leave, errors, time


def make_groups():
    """Return the connections of this rank's gloo groups: after the mesh is made; after a sum over
    the control group of the data ranks; after a group for work beside training has been made, and
    after every rank has told every other something over it. Then what a broken wait raises."""
    from megaframe.distributed.object_collectives import gather_json

    before = gloo_sockets.count_sockets()
    mesh = Mesh(Layout(data=4), device="cpu", timeout=PATIENCE)
    socket_counts = [gloo_sockets.count_sockets() - before]
    all_reduce(torch.ones(()), mesh.data_control_group).wait()
    socket_counts.append(gloo_sockets.count_sockets() - before)
    control_group = mesh.make_control_group()
    socket_counts.append(gloo_sockets.count_sockets() - before)
    texts = gather_json(control_group, "x" * mesh.rank)
    socket_counts.append(gloo_sockets.count_sockets() - before)
    sum_of_all = all_reduce(torch.ones(()), control_group)
    mesh.store.add("counted", 1)
    while mesh.store.add("counted", 0) < 4:
        time.sleep(0.01)
    if mesh.rank == 0:
        gloo_sockets.shut_down_sockets()
    broken = ""
    try:
        sum_of_all.wait()
        all_reduce(torch.ones(()), control_group).wait()
    except LostRanks as lost:
        broken = str(lost)
    mesh.close()
    return socket_counts, texts, broken


class GlooRequestCounter(dist.Store):
    """A store that counts what gloo asks it for; a `get` is two requests, as torch waits first."""

    def __init__(self, store):
        super().__init__()
        self.store, self.requests = store, 0

    def set(self, key, value):
        self.requests += 1
        return self.store.set(key, value)

    def get(self, key):
        self.requests += 2
        return self.store.get(key)

    def wait(self, keys, timeout=timedelta(seconds=PATIENCE)):
        self.requests += 1
        return self.store.wait(keys, timeout)


def count_gloo_requests(lazily, port):
    """Return the requests to the store of one rank for a group of all ranks: when it is made, and
    for a sum over it."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = dist.TCPStore("127.0.0.1", port, world, rank == 0, timeout=timedelta(seconds=PATIENCE))
    counting = GlooRequestCounter(store)
    limit = timedelta(seconds=PATIENCE)
    arguments = {"rank": rank, "world_size": world, "store": counting, "timeout": limit}
    if lazily:
        with gloo_sockets.connect_lazily():
            dist.init_process_group("gloo", **arguments)
    else:
        dist.init_process_group("gloo", **arguments)
    counts = [counting.requests]
    dist.all_reduce(torch.ones(()))
    counts.append(counting.requests - counts[0])
    dist.barrier()
    dist.destroy_process_group()
    store.add("end", 1)
    while rank == 0 and store.add("end", 0) < world:
        time.sleep(0.01)  # it has the store
    return counts
