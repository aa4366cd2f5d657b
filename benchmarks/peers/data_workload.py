"""The workload of `train_cpu.py` with the samples of a step divided over ranks."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from workload import Workload

if TYPE_CHECKING:
    from torch import Tensor


def make_parser(description: str | None) -> argparse.ArgumentParser:
    """The arguments that every contender takes; a contender may add its own."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--ranks", type=int, required=True, help="data ranks")
    parser.add_argument("--precision", choices=("fp32", "bf16"), required=True)
    parser.add_argument("--steps", type=int, required=True, help="timed optimizer steps")
    return parser


def draw(shape: Workload, ranks: int) -> tuple[Tensor, Tensor]:
    """Return tokens and targets [batch, seq] of a rank's samples. Each rank has its own random
    state."""
    import torch

    ids = torch.randint(shape.vocab, (shape.batch // ranks, shape.seq + 1))
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
