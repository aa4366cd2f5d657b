"""Times calls on the GPU alone, and the speeds that bound them: of a copy, and of bare products.

Each call starts from empty caches. The GPU waits before it until the host has queued everything.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

_SAMPLES = 10, 100
_SAMPLES_OF_REFERENCE = 3
_SECONDS = 0.15
"""Duration of one timing, if it has room for the least number of samples."""
_CACHE = 2**28
"""Bytes that are written between calls; no chip has a larger cache."""
_HEAD_START = 1_500_000
"""Cycles that the GPU waits before a call, so that the host has queued everything before it begins.
The slowest calls take the host most of a millisecond."""


@dataclass(frozen=True)
class Ceilings:
    """What this GPU reaches: bytes per second of a copy (read plus written), FLOP/s of a
    product."""

    copy: float
    product: float


@dataclass(frozen=True)
class Timing:
    """Seconds of a call on the GPU: median, 10th and 90th percentile."""

    seconds: float
    low: float
    high: float

    @staticmethod
    def from_samples(samples: Sequence[float]) -> Timing:
        tenths = statistics.quantiles(samples, n=10, method="inclusive")
        return Timing(statistics.median(samples), tenths[0], tenths[-1])


@functools.lru_cache
def _cache_filler() -> Any:
    import torch

    return torch.empty(_CACHE, dtype=torch.int8, device="cuda")


def measure_timing(run: Callable[[], Any], dry: bool, few: bool = False) -> Timing:
    """Time a call on the GPU alone, starting from empty caches and without the host's time."""
    if dry:
        begun = time.perf_counter()
        run()
        return Timing(*[time.perf_counter() - begun] * 3)
    import torch

    def sample() -> tuple[Any, Any]:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        _cache_filler().zero_()
        torch.cuda._sleep(_HEAD_START)
        start.record()
        run()
        end.record()
        return start, end

    def read_seconds(events: Sequence[tuple[Any, Any]]) -> list[float]:
        torch.cuda.synchronize()
        return [start.elapsed_time(end) / 1000 for start, end in events]

    for _ in range(0 if few else 2):
        run()
    (about,) = read_seconds([sample()])
    count = _SAMPLES_OF_REFERENCE
    if not few:
        count = min(max(int(_SECONDS / max(about, 1e-6)), _SAMPLES[0]), _SAMPLES[1])
    return Timing.from_samples(read_seconds([sample() for _ in range(count)]))


def measure_ceilings(dry: bool) -> Ceilings:
    """Time a large copy and a large bf16 product of random numbers."""
    size, width = (2**10, 32) if dry else (2**30, 8192)
    flops = 2.0 * width**3
    return Ceilings(2 * size / time_copy(size, dry), flops / time_product((width,) * 3, dry))


@functools.lru_cache
def time_copy(size: int, dry: bool) -> float:
    """Return the seconds of a copy of this many bytes."""
    import torch

    source = torch.randint(0, 256, (size,), dtype=torch.uint8)
    target = torch.empty_like(source)
    return measure_timing(lambda: target.copy_(source), dry).seconds


@functools.lru_cache
def time_product(shape: tuple[int, int, int], dry: bool) -> float:
    """Return the seconds of a bf16 product with these rows, columns and depth."""
    import torch

    rows, columns, depth = shape
    a, b = (torch.randn(count, depth, dtype=torch.bfloat16) for count in (rows, columns))
    return measure_timing(lambda: a @ b.t(), dry).seconds
