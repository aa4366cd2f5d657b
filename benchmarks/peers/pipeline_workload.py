"""The workload of `train_cpu.py` on a pipeline, in 4 microbatches and with an untied head."""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import TYPE_CHECKING

from workload import WORKLOAD, Workload

if TYPE_CHECKING:
    from torch import nn

MICROBATCHES = 4


def make_parser(description: str | None) -> argparse.ArgumentParser:
    """The arguments that every contender takes; a contender may add its own."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--stages", type=int, required=True, help="pipeline ranks")
    parser.add_argument("--vocab", type=int, required=True, help="vocabulary size")
    parser.add_argument("--steps", type=int, required=True, help="timed optimizer steps")
    return parser


def make_shape(arguments: argparse.Namespace) -> Workload:
    """Return the model with the requested vocabulary."""
    return replace(WORKLOAD, vocab=arguments.vocab)


def clip(model: nn.Module, largest: float) -> None:
    """Clip the gradients of all ranks by their common norm."""
    import torch
    from torch.nn import utils

    weights = list(model.parameters())
    norm = utils.get_total_norm([p.grad for p in weights if p.grad is not None])
    square = norm.square()
    torch.distributed.all_reduce(square)
    utils.clip_grads_with_norm_(weights, largest, square.sqrt())
