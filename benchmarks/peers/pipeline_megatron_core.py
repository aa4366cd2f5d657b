"""megatron-core's GPTModel under its own 1F1B schedule on CPUs, over gloo.

The model is that of `megatron_core.py`. Whatever its schedule and its communication create on the
CUDA device is created on the CPU, and waits for that device do nothing. Layers are divided evenly;
if that is impossible, the first and the last stage get one fewer, which is an option of megatron's.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Iterator
from functools import partial
from importlib.metadata import version
from typing import Any

import torch
import torch.distributed
from megatron.core import parallel_state
from megatron.core.pipeline_parallel.schedules import (
    forward_backward_pipelining_without_interleaving,
)
from megatron_core import build, replace_cuda
from pipeline_workload import MICROBATCHES, clip, make_parser, make_shape
from plain import make_optimizer
from ranks import measure, run
from torch import Tensor, nn
from workload import Workload


def build_stage(shape: Workload, stages: int) -> nn.Module:
    """Return this rank's stage."""
    uneven: dict[str, int] = {}
    if shape.layers % stages:
        each = -(-shape.layers // stages) - 1
        uneven = {
            "num_layers_in_first_pipeline_stage": each,
            "num_layers_in_last_pipeline_stage": each,
        }
    return build(
        shape,
        torch.float32,
        tied=False,
        first=parallel_state.is_pipeline_first_stage(),
        last=parallel_state.is_pipeline_last_stage(),
        pipeline_dtype=torch.float32,
        pipeline_model_parallel_size=stages,
        **uneven,
    )


def compute_mean_loss(losses: list[float], output: Tensor) -> tuple[Tensor, dict[str, Any]]:
    """Return the loss of one microbatch in the form that its schedule expects, and a record of
    it."""
    loss = output.float().mean()
    losses.append(loss.item())
    return loss, {}


def train(arguments: argparse.Namespace) -> None:
    """Run one rank."""
    warnings.filterwarnings("ignore", module="megatron")
    replace_cuda()
    torch.distributed.init_process_group("gloo")
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=arguments.stages)
    shape = make_shape(arguments)
    torch.manual_seed(shape.seed)
    model = build_stage(shape, arguments.stages)
    optimizer = make_optimizer(model, shape)
    generator = torch.Generator().manual_seed(shape.seed)
    samples = shape.batch // MICROBATCHES
    positions = torch.arange(shape.seq).expand(samples, -1)

    def step() -> float | None:
        ids = torch.randint(shape.vocab, (shape.batch, shape.seq + 1), generator=generator)
        losses: list[float] = []

        def forward_step(batch: Iterator[Tensor], model: nn.Module) -> tuple[Tensor, Any]:
            ids = next(batch)
            tokens, targets = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
            return model(tokens, positions, None, labels=targets), partial(
                compute_mean_loss, losses
            )

        forward_backward_pipelining_without_interleaving(
            forward_step_func=forward_step,
            data_iterator=iter(ids.split(samples)),
            model=model,
            num_microbatches=MICROBATCHES,
            seq_length=shape.seq,
            micro_batch_size=samples,
        )
        clip(model, shape.clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return sum(losses) / len(losses) if losses else None

    versions = {"torch": torch.__version__, "megatron-core": version("megatron-core")}
    measure(step, arguments.steps, shape.tokens_per_step, versions)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    arguments = make_parser(__doc__).parse_args()
    run(train, arguments, arguments.stages)
