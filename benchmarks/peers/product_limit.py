"""The limit of the workload: its matrix products alone, each by the fastest routine here.

Nothing else of a step is computed: no norms, no activations, no softmax, no update. A product is
measured with operands in place and, for bf16, also with fp32 operands, where a processor without
bf16 instructions is faster. The limit is what a trainer would reach whose everything else is free.
"""

from __future__ import annotations

import math
import resource
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor
from workload import WORKLOAD, Workload, emit, make_parser, read_peak_rss_bytes

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from megaframe.ops import matmul

_TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def list_products(work: Workload) -> Iterator[tuple[int, int, int, int, float]]:
    """Yield matrices, rows, inner, columns and how often a step multiplies them. Those of attention
    count half, because half of the scores of a causal mask are not needed."""
    rows, wide, heads = work.tokens_per_step, work.hidden, work.batch * work.heads
    layers = [(3 * wide, wide), (wide, wide), (work.ffn, wide), (wide, work.ffn)]
    for outputs, inputs, times in [(*shape, work.layers) for shape in layers] + [
        (work.vocab, wide, 1)
    ]:
        yield 1, rows, inputs, outputs, times
        yield 1, rows, outputs, inputs, times
        yield 1, outputs, rows, inputs, times
    length, width = work.seq, work.hidden // work.heads
    yield heads, length, width, length, 3 * work.layers / 2
    yield heads, length, length, width, 4 * work.layers / 2


def list_candidates(left: Tensor, right: Tensor) -> Iterator[Callable[[], object]]:
    """Yield the routines that multiply [H, M, K] by [H, K, N]."""
    if len(left) > 1:
        yield lambda: torch.bmm(left, right)
        if left.dtype is not torch.float32:
            wide = left.float(), right.float()
            yield lambda: torch.bmm(*wide)
        return
    for library in matmul.list_libraries(left.dtype):
        kind = torch.float32 if library.startswith("fp32-") else left.dtype
        operands = left[0].to(kind), right[0].to(kind)
        plain: matmul.MatmulLibrary = "onednn" if library.endswith("onednn") else "torch"
        yield lambda operands=operands, plain=plain: matmul._multiply_by(plain, *operands)  # type: ignore[misc]


def measure_seconds(left: Tensor, right: Tensor, rounds: int) -> float:
    """Return the median seconds of the fastest routine."""
    every: list[float] = []
    for run in list_candidates(left, right):
        run()
        times = []
        for _ in range(rounds):
            start = time.perf_counter()
            run()
            times.append(time.perf_counter() - start)
            if every and times[0] > 3 * min(every):
                break
        every.append(statistics.median(times))
    return min(every)


def main() -> None:
    arguments = make_parser(__doc__).parse_args()
    dtype, total = _TYPES[arguments.precision], 0.0
    for heads, rows, inner, columns, times in list_products(WORKLOAD):
        left = torch.randn(heads, rows, inner).to(dtype)
        right = torch.randn(heads, columns, inner).to(dtype).mT
        total += times * measure_seconds(left, right, arguments.steps)
    speed = WORKLOAD.tokens_per_step / total
    emit(
        tokens_per_second=speed,
        best_tokens_per_second=speed,
        peak_rss_bytes=read_peak_rss_bytes(resource.RUSAGE_SELF),
        loss=math.log(WORKLOAD.vocab),  # nothing is trained, and nothing can be wrong with it
        versions={"torch": torch.__version__},
    )


if __name__ == "__main__":
    main()
