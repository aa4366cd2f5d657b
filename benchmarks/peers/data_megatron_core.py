"""megatron-core's DistributedDataParallel and its distributed optimizer on CPUs, over gloo.

The model and the replacements for a CUDA device are those of `megatron_core.py`. In addition, its
buffers ask the weights whether they are CUDA tensors, and are told that they are. Gradients are
reduced in fp32 during the backward pass, as with `--overlap-grad-reduce`. AdamW is torch's fused
one.
"""

from __future__ import annotations

import argparse
import warnings
from importlib.metadata import version
from typing import Any

import torch
import torch.distributed
from data_workload import draw, make_parser
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron_core import build, replace_cuda
from ranks import measure, run
from torch import Tensor
from workload import WORKLOAD


def pose_as_cuda() -> None:
    """Make `Tensor.type()` report a CUDA type."""
    type_of = Tensor.type

    def name(self: Tensor, *args: Any, **kwargs: Any) -> Any:
        if args or kwargs:
            return type_of(self, *args, **kwargs)
        return type_of(self).replace("torch.", "torch.cuda.")

    setattr(Tensor, "type", name)  # noqa: B010


def train(arguments: argparse.Namespace) -> None:
    """Run one rank."""
    warnings.filterwarnings("ignore")
    replace_cuda()
    pose_as_cuda()
    torch.distributed.init_process_group("gloo")
    parallel_state.initialize_model_parallel()
    torch.manual_seed(WORKLOAD.seed)
    low = arguments.precision == "bf16"
    module = build(WORKLOAD, torch.bfloat16 if low else torch.float32)
    buffers = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        overlap_grad_reduce=True,
        use_distributed_optimizer=True,
    )
    model = DistributedDataParallel(module.config, buffers, module)
    options = OptimizerConfig(
        lr=WORKLOAD.learning_rate,
        weight_decay=WORKLOAD.weight_decay,
        adam_beta1=WORKLOAD.beta1,
        adam_beta2=WORKLOAD.beta2,
        clip_grad=WORKLOAD.clip,
        bf16=low,
        params_dtype=torch.bfloat16 if low else torch.float32,
        use_distributed_optimizer=True,
    )
    optimizer = get_megatron_optimizer(options, [model])
    for group in optimizer.param_groups:
        group["fused"] = True
    torch.manual_seed(WORKLOAD.seed + 1 + torch.distributed.get_rank())
    positions = torch.arange(WORKLOAD.seq).expand(WORKLOAD.batch // arguments.ranks, -1)

    def step() -> float:
        model.zero_grad_buffer()
        optimizer.zero_grad()
        tokens, targets = draw(WORKLOAD, arguments.ranks)
        loss = model(tokens, positions, None, labels=targets).float().mean()
        loss.backward()
        model.finish_grad_sync()
        optimizer.step()
        return loss.item()

    versions = {"torch": torch.__version__, "megatron-core": version("megatron-core")}
    measure(step, arguments.steps, WORKLOAD.tokens_per_step, versions)
    torch.distributed.destroy_process_group()


def main() -> None:
    arguments = make_parser(__doc__).parse_args()
    run(train, arguments, arguments.ranks)


if __name__ == "__main__":
    main()
