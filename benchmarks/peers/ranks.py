"""Runs a contender on several ranks, each a process on this machine or on one of its emulated
hosts, which an environment variable names.

It starts itself once per rank, like `torchrun` but without importing torch, so that the peak memory
of a rank is its own. Steps are timed as on one rank. All ranks finish a step together, because
clipping needs the norm of all their gradients.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from typing import Any

from workload import emit, read_peak_rss_bytes

PLACES = "RANK_PLACES"
"""Environment variable with the hosts of the ranks, as JSON: the address of the first host, and for
each host the prefix of commands that run there. Ranks are divided evenly over hosts."""
WARMUP_STEPS = 1
"""Steps that are not timed. One is enough, because a step here takes seconds."""


def start_ranks(command: Sequence[str], ranks: int) -> list[str]:
    """Run a command once per rank, all at the same time, and return what each printed. Ends the
    program with the error output of the first rank that fails."""
    with closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    address, hosts = json.loads(os.environ.get(PLACES, '["127.0.0.1", [[]]]'))
    world = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": address, "MASTER_PORT": str(port)}
    with ExitStack() as stack:
        files = [stack.enter_context(tempfile.TemporaryFile("w+")) for _ in range(ranks)]
        errors = [stack.enter_context(tempfile.TemporaryFile("w+")) for _ in range(ranks)]
        processes = [
            subprocess.Popen(
                (*hosts[rank * len(hosts) // ranks], *command),
                env={**os.environ, **world, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdout=files[rank],
                stderr=errors[rank],
            )
            for rank in range(ranks)
        ]
        _wait(processes, errors)
        for file in files:
            file.seek(0)
        return [file.read() for file in files]


def _wait(processes: Sequence[subprocess.Popen[bytes]], errors: Sequence[Any]) -> None:
    """Wait until all have ended. If one fails, the others are killed."""
    while any(process.poll() is None for process in processes):
        if any(process.poll() for process in processes):
            break
        time.sleep(0.05)
    failed = [number for number, process in enumerate(processes) if process.poll()]
    for process in processes:
        process.kill()
        process.wait()
    if failed:
        errors[failed[0]].seek(0)
        sys.exit(f"rank {failed[0]} failed:\n{errors[failed[0]].read()[-4000:]}")


def run(
    rank_main: Callable[[argparse.Namespace], None], arguments: argparse.Namespace, ranks: int
) -> None:
    """On a rank, run its part; otherwise start the ranks and print their measurement."""
    if "RANK" in os.environ:
        rank_main(arguments)
        return
    outputs = start_ranks((sys.executable, *sys.argv), ranks)
    lines = [json.loads(output.strip().splitlines()[-1]) for output in outputs]
    measured = next(line for line in lines if line["loss"] is not None)
    emit(**measured, peak_rss_bytes=read_peak_rss_bytes(resource.RUSAGE_CHILDREN))


def measure(
    step: Callable[[], float | None], steps: int, tokens: int, versions: Mapping[str, str]
) -> None:
    """Time `steps` calls of `step` on a rank and print what the launcher reads. The printed loss is
    that of the first step.

    Args:
        step: Draws a batch of `tokens` over all ranks, trains on it, and returns the loss if it
            has it.
    """
    first_loss = step()
    for _ in range(WARMUP_STEPS - 1):
        step()
    seconds = []
    for _ in range(steps):
        start = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - start)
    line = {
        "tokens_per_second": tokens / statistics.median(seconds),
        "best_tokens_per_second": tokens / min(seconds),
        "loss": first_loss,
        "versions": dict(versions),
    }
    print(json.dumps(line), flush=True)
