"""One layer of experts, forward and backward: a router, its choice, gated MLPs, and their sum.

All contenders get the same tokens, weights and output gradient. Their answer is the sum of the mean
squares of the output and of each gradient. It takes the place of the "loss" that must be equal.
"""

from __future__ import annotations

import argparse
import json
import math
import resource
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class ExpertsShape:
    """Each of `tokens` tokens of width `hidden` goes to `top_k` of `experts` experts of `width`."""

    tokens: int
    hidden: int
    width: int
    experts: int
    top_k: int


SHAPES = {
    "mixtral": ExpertsShape(2048, 512, 1792, 8, 2),
    "fine-grained": ExpertsShape(2048, 512, 256, 64, 6),
}
"""Mixtral's ratio of widths, and many narrow experts as in DeepSeek-V3 and Qwen3."""
WARM_UP = 30
"""Passes before those that count. oneDNN prepares a routine for every number of rows, and after so
many passes most of those that occur have occurred."""
_STD = 0.03


def make_parser(description: str | None) -> argparse.ArgumentParser:
    """The arguments that every contender takes."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--shape", choices=SHAPES, required=True)
    parser.add_argument("--precision", choices=("fp32", "bf16"), required=True)
    parser.add_argument("--steps", type=int, required=True, help="timed passes")
    return parser


@dataclass(frozen=True)
class ExpertsInputs:
    """x, d_out [tokens, hidden]; router [experts, hidden]; up [experts, 2 * width, hidden], the
    gates first; down [experts, hidden, width]."""

    x: Tensor
    d_out: Tensor
    router: Tensor
    up: Tensor
    down: Tensor


def draw_tensors(shape: ExpertsShape, precision: str) -> ExpertsInputs:
    """Return the numbers, which are the same for all contenders."""
    import torch

    generator = torch.Generator().manual_seed(1234)
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32

    def draw_normal(*size: int, std: float = 1.0) -> Tensor:
        return (torch.randn(size, generator=generator) * std).to(dtype)

    rows, matrices = (shape.tokens, shape.hidden), (shape.experts, 2 * shape.width, shape.hidden)
    return ExpertsInputs(
        draw_normal(*rows),
        draw_normal(*rows),
        draw_normal(shape.experts, shape.hidden, std=_STD),
        draw_normal(*matrices, std=_STD),
        draw_normal(shape.experts, shape.hidden, shape.width, std=_STD),
    )


def read_peak_bytes() -> int:
    """Return the largest memory of this process so far, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def answer(*results: Tensor | None) -> float:
    """Return the number on which all contenders must agree.

    Args:
        results: The output, and the gradients as parameters hold them; None, which is a
            gradient that was never computed, is an error.
    """
    squares = []
    for result in results:
        assert result is not None, "a gradient was not computed"
        squares.append(float(result.float().square().mean()))
    return math.fsum(squares)


def measure_seconds(
    work: Callable[[], object], passes: int, x: Tensor | None = None, warm_up: int = 2
) -> list[float]:
    """Return the times of passes.

    Args:
        work: A pass.
        passes: How many count.
        x: The tokens of a pass. Every pass gets others, so that the loads of experts differ from
            pass to pass, as in training; afterwards x is what it was. None if they need not.
        warm_up: How many passes come first and do not count.
    """
    import torch

    kept = None if x is None else x.detach().clone()
    generator = torch.Generator().manual_seed(4321)
    seconds = []
    for _ in range(warm_up + passes):
        if x is not None:
            x.data = torch.randn(x.shape, generator=generator).to(x.dtype)
        start = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - start)
    if x is not None and kept is not None:
        x.data = kept
    return seconds[warm_up:]


def report(
    shape: ExpertsShape,
    seconds: list[float],
    peak_rss_bytes: int,
    loss: float,
    versions: Mapping[str, str],
    overhead: float | None = None,
) -> None:
    """Print the measurement as the harness reads it.

    Args:
        peak_rss_bytes: Of the passes, before their results are combined for the comparison.
    """
    results = {
        "tokens_per_second": shape.tokens / statistics.median(seconds),
        "best_tokens_per_second": shape.tokens / min(seconds),
        "peak_rss_bytes": peak_rss_bytes,
        "loss": loss,
        "versions": dict(versions),
        "overhead": overhead,
    }
    print(json.dumps(results))
