"""How the store and the watchdog behave with thousands of ranks: time to set up, requests to the
store while no rank fails, and the time until every rank knows which rank is lost, hung or slow,
and whether that is right.

Every rank is a client with its real connections to a real store, its real rendezvous
(`distributed/rendezvous.py`), its real progress and its real watchdog; only training is left out.
Hundreds of clients share a process, as threads, so that one machine holds thousands. Rank 0, which
has the store, and the victim have a process each, which is killed or stopped for real. Each fault
has a world of its own:

lost: the victim is killed. Ranks in a group with it lose contact at once; the others wait.
hung: the victim is stopped. Every rank waits, and all give up after `--timeout` seconds.
slow: the victim goes on working while every rank waits, until a step has taken `--timeout` seconds.
store: rank 0 is killed, and the store with it.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn

# A lost answer of the name server, which torch asks about every address, costs a second at most.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
os.environ.setdefault("OMP_NUM_THREADS", "1")

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from harness import describe_measurement
from torch.distributed import PrefixStore, Store

from megaframe.distributed import rendezvous
from megaframe.distributed.failure_verdict import FailureVerdict
from megaframe.distributed.rank_progress import RankProgress
from megaframe.distributed.rendezvous import find_fresh_store, get_launcher_store
from megaframe.distributed.watchdog import Watchdog
from megaframe.errors import LostRanks
from megaframe.io.local_rendezvous import find_free_port
from megaframe.layout import Layout

FAULTS = ("lost", "hung", "slow", "store")
_SETTLED = 3.0
"""Seconds after the set-up before the requests of a quiet run are counted."""
_SLACK = 120.0
"""Seconds that the world may take in all beyond those that are asked for."""
_STACK = 256 * 1024


@dataclass(frozen=True)
class WorldOutcome:
    """Measurements of one world.

    Attributes:
        first: Seconds from when ranks may notice the fault to the first verdict.
        last: The same, to the last one.
        set_up: Seconds until every client was connected, had found its part of the store, and
            had its watchdog.
        quiet: Requests per client and second while no rank fails.
        requests: Requests per client from the fault to the end.
        most: Those of the client with most, which is the judge.
        right: Clients that name the right rank, of how many.
        memory: Bytes of all processes together.
    """

    fault: str
    set_up: float
    quiet: float
    requests: float
    most: int
    first: float
    last: float
    right: int
    of: int
    memory: int


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--clients", type=int, default=4096)
    parser.add_argument("--processes", type=int, default=16, help="that the clients share")
    parser.add_argument("--timeout", type=float, default=20.0, help="parallel.timeout, in seconds")
    parser.add_argument("--quiet", type=float, default=10.0, help="seconds without any fault, or 0")
    parser.add_argument("--faults", nargs="+", choices=FAULTS, default=FAULTS)
    parser.add_argument("--write", type=Path, help="write all measurements as JSON to this file")
    arguments = parser.parse_args()
    outcomes = []
    for fault in arguments.faults:
        outcome = measure(
            fault, arguments.clients, arguments.processes, arguments.timeout, arguments.quiet
        )
        outcomes.append(outcome)
        if len(outcomes) == 1:
            print(f"{arguments.clients} clients, parallel.timeout={arguments.timeout:g} s")
            print(f"{'':8}{'set up':>9}{'quiet':>12}{'named':>17}{'right':>13}{'requests':>20}")
        print(
            f"{fault:8}{outcome.set_up:7.1f} s{outcome.quiet:10.2f}/s"
            f"{outcome.first:7.1f} to {outcome.last:4.1f} s{outcome.right:7} of {outcome.of}"
            f"{outcome.requests:9.1f}, most {outcome.most}  {outcome.memory / 1e9:.1f} GB",
            flush=True,
        )
    print("quiet: requests per client and second; named: seconds from when ranks may notice the")
    print(
        "fault until the first and the last client name it; requests: per client from the fault on"
    )
    if arguments.write:
        document = {
            **describe_measurement(),
            "clients": arguments.clients,
            "timeout": arguments.timeout,
            "outcomes": [asdict(outcome) for outcome in outcomes],
        }
        arguments.write.write_text(json.dumps(document, indent=2) + "\n")
    return 0 if all(outcome.right == outcome.of for outcome in outcomes) else 1


def measure(fault: str, world: int, processes: int, timeout: float, quiet: float) -> WorldOutcome:
    """Run one world with one fault."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(find_free_port()))
    layout = make_layout(world)
    victim = 0 if fault == "store" else world - 3
    alone = {0, victim if victim else world - 3}
    other_ranks = [rank for rank in range(world) if rank not in alone]
    shares = [[rank] for rank in sorted(alone)] + [
        other_ranks[i::processes] for i in range(processes)
    ]
    context = get_context("fork")
    ends, started = [], []
    began = time.monotonic()
    for ranks in shares:
        parent_end, child_end = context.Pipe()
        process = context.Process(target=run_clients, args=(child_end, ranks, layout, timeout))
        process.start()
        ends.append(parent_end)
        started.append((process, ranks))
    try:
        client_processes = _ClientProcesses(ends, time.monotonic() + _SLACK + 2 * timeout + quiet)
        client_processes.receive("ready")
        set_up = time.monotonic() - began
        per_second = client_processes.count_requests(quiet) / world if quiet else 0.0
        memory = sum(_read_memory(process.pid) for process, _ in started if process.pid)
        (victim_process,) = (process for process, ranks in started if victim in ranks)
        assert victim_process.pid is not None
        if fault in ("lost", "store"):
            os.kill(victim_process.pid, signal.SIGKILL)
        elif fault == "hung":
            os.kill(victim_process.pid, signal.SIGSTOP)
        noticed = time.monotonic() + (timeout if fault in ("hung", "slow") else 0)
        stopped_rank = victim if fault != "slow" else None
        for end, (_, ranks) in zip(ends, started, strict=True):
            if stopped_rank not in ranks:
                end.send(("fault", fault, victim, noticed))
        verdicts = [
            v
            for v in client_processes.receive("verdicts", but=stopped_rank, shares=shares)
            for v in v
        ]
    finally:
        for process, _ in started:
            if process.is_alive():
                process.kill()
            process.join()
    times = [at - noticed for _, at, _, _ in verdicts]
    right = sum(ranks == (victim,) for _, _, ranks, _ in verdicts)
    counts = [count for _, _, _, count in verdicts]
    return WorldOutcome(
        fault,
        set_up,
        per_second,
        sum(counts) / len(counts),
        max(counts),
        min(times),
        max(times),
        right,
        world - (fault != "slow"),
        memory,
    )


