"""What every contender of `train_cpu.py` trains, how it is timed, and the line that it prints.

A step is timed from drawing its batch to the end of the update, and its loss is read, as any
trainer that logs would do. Pure Python, so that it runs in a peer's own interpreter, whatever is
installed there.
"""

from __future__ import annotations

import argparse
import json
import platform
import resource
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

WARMUP_STEPS = 2
"""Steps that are run but not timed: compilation, and first allocation of gradients and state."""


@dataclass(frozen=True)
class Workload:
    """A dense GPT with learned positions, tied embeddings, exact GELU, no biases, no dropout."""

    layers: int = 6
    heads: int = 8
    hidden: int = 512
    ffn: int = 2048
    seq: int = 256
    batch: int = 8
    vocab: int = 50304
    init_std: float = 0.02
    learning_rate: float = 3e-4
    beta1: float = 0.9
    beta2: float = 0.95
    weight_decay: float = 0.1
    clip: float = 1.0
    seed: int = 1234

    @property
    def tokens_per_step(self) -> int:
        """Tokens with a loss in one optimizer step, which is one microbatch."""
        return self.batch * self.seq


WORKLOAD = Workload()


def make_parser(description: str | None) -> argparse.ArgumentParser:
    """The arguments that every contender takes; a contender may add its own."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--precision", choices=("fp32", "bf16"), required=True)
    parser.add_argument("--steps", type=int, required=True, help="timed optimizer steps")
    return parser


def run(step: Callable[[], float], steps: int, versions: Mapping[str, str]) -> None:
    """Call `step` WARMUP_STEPS + `steps` times and print the measurement as one JSON line.

    `step` draws a batch, trains on it and returns its loss. Tokens per second come from the median
    of the timed steps; the loss printed is that of the first step, on initial weights.
    """
    first_loss = step()
    for _ in range(WARMUP_STEPS - 1):
        step()
    seconds = []
    for _ in range(steps):
        start = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - start)
    emit(
        tokens_per_second=WORKLOAD.tokens_per_step / statistics.median(seconds),
        best_tokens_per_second=WORKLOAD.tokens_per_step / min(seconds),
        peak_rss_bytes=read_peak_rss_bytes(resource.RUSAGE_SELF),
        loss=first_loss,
        versions=versions,
    )


def read_peak_rss_bytes(who: int) -> int:
    """Return the largest resident memory of this process (RUSAGE_SELF) or of its largest finished
    child (RUSAGE_CHILDREN), as counted by the kernel.

    A process starts with the peak of the process that launched it. Launchers therefore stay small:
    neither the harness nor a launching contender imports torch.
    """
    kibibytes = resource.getrusage(who).ru_maxrss  # Linux counts in KiB
    return kibibytes * 1024


def emit(
    *,
    tokens_per_second: float,
    best_tokens_per_second: float,
    peak_rss_bytes: int,
    loss: float,
    versions: Mapping[str, str],
    **values: float,
) -> None:
    """Print a measurement as the last line of output, where the harness reads it; `more` are fields
    of its `Outcome` that not every contender knows."""
    line = {
        "tokens_per_second": tokens_per_second,
        "best_tokens_per_second": best_tokens_per_second,
        "peak_rss_bytes": peak_rss_bytes,
        "loss": loss,
        "versions": {"python": platform.python_version(), **versions},
        **values,
    }
    print(json.dumps(line), flush=True)
