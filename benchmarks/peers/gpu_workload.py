"""What contenders on a GPU share: a config, random tokens, the clock, and the line that they print.

A step is timed from its tokens on the host to the end of its update. The host's own time is that of
a call that starts on an idle GPU and returns before the GPU is done: how long it takes to launch
everything.
"""

from __future__ import annotations

import argparse
import gzip
import itertools
import json
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "kernels")]

from megaframe.config import RunConfig, load  # noqa: E402
from megaframe.distributed.allocator_settings import configure_allocator  # noqa: E402
from megaframe.metrics.overlap_report import measure_overlap  # noqa: E402

WARMUP = 3
_HOST_STEPS = 7
_DRAWN = 4
_GAPS = 5
_MOST_TRACE = 10_000_000
"""Bytes up to which a trace is kept with the result."""


def read() -> tuple[RunConfig, torch.device, Path | None]:
    """Return the config of the command line, the device to train on, and where to write a trace."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--config", required=True)
    parser.add_argument("--trace", type=Path)
    parser.add_argument("overrides", nargs="*")
    arguments = parser.parse_args()
    configure_allocator()  # for both contenders alike
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return load(arguments.config, arguments.overrides), device, arguments.trace


def make_batches(config: RunConfig, device: torch.device) -> Callable[[], tuple[Tensor, Tensor]]:
    """Return a function that gives the next microbatch of random tokens [B, S] and their
    successors. They are drawn in advance, so that a step's host time does not include a loader's
    work."""
    shape = (config.train.microbatch, config.train.seq + 1)
    generator = torch.Generator().manual_seed(config.run.seed)
    drawn = [
        torch.randint(0, config.model.vocab or 1, shape, generator=generator) for _ in range(_DRAWN)
    ]
    if device.type == "cuda":
        drawn = [words.pin_memory() for words in drawn]
    turns = itertools.cycle(drawn)

    def make() -> tuple[Tensor, Tensor]:
        words = next(turns).to(device, non_blocking=True)
        return words[:, :-1], words[:, 1:]

    return make


def run(
    step: Callable[[], Tensor], config: RunConfig, device: torch.device, made_of: Sequence[str]
) -> dict[str, Any]:
    """Measure steps.

    Args:
        step: Trains one and returns the mean loss of a token.
    """
    wait = make_wait(device)
    first = float(step())
    for _ in range(WARMUP - 1):
        step()
    wait()
    seconds = []
    for _ in range(config.train.steps):
        begun = time.perf_counter()
        step()
        wait()
        seconds.append(time.perf_counter() - begun)
    tokens = config.train.global_batch * config.train.seq
    host = measure_host_seconds(step, device)
    memory = torch.cuda.max_memory_allocated() if device.type == "cuda" else None
    return {
        "tokens_per_second": tokens / statistics.median(seconds),
        "step_seconds": statistics.median(seconds),
        "slowest_step_seconds": max(seconds),
        "host_seconds_per_step": host,
        "memory_bytes": memory,
        "first_loss": first,
        "made_of": list(made_of),
    }


def measure_host_seconds(step: Callable[[], Tensor], device: torch.device) -> float:
    """Return the median time until the call of a step returns that starts on an idle device."""
    wait, hosts = make_wait(device), []
    for _ in range(_HOST_STEPS):
        wait()
        begun = time.perf_counter()
        step()
        hosts.append(time.perf_counter() - begun)
    wait()
    return statistics.median(hosts)


def make_wait(device: torch.device) -> Callable[[], None]:
    """Return a function that waits for the device; a CPU is done when a call returns."""
    return torch.cuda.synchronize if device.type == "cuda" else lambda: None


def profile_steps(
    step: Callable[[], Tensor], device: torch.device, keep: Path | None
) -> dict[str, Any]:
    """Profile two steps, the second launched while the first runs. Return the shares of time in
    which the GPU does nothing or only communicates, and where most of the time goes; nothing
    without a GPU.

    Args:
        keep: Where to write the trace, if it is small.
    """
    if device.type != "cuda":
        return {}
    # Host activity is not recorded, because recording would slow it down.
    with profile(activities=[ProfilerActivity.CUDA]) as running:
        step()
        step()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json.gz"
        running.export_chrome_trace(str(path))
        (overlap,) = measure_overlap(path, _GAPS)
        if keep is not None and path.stat().st_size < _MOST_TRACE:
            keep.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, keep)
        return {
            "gpu_idle": overlap.idle / overlap.span,
            "gpu_exposed_communication": overlap.exposed_communication / overlap.span,
            "gpu_gaps": [asdict(gap) for gap in overlap.gaps],
            "gpu_kernels": find_longest_kernels(path),
        }


def find_longest_kernels(trace: Path, count: int = 15) -> list[dict[str, Any]]:
    """Return the kernels with the most time, each with its share of the time of all kernels and its
    number of calls."""
    with (gzip.open if trace.suffix == ".gz" else open)(trace, "rb") as file:
        events = json.load(file)["traceEvents"]
    ran: dict[str, list[float]] = {}
    for event in events:
        if event.get("ph") == "X" and event.get("cat") == "kernel":
            ran.setdefault(event["name"], []).append(event["dur"] / 1e6)
    total = sum(map(sum, ran.values()))
    longest = sorted(ran.items(), key=lambda kernel: -sum(kernel[1]))[:count]
    return [
        {
            "name": name,
            "seconds": sum(durations),
            "share": sum(durations) / total,
            "calls": len(durations),
        }
        for name, durations in longest
    ]
