"""DeepSpeed's ZeRO on its CPU accelerator, over gloo, with the GPT of `plain.py`.

In bf16 the model has bf16 weights and gradients, which DeepSpeed by default sums over ranks in
bf16; its optimizer keeps fp32 copies. AdamW is torch's fused one, because DeepSpeed's has to be
compiled and needs its weights in host memory apart from the model's. Clipping is DeepSpeed's.
"""

from __future__ import annotations

import argparse
import logging
import os
from typing import Any

os.environ["DS_ACCELERATOR"] = "cpu"

import deepspeed
import torch
from data_workload import draw, make_parser
from plain import PlainGPT, make_optimizer
from ranks import measure, run
from workload import WORKLOAD


def make_settings(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return DeepSpeed's configuration."""
    return {
        "train_micro_batch_size_per_gpu": WORKLOAD.batch // arguments.ranks,
        "gradient_clipping": WORKLOAD.clip,
        "bf16": {"enabled": arguments.precision == "bf16"},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {"stage": arguments.stage},
    }


def train(arguments: argparse.Namespace) -> None:
    """Run one rank."""
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    deepspeed.init_distributed("gloo", auto_mpi_discovery=False, verbose=False)
    torch.manual_seed(WORKLOAD.seed)
    model = PlainGPT(WORKLOAD)
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=make_optimizer(model, WORKLOAD), config=make_settings(arguments)
    )
    torch.manual_seed(WORKLOAD.seed + 1 + torch.distributed.get_rank())

    def step() -> float:
        loss = engine(*draw(WORKLOAD, arguments.ranks))
        engine.backward(loss)
        engine.step()
        return loss.item()

    versions = {"torch": torch.__version__, "deepspeed": deepspeed.__version__}
    measure(step, arguments.steps, WORKLOAD.tokens_per_step, versions)
    engine.destroy()
    torch.distributed.destroy_process_group()


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--stage", type=int, choices=(1, 2, 3), required=True)
    arguments = parser.parse_args()
    run(train, arguments, arguments.ranks)


if __name__ == "__main__":
    main()
