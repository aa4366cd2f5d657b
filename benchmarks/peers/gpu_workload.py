"""What both contenders on a GPU share: a config, random tokens, the clock, and the line they print.

A step is timed from its tokens on the host to the end of its update. The host's own time is that of
a call that starts on an idle GPU and returns before the GPU is done: what it takes to tell it all.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "kernels")]

from megaframe.config import RunConfig, load  # noqa: E402

WARMUP = 3


def read() -> tuple[RunConfig, torch.device]:
    """The config of the command line, and where to train."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--config", required=True)
    parser.add_argument("overrides", nargs="*")
    given = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return load(given.config, given.overrides), device


def batches(config: RunConfig, device: torch.device) -> Callable[[], tuple[Tensor, Tensor]]:
    """Makes the next microbatch of random tokens [B, S] and what follows each."""
    shape = (config.train.microbatch, config.train.seq + 1)
    generator = torch.Generator().manual_seed(config.run.seed)

    def make() -> tuple[Tensor, Tensor]:
        words = torch.randint(0, config.model.vocab or 1, shape, generator=generator)
        if device.type == "cuda":
            words = words.pin_memory()
        words = words.to(device, non_blocking=True)
        return words[:, :-1], words[:, 1:]

    return make


def run(
    step: Callable[[], Tensor], config: RunConfig, device: torch.device, made_of: Sequence[str]
) -> None:
    """Print what steps take, as one line of JSON. step: gives the mean loss of a token."""
    wait = torch.cuda.synchronize if device.type == "cuda" else _nothing
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
    hosts = []
    for _ in range(WARMUP):
        wait()
        begun = time.perf_counter()
        step()
        hosts.append(time.perf_counter() - begun)
    wait()
    tokens = config.train.global_batch * config.train.seq
    passes = config.train.global_batch // config.train.microbatch * config.model.layers
    memory = torch.cuda.max_memory_allocated() if device.type == "cuda" else None
    line = {
        "tokens_per_second": tokens / statistics.median(seconds),
        "step_seconds": statistics.median(seconds),
        "host_seconds_per_step": statistics.median(hosts),
        "host_seconds_per_block": statistics.median(hosts) / passes,
        "memory_bytes": memory,
        "first_loss": first,
        "made_of": list(made_of),
    }
    print(json.dumps(line))


def _nothing() -> None:
    """A CPU is done when a call returns."""
