"""How much the sizes that a cache decides matter on this machine: each halved, doubled, and so on.

Some sizes are constants although caches differ: pieces of results, blocks of scores, chunks of the
head and of the update. Each is tried here around its value on the operation that it serves, all
values in turns, and the table shows the time relative to that of the constant. A constant is good
if no other value is faster than it by more than the spread, and harmless if its neighbours are
equal to it: then a cache of half or twice the size changes nothing.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from harness import Spread, describe_machine, read_commit

from megaframe.architecture import output_head
from megaframe.architecture.spec import Box, Constant, ParamSpec
from megaframe.distributed.collectives import ALONE
from megaframe.distributed.device import tune_host_allocator
from megaframe.model import autotune, loss
from megaframe.ops import cpu_attention, matmul
from megaframe.optim import optimizer_state
from megaframe.optim.state_dtype import MasterCodec
from megaframe.optim.update_rule import UpdateStep
from megaframe.parameters.parameter import PRECISIONS, Parameter

FACTORS = (0.25, 0.5, 1.0, 2.0, 4.0)
Work = Callable[[], object]


def make_head(dtype: torch.dtype) -> Work:
    """The output head with its loss and both gradients: 1,024 tokens, 512 wide, 32,000 words."""
    spec = ParamSpec("head.weight", (32000, 512), Constant(0), role="head")
    weight = Parameter(spec)
    weight.bind(Box((0, 0), spec.shape), lambda: None)
    weight.value = torch.randn(spec.shape).to(dtype)
    weight.grad = torch.zeros(spec.shape)
    hidden, labels = torch.randn(1024, 512).to(dtype), torch.randint(32000, (1024,))
    scale = torch.tensor(1.0, dtype=torch.float64)

    def run() -> None:
        weight.fresh = True
        loss.compute_head_loss(hidden, labels, weight, loss.LossOptions(), scale, ALONE)

    return run


def make_attention(dtype: torch.dtype) -> Work:
    """Causal attention in blocks, forward and backward: 2,048 tokens, 8 heads of 64."""
    query, key, value, d_out = (torch.randn(1, 8, 2048, 64).to(dtype) for _ in range(4))
    how: dict[str, Any] = {"causal": True, "scale": 0.125}

    def run() -> None:
        out, lse = cpu_attention.attend(query, key, value, **how)
        cpu_attention.attend_backward(d_out, query, key, value, out, lse, **how)

    return run


def make_gradient(dtype: torch.dtype) -> Work:
    """The gradient of a matrix of 2,048 by 512 over 2,048 tokens, added to sums in fp32."""
    dy, x = torch.randn(2048, 2048).to(dtype), torch.randn(2048, 512).to(dtype)
    grad = torch.zeros(2048, 512)
    return lambda: matmul.write_weight_gradient(grad, dy, x, add=True)


def make_update(dtype: torch.dtype) -> Work:
    """An update of 16 million elements by the sign of a running mean, which is kept in fp32."""
    weights, grads = torch.randn(1 << 24), torch.randn(1 << 24)
    moments = optimizer_state.Moments(
        weights,
        {"mean": MasterCodec()},
        optimizer_state.MomentStorage(MasterCodec(), MasterCodec()),
    )
    step = UpdateStep(1, 1e-3, divisor=torch.tensor(1.0), skip=torch.tensor(0.0))

    def run() -> None:
        for span, chunk, state in moments.iterate_chunks(weights, step):
            mean = state["mean"].lerp_(grads[span], 0.1)
            chunk.sub_(mean.sign().mul_(1e-3))

    return run


@dataclass(frozen=True)
class CachedSize:
    """A size, and the operation that it serves.

    Attributes:
        name: Of the constant.
        module: That has it.
    """

    name: str
    module: ModuleType
    operation: Callable[[torch.dtype], Work]


CASES = {
    "chunk of the head": CachedSize("MAX_HOST_LOGITS", output_head, make_head),
    "part of a chunk that is in fp32": CachedSize("FP32_PARTS", loss, make_head),
    "piece of a product, head": CachedSize("PIECE_BYTES", matmul, make_head),
    "piece of a product, gradient": CachedSize("PIECE_BYTES", matmul, make_gradient),
    "scores of a block": CachedSize("_SCORES_PER_BLOCK", cpu_attention, make_attention),
    "rows of a block": CachedSize("_QUERIES_PER_BLOCK", cpu_attention, make_attention),
    "blocks of a tile": CachedSize("_MIN_BLOCKS", cpu_attention, make_attention),
    "chunk of an update": CachedSize("_CHUNK", optimizer_state, make_update),
}


@contextmanager
def scale_constant(case: CachedSize, factor: float) -> Iterator[None]:
    """Multiply a constant by a factor for a while; a pair of limits moves together."""
    before = getattr(case.module, case.name)
    pair = isinstance(before, tuple)
    value = tuple(int(x * factor) for x in before) if pair else int(before * factor)
    setattr(case.module, case.name, value)
    try:
        yield
    finally:
        setattr(case.module, case.name, before)


def measure(case: CachedSize, dtype: torch.dtype, rounds: int) -> dict[float, Spread]:
    """Return the time by factor, relative to that of the constant itself in the same round."""
    run = case.operation(dtype)
    run()
    ratios: dict[float, list[float]] = {factor: [] for factor in FACTORS}
    for _ in range(rounds):
        seconds = {}
        for factor in FACTORS:
            with scale_constant(case, factor):
                start = time.perf_counter()
                run()
                seconds[factor] = time.perf_counter() - start
        for factor in FACTORS:
            ratios[factor].append(seconds[factor] / seconds[1.0])
    return {factor: Spread.of(values) for factor, values in ratios.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--precision", nargs="+", choices=("fp32", "bf16"), default=["fp32"])
    parser.add_argument("--write", type=Path, help="write all ratios as JSON to this file")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    tune_host_allocator()
    results: dict[str, dict[str, dict[str, dict[str, float]]]] = {}
    for precision in arguments.precision:
        dtype = PRECISIONS[precision].compute
        routines = autotune.load_or_measure(dtype)[0]
        matmul.use_libraries(dtype, routines.products)
        print(f"\n{precision}, time relative to that of the constant; low and high of rounds")
        print(f"{'':<34}" + "".join(f"{f'x {factor:g}':>18}" for factor in FACTORS))
        for name, case in CASES.items():
            ratios = measure(case, dtype, arguments.rounds)
            cells = (f"{r.median:.2f} ({r.low:.2f}-{r.high:.2f})" for r in ratios.values())
            print(f"{name:<34}" + "".join(f"{cell:>18}" for cell in cells), flush=True)
            by_factor = {f"{factor:g}": asdict(ratio) for factor, ratio in ratios.items()}
            results.setdefault(precision, {})[name] = by_factor
    if arguments.write:
        document = {
            "commit": read_commit(),
            "machine": describe_machine(),
            "threads": arguments.threads,
            **results,
        }
        arguments.write.write_text(json.dumps(document, indent=2) + "\n")


if __name__ == "__main__":
    main()
