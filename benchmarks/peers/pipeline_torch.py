"""`torch.distributed.pipelining` with the blocks of `plain.py`, fused AdamW and clipping.

Layers are split evenly, the larger parts first. In schedules with two stages per rank, stages are
placed as the schedule requires: in a loop, or in a V with the head on the rank of the embedding.
"""

from __future__ import annotations

import argparse
import math

import torch
import torch.distributed
from pipeline_workload import MICROBATCHES, clip, make_parser, make_shape
from plain import PlainBlock, make_optimizer
from ranks import measure, run
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, schedules
from torch.nn import functional
from workload import Workload

CHUNKS = {
    "GPipe": 1,
    "1F1B": 1,
    "Interleaved1F1B": 2,
    "InterleavedZeroBubble": 2,
    "ZBVZeroBubble": 2,
    "DualPipeV": 2,
}
"""Stages per rank of each schedule, by the name of the class in torch without the prefix
Schedule."""
IN_A_V = ("ZBVZeroBubble", "DualPipeV")


class StageModule(nn.Module):
    """Stage `number` of `stages`: some blocks, with the tables before the first and the head after
    the last."""

    def __init__(self, shape: Workload, number: int, stages: int) -> None:
        super().__init__()
        blocks = shape.layers // stages + (number < shape.layers % stages)
        self.first, self.last = number == 0, number == stages - 1
        if self.first:
            self.tokens = nn.Embedding(shape.vocab, shape.hidden)
            self.positions = nn.Embedding(shape.seq, shape.hidden)
        self.blocks = nn.ModuleList(PlainBlock(shape) for _ in range(blocks))
        if self.last:
            self.norm = nn.LayerNorm(shape.hidden, bias=False)
            self.head = nn.Linear(shape.hidden, shape.vocab, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                output = name.endswith(("attention_output.weight", "mlp_down.weight"))
                shrink = math.sqrt(2 * shape.layers) if output else 1.0
                nn.init.normal_(parameter, std=shape.init_std / shrink)

    def forward(self, x: Tensor) -> Tensor:
        """Map token ids [batch, seq] on the first stage, otherwise [batch, seq, hidden], to logits
        on the last stage, otherwise [batch, seq, hidden]."""
        if self.first:
            x = self.tokens(x) + self.positions.weight[: x.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)) if self.last else x


def compute_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross entropy of one microbatch; torch divides gradients by the number of
    microbatches."""
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def train(arguments: argparse.Namespace) -> None:
    """Run one rank."""
    torch.distributed.init_process_group("gloo")
    rank, ranks = torch.distributed.get_rank(), arguments.stages
    shape = make_shape(arguments)
    chunks = CHUNKS[arguments.schedule]
    total = ranks * chunks
    numbers = [rank + ranks * chunk for chunk in range(chunks)]
    if arguments.schedule in IN_A_V:
        numbers = [rank, total - 1 - rank]
    torch.manual_seed(shape.seed + rank)
    parts = nn.ModuleList(StageModule(shape, number, total) for number in numbers)
    device = torch.device("cpu")
    stages = [
        PipelineStage(part, number, total, device)
        for part, number in zip(parts, numbers, strict=True)
    ]
    kind = getattr(schedules, f"Schedule{arguments.schedule}")
    schedule = kind(stages if chunks > 1 else stages[0], MICROBATCHES, loss_fn=compute_loss)
    optimizer = make_optimizer(parts, shape)
    generator = torch.Generator().manual_seed(shape.seed)

    def step() -> float | None:
        ids = torch.randint(shape.vocab, (shape.batch, shape.seq + 1), generator=generator)
        losses: list[Tensor] = []
        takes = (ids[:, :-1].contiguous(),) if 0 in numbers else ()
        if total - 1 in numbers:
            schedule.step(*takes, target=ids[:, 1:].contiguous(), losses=losses)
        else:
            schedule.step(*takes)
        clip(parts, shape.clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return torch.stack(losses).mean().item() if losses else None

    measure(step, arguments.steps, shape.tokens_per_step, {"torch": torch.__version__})
    torch.distributed.destroy_process_group()


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--schedule", choices=tuple(CHUNKS), required=True)
    arguments = parser.parse_args()
    run(train, arguments, arguments.stages)


if __name__ == "__main__":
    main()
