"""The workload of `train_cpu.py` with its matrices divided over ranks."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def make_parser(description: str | None) -> argparse.ArgumentParser:
    """The arguments that every contender takes; a contender may add its own."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--ranks", type=int, required=True, help="tensor ranks")
    parser.add_argument("--precision", choices=("fp32", "bf16"), required=True)
    parser.add_argument("--steps", type=int, required=True, help="timed optimizer steps")
    return parser


def clip(divided: Sequence[Tensor], replicated: Sequence[Tensor], largest: float) -> None:
    """Clip gradients by the norm over all ranks. Each rank has a part of the divided ones, and all
    have the same whole ones."""
    import torch
    from torch.nn import utils

    square = utils.get_total_norm(divided).square()
    torch.distributed.all_reduce(square)
    norm = (square + utils.get_total_norm(replicated).square()).sqrt()
    torch._foreach_mul_([*divided, *replicated], (largest / (norm + 1e-6)).clamp(max=1.0))
