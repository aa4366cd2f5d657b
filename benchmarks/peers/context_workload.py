"""Causal attention of one long sample, forward and backward, divided over ranks in zigzag order.

All contenders get the same queries, keys, values and output gradient. Their answer, summed over the
ranks, is the sum of the mean squares of the output and of the three gradients. It takes the place
of the "loss" that must be equal.
"""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class AttentionShape:
    """Attention of one layer on one sample, with as many key/value heads as query heads."""

    heads: int = 8
    width: int = 64
    seed: int = 1234


ATTENTION = AttentionShape()


def make_parser(description: str | None) -> argparse.ArgumentParser:
    """The arguments that every contender takes; a contender may add its own."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--ranks", type=int, required=True, help="context ranks")
    parser.add_argument("--seq", type=int, required=True, help="tokens of the sample")
    parser.add_argument("--precision", choices=("fp32", "bf16"), required=True)
    parser.add_argument("--steps", type=int, required=True, help="timed passes")
    return parser


def draw_own_parts(arguments: argparse.Namespace, rank: int) -> list[Tensor]:
    """Return the queries, keys, values and output gradient of a rank's tokens, [1, S, heads,
    width]."""
    import torch

    generator = torch.Generator().manual_seed(ATTENTION.seed)
    dtype = torch.bfloat16 if arguments.precision == "bf16" else torch.float32
    parts = []
    for _ in range(4):
        shape = (1, arguments.seq, ATTENTION.heads, ATTENTION.width)
        pieces = torch.randn(shape, generator=generator).chunk(2 * arguments.ranks, 1)
        parts.append(torch.cat((pieces[rank], pieces[-1 - rank]), 1).to(dtype))
    return parts


def answer(out: Tensor, *gradients: Tensor) -> float:
    """Return the number on which all contenders must agree. Waits for all ranks."""
    import torch

    squares = torch.stack([x.float().square().sum() for x in (out, *gradients)])
    torch.distributed.all_reduce(squares)
    ranks = torch.distributed.get_world_size()
    return math.fsum((squares / (out.numel() * ranks)).tolist())
