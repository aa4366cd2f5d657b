"""All-reduces message by message on emulated hosts, beside what alpha, beta and gamma say of them.

Each algorithm is a list of rounds of messages (`planner/theory/message_rounds.py`), which the ranks
send to each other over gloo. Alpha and beta are measured before with single messages, gamma by
adding buffers, so the times of the algorithms are predicted, not fitted. Links of a lab have a rate
and hardly a latency, so every sender waits before each message (`--latency`), as it would with
netem in the kernel. They let the first 128 KB pass at once, so parts of a buffer should be larger.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from harness import describe_measurement
from lab_ranks import open_hosts, start_ranks

from megaframe.planner.collective_times import ALGORITHMS, GroupLevel
from megaframe.planner.kernel_times import fit_line
from megaframe.planner.theory.crossover import find_crossover
from megaframe.planner.theory.message_rounds import ROUNDS, RoundMessage

if TYPE_CHECKING:
    import torch

_BYTES = 4


def main() -> None:
    """Measure, print, and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=4, help="a power of two")
    parser.add_argument("--link", default="100mbit", help="of each emulated host")
    parser.add_argument("--latency", type=float, default=200.0, help="ms before each message")
    parser.add_argument("--smallest", type=int, default=2**20, help="bytes")
    parser.add_argument("--largest", type=int, default=2**23, help="bytes")
    parser.add_argument("--rounds", type=int, default=5, help="measurements of each size")
    parser.add_argument("--write", type=Path, help="write all measurements as JSON to this file")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank is not None:
        print(json.dumps(measure(arguments)))
        return
    measured = run_ranks(arguments)
    show(measured, arguments)
    if arguments.write:
        document = {
            **describe_measurement(),
            "ranks": arguments.ranks,
            "link": arguments.link,
            "latency ms": arguments.latency,
            "rounds": arguments.rounds,
            **measured,
        }
        arguments.write.write_text(json.dumps(document, indent=2) + "\n")
        print(f"wrote {arguments.write}")


def run_ranks(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return what the first of all ranks measured, each on a host of a lab."""
    options = ("ranks", "latency", "smallest", "largest", "rounds")
    command = [__file__, *(f"--{name}={getattr(arguments, name)}" for name in options)]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))  # so that hosts are removed
    with open_hosts(arguments.ranks, arguments.link) as hosts:
        answer = start_ranks(hosts, command)[0]
    found: dict[str, Any] = json.loads(answer.splitlines()[-1])
    return found


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return alpha, beta and gamma, and the seconds of each algorithm by size, of the slowest
    rank."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    sizes = [arguments.smallest]
    while sizes[-1] * 2 <= arguments.largest:
        sizes.append(sizes[-1] * 2)
    latency, rounds = arguments.latency / 1e3, arguments.rounds
    hops = [time_slowest(partial(pass_on, size, latency), rounds) for size in sizes]
    alpha, beta, error = fit_line(sizes, hops)
    added = [time_slowest(partial(add, size), rounds) for size in sizes]
    _, gamma, _ = fit_line(sizes, added)
    seconds = {}
    for name, make in ROUNDS.items():
        messages = list(make(arguments.ranks))
        seconds[name] = [
            time_slowest(partial(play, messages, torch.ones(size // _BYTES), latency), rounds)
            for size in sizes
        ]
    dist.destroy_process_group()
    figures = {"alpha": alpha, "beta": beta, "gamma": gamma, "error": error}
    return {**figures, "sizes": sizes, "hops": hops, "seconds": seconds}


def pass_on(size: int, latency: float) -> None:
    """Send a message from each rank to the next one."""
    import torch

    count = int(os.environ["WORLD_SIZE"])
    messages = tuple(
        RoundMessage(rank, (rank + 1) % count, 0, count, False) for rank in range(count)
    )
    play([messages], torch.ones(size // _BYTES), latency)


def add(size: int) -> None:
    """Add a buffer to another one."""
    import torch

    torch.ones(size // _BYTES).add_(torch.ones(size // _BYTES))


def play(rounds: Sequence[Sequence[RoundMessage]], buffer: torch.Tensor, latency: float) -> None:
    """Send and receive this rank's messages of each round, and add what arrives.

    Args:
        rounds: The messages of all ranks.
        buffer: This rank's.
        latency: Seconds before each message is sent.
    """
    import torch
    import torch.distributed as dist

    rank = dist.get_rank()
    part = len(buffer) // dist.get_world_size()
    for messages in rounds:
        mine = [each for each in messages if rank in (each.source, each.destination)]
        waits, arrivals = [], []
        # Receives are posted first, so that no sender waits for more than the link.
        for message in sorted(mine, key=lambda each: each.source == rank):
            span = buffer[message.first * part : message.last * part]
            if message.source == rank:
                time.sleep(latency)
                waits.append(dist.isend(span, message.destination))
            else:
                arrivals.append((message, span, torch.empty_like(span)))
                waits.append(dist.irecv(arrivals[-1][2], message.source))
        for work in waits:
            if work is not None:
                work.wait()
        for message, span, arrived in arrivals:
            span.add_(arrived) if message.adds else span.copy_(arrived)


def time_slowest(work: Callable[[], None], rounds: int) -> float:
    """Return the median over rounds of the seconds of the slowest rank, after an uncounted one."""
    import torch
    import torch.distributed as dist

    samples = []
    for _ in range(rounds + 1):
        dist.barrier()
        start = time.perf_counter()
        work()
        elapsed = torch.tensor(time.perf_counter() - start, dtype=torch.float64)
        dist.all_reduce(elapsed, dist.ReduceOp.MAX)
        samples.append(float(elapsed))
    return statistics.median(samples[1:])


def show(measured: dict[str, Any], arguments: argparse.Namespace) -> None:
    """Print measured and predicted times, and where ring and tree cross in both."""
    alpha, beta, gamma = (float(measured[name]) for name in ("alpha", "beta", "gamma"))
    level = GroupLevel(float(arguments.ranks), alpha, 1 / beta, gamma=gamma)
    print(
        f"alpha {alpha * 1e3:.1f} ms, 1 / beta {1e-6 / beta:.2f} MB/s, "
        f"gamma {gamma * 1e9:.3f} ns a byte"
    )
    print(f"{'bytes':>12}" + "".join(f"{name:>28}" for name in ROUNDS))
    sizes, seconds = measured["sizes"], measured["seconds"]
    for number, size in enumerate(sizes):
        cells = []
        for name in ROUNDS:
            took = seconds[name][number]
            predicted = float(ALGORITHMS["all_reduce"][name](size, [level]))
            cells.append(f"{took:>10.2f} s ({predicted:6.2f}, {predicted / took - 1:+.0%})")
        print(f"{size:>12}" + "".join(f"{cell:>28}" for cell in cells))
    crossing = find_crossover("all_reduce", "binomial", "ring", [level])
    print(f"a ring is faster than a tree from {crossing or 0:.0f} bytes, by the formulas")


if __name__ == "__main__":
    main()
