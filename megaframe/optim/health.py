"""Where numbers stopped being finite. Every pass of a stage leaves a sign of health on the device;
nobody looks at it unless an update was refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megaframe.comm import Group, all_reduce

_MICROBATCHES, _STAGES, _RANKS = 1 << 20, 1 << 12, 1 << 22
_HEALTHY = 2 * _MICROBATCHES * _STAGES * _RANKS


@dataclass(frozen=True)
class Sign:
    """Of one pass: the largest absolute value that came of it, a scalar, NaN where there is one."""

    backward: bool
    stage: int
    microbatch: int
    largest: Tensor


def sign(backward: bool, stage: int, microbatch: int, made: Tensor) -> Sign:
    """The sign of a pass that made this tensor."""
    largest = torch.linalg.vector_norm(made, torch.inf)
    return Sign(backward, stage, microbatch, largest)


def first_sick(signs: Sequence[Sign], stages: int, world: Group, device: torch.device) -> str:
    """In words, the first pass of a step whose result was not finite, over all ranks of `world`:
    forward before backward, earlier microbatches first. Each rank gives its own signs."""
    sick = [one for one in signs if not bool(torch.isfinite(one.largest))]
    rank = world.ranks[world.index]
    first = torch.tensor(
        min((_order(one, stages, rank) for one in sick), default=_HEALTHY), device=device
    )
    order = int(all_reduce(first, world, "min").wait())
    if order == _HEALTHY:
        return "every pass was finite, so a sum of gradients was too large"
    order, rank = divmod(order, _RANKS)
    order, way = divmod(order, _STAGES)
    backward, microbatch = divmod(order, _MICROBATCHES)
    kind, stage = ("backward", stages - 1 - way) if backward else ("forward", way)
    return f"first in the {kind} pass of microbatch {microbatch}, stage {stage}, on rank {rank}"


def _order(one: Sign, stages: int, rank: int) -> int:
    """Passes in the order in which a bad value travels, as one number."""
    way = stages - 1 - one.stage if one.backward else one.stage
    return ((one.backward * _MICROBATCHES + one.microbatch) * _STAGES + way) * _RANKS + rank
