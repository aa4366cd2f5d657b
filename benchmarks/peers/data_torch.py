"""PyTorch's data parallelism on the GPT of `plain.py`: DistributedDataParallel, with gradients as
views of its buckets, and FSDP2's `fully_shard` of each block and of the rest.

In bf16 DDP uses autocast over fp32 weights, and FSDP2 its own mixed precision with gradients summed
in fp32, as everywhere here. `reshard_after_forward=False` keeps the gathered values until the
backward pass, so they are gathered once; this is FSDP2's stage 2.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.distributed
from data_workload import draw, make_parser
from plain import PlainGPT, make_optimizer
from ranks import measure, run
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from workload import WORKLOAD, Workload

WAYS = ("ddp", "fsdp2", "fsdp3")


def divide(model: PlainGPT, way: str, precision: str) -> nn.Module:
    """Return the model wrapped so that its gradients are averaged over all ranks."""
    if way == "ddp":
        return DistributedDataParallel(model, gradient_as_bucket_view=True)
    low = torch.bfloat16 if precision == "bf16" else None
    policy = MixedPrecisionPolicy(param_dtype=low, reduce_dtype=torch.float32)
    reshard = None if way == "fsdp3" else False  # the default does not reshard the root module
    for block in model.blocks:
        fully_shard(block, mp_policy=policy, reshard_after_forward=reshard)
    fully_shard(model, mp_policy=policy, reshard_after_forward=reshard)
    return model


def step_of(shape: Workload, way: str, precision: str, ranks: int) -> Callable[[], float]:
    """Return a step: it draws a batch, trains on it and returns its loss on this rank."""
    torch.manual_seed(shape.seed)
    model = divide(PlainGPT(shape), way, precision)
    optimizer = make_optimizer(model, shape)
    torch.manual_seed(shape.seed + 1 + torch.distributed.get_rank())

    def make_autocast() -> AbstractContextManager[object]:
        if way == "ddp":
            return torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16")
        return nullcontext()

    def step() -> float:
        tokens, targets = draw(shape, ranks)
        with make_autocast():
            loss = model(tokens, targets)
        loss.backward()
        clip(model, shape.clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=way != "ddp")
        return loss.item()

    return step


def clip(model: nn.Module, largest: float) -> None:
    """Clip at the norm over all ranks, each of which has a part of sharded gradients."""
    parameters = list(model.parameters())
    norm = nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
    if isinstance(norm, DTensor):
        norm = norm.full_tensor()
    nn.utils.clip_grads_with_norm_(parameters, largest, norm)


def train(arguments: argparse.Namespace) -> None:
    """Run one rank."""
    torch.distributed.init_process_group("gloo")
    step = step_of(WORKLOAD, arguments.way, arguments.precision, arguments.ranks)
    measure(step, arguments.steps, WORKLOAD.tokens_per_step, {"torch": torch.__version__})
    torch.distributed.destroy_process_group()


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--way", choices=WAYS, required=True)
    arguments = parser.parse_args()
    run(train, arguments, arguments.ranks)


if __name__ == "__main__":
    main()