def make_layout(world: int) -> Layout:
    """Return a layout with 8 tensor and 4 pipeline ranks, or fewer in a small world."""
    tensor = next(size for size in (8, 4, 2, 1) if world % (4 * size) == 0 or size == 1)
    pipeline = 4 if world % (4 * tensor) == 0 else 1
    return Layout(tensor=tensor, pipeline=pipeline, data=world // tensor // pipeline)


class _ClientProcesses:
    """The other ends of the pipes to the processes."""

    def __init__(self, ends: Sequence[Connection], deadline: float) -> None:
        self._ends, self._deadline = ends, deadline

    def receive(
        self, expected_kind: str, but: int | None = None, shares: Sequence[Sequence[int]] = ()
    ) -> list[Any]:
        """Return the message of every process except that of rank `but`."""
        values = []
        for number, end in enumerate(self._ends):
            if but is not None and but in shares[number]:
                continue
            if not end.poll(max(0.0, self._deadline - time.monotonic())):
                raise TimeoutError(f"a process has not sent {expected_kind!r} in time")
            kind, value = end.recv()
            assert kind == expected_kind, (kind, expected_kind)
            values.append(value)
        return values

    def ask(self, kind: str) -> list[Any]:
        """Ask every process and return the answers."""
        for end in self._ends:
            end.send((kind,))
        return self.receive(kind)

    def count_requests(self, seconds: float) -> float:
        """Return the requests a second of all clients, over some seconds without a fault."""
        time.sleep(_SETTLED)
        before = sum(self.ask("count"))
        time.sleep(seconds)
        return float(sum(self.ask("count")) - before) / seconds


# What follows runs in the processes of the clients.


class MeteredStore:
    """A store that counts the requests of one client. `get` is two, because torch first waits."""

    def __init__(self, store: Store, counts: Counter[int], rank: int) -> None:
        self.store, self._counts, self.rank = store, counts, rank

    def clone(self) -> MeteredStore:
        cloned: Store = self.store.clone()  # type: ignore[attr-defined]  # not in torch's stubs
        return MeteredStore(cloned, self._counts, self.rank)

    def __getattr__(self, name: str) -> Any:
        call = getattr(self.store, name)

        def count_request(*arguments: Any) -> Any:
            self._counts[self.rank] += 2 if name == "get" else 1
            return call(*arguments)

        return count_request


class ThreadWatchdog(Watchdog):
    """A watchdog that records when it ends its rank, and with which verdict."""

    judged: tuple[float, tuple[int, ...]]
    has_left = False

    def _exit(self, verdict: FailureVerdict, lost: LostRanks | None = None) -> NoReturn:
        self.judged = time.monotonic(), verdict.ranks
        try:
            super()._exit(verdict, lost)
        finally:
            self.has_left = True

    def _dump_stacks(self, verdict: FailureVerdict) -> None:
        """Write nothing: this process has the stacks of hundreds of ranks."""


class _EndlessWait:
    """A wait of a rank that never ends."""

    def __init__(self, ranks: Sequence[int]) -> None:
        self._ranks = ranks

    def describe_wait(self) -> str:
        return f"all_reduce over data with {len(self._ranks)} ranks"


def run_clients(end: Connection, ranks: Sequence[int], layout: Layout, timeout: float) -> None:
    """Run some ranks of a world in this process, until all of them have a verdict."""
    threading.stack_size(_STACK)
    sys.setswitchinterval(1.0)  # by default every thread that waits for its turn asks every 5 ms
    sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115  # what every rank would print
    counts: Counter[int] = Counter()
    watches: dict[int, tuple[ThreadWatchdog, RankProgress]] = {}
    leave_process = os._exit
    os._exit = _end_of_thread  # a client ends as a thread

    def connect(rank: int) -> None:
        store, *_ = get_launcher_store(rank, layout.world, _SLACK)
        counted = MeteredStore(store, counts, rank)
        fresh_store = find_fresh_store(counted, rank, layout.world, _SLACK)  # type: ignore[arg-type]
        progress = RankProgress()
        watches[rank] = (
            ThreadWatchdog(fresh_store, layout, rank, timeout, progress, lambda: ""),
            progress,
        )

    def make_prefix_store(prefix: str, counted: Any) -> Any:
        return MeteredStore(PrefixStore(prefix, counted.store), counts, counted.rank)

    rendezvous.PrefixStore = make_prefix_store  # type: ignore[assignment,misc]
    _run_at_once(connect, ranks)
    assert watches.keys() == set(ranks), "not all ranks are connected"
    end.send(("ready", None))
    while True:
        kind, *fields = end.recv()
        if kind == "count":
            end.send(("count", sum(counts.values())))
            continue
        before = Counter(counts)
        fault, victim, noticed = fields
        _apply_fault(fault, victim, noticed, watches, layout, timeout)
        while not all(watchdog.has_left for watchdog, _ in watches.values()):
            time.sleep(0.1)
        verdicts = [
            (r, *watchdog.judged, counts[r] - before[r]) for r, (watchdog, _) in watches.items()
        ]
        end.send(("verdicts", verdicts))
        leave_process(0)


def _apply_fault(
    fault: str,
    victim: int,
    noticed: float,
    watches: dict[int, tuple[ThreadWatchdog, RankProgress]],
    layout: Layout,
    timeout: float,
) -> None:
    """Apply a fault to the ranks of this process: they wait, and lose contact when they would in a
    run."""
    groups = [("tensor",), ("data",), ("pipeline",)]
    for rank, (watchdog, progress) in watches.items():
        progress.begin_activity("step 7")
        if fault == "slow":
            watchdog.limit = timeout
        if rank != victim:
            progress.begin_wait(_EndlessWait(layout.list_members(rank, "data")))
        else:
            progress.begin_part("data", None)

    def lose_contact(rank: int) -> None:
        around = [layout.list_members(rank, *axes) for axes in groups]
        group = next((ranks for ranks in around if victim in ranks), around[1])
        time.sleep(max(0.0, noticed - time.monotonic()))
        other_ranks = [other for other in group if other != rank]
        watches[rank][0].leave(LostRanks(f"rank {rank} lost contact", other_ranks))

    def is_grouped_with_victim(rank: int) -> bool:
        return any(victim in layout.list_members(rank, *axes) for axes in groups)

    if fault != "slow":
        _begin(
            lose_contact,
            [rank for rank in watches if fault == "hung" or is_grouped_with_victim(rank)],
        )


def _run_at_once(call: Callable[[int], object], ranks: Collection[int]) -> None:
    for thread in _begin(call, ranks):
        thread.join()


def _begin(call: Callable[[int], object], ranks: Collection[int]) -> list[threading.Thread]:
    threads = [threading.Thread(target=call, args=(rank,), daemon=True) for rank in ranks]
    for thread in threads:
        thread.start()
    return threads


def _end_of_thread(status: int) -> NoReturn:
    raise SystemExit(status)


def _read_memory(process: int) -> int:
    """Return the bytes of a process, with its part of what it shares with others."""
    for line in Path(f"/proc/{process}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return 1024 * int(line.split()[1])
    return 0


if __name__ == "__main__":
    sys.exit(main())
