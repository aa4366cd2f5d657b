"""Finds where numbers stopped being finite. Every pass of a stage leaves a sign of its health on
the device, which nobody reads unless an update was refused."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megaframe.distributed.collectives import Group, all_reduce

_MICROBATCHES, _STAGES, _UNITS, _RANKS = 1 << 16, 1 << 12, 1 << 13, 1 << 20
_HEALTHY = 2 * _MICROBATCHES * _STAGES * _UNITS * _RANKS


@dataclass(frozen=True)
class Sign:
    """The sign of one pass: the largest absolute value of its result, a scalar, which is NaN if the
    result has one. block: its number, if it is the pass of one block only; -1 is the embedding."""

    backward: bool
    stage: int
    microbatch: int
    largest: Tensor
    block: int | None = None


def sign(backward: bool, stage: int, microbatch: int, made: Tensor) -> Sign:
    """Return the sign of a pass whose result is `made`."""
    return Sign(backward, stage, microbatch, largest(made))


def largest(made: Tensor) -> Tensor:
    """Return the largest absolute value of a tensor."""
    return torch.linalg.vector_norm(made, torch.inf)


def first_sick(
    signs: Sequence[Sign],
    stages: int,
    world: Group,
    device: torch.device,
    samples: Sequence[Tensor] = (),
) -> str:
    """Describe the first pass of a step whose result was not finite, over all ranks of `world`:
    forward before backward, earlier microbatches first. Each rank gives its own signs. samples: for
    each of a rank's microbatches the numbers of its samples, equally many on all ranks; given by
    all ranks or by none."""
    sick = [one for one in signs if not bool(torch.isfinite(one.largest))]
    rank = world.ranks[world.index]
    first = torch.tensor(
        min((_order(one, stages, rank) for one in sick), default=_HEALTHY), device=device
    )
    order = int(all_reduce(first, world, "min").wait())
    if order == _HEALTHY:
        return "every pass was finite, so a sum of gradients was too large"
    order, rank = divmod(order, _RANKS)
    order, unit = divmod(order, _UNITS)
    order, way = divmod(order, _STAGES)
    backward, microbatch = divmod(order, _MICROBATCHES)
    kind, stage = ("backward", stages - 1 - way) if backward else ("forward", way)
    text = f"first in the {kind} pass of microbatch {microbatch}, stage {stage}"
    if unit < _UNITS - 1:
        block = _UNITS - 4 - unit if backward else unit - 1
        text += ", the embedding" if block < 0 else f", block {block}"
    text += f", on rank {rank}"
    if samples:
        there = rank == world.ranks[world.index]
        numbers = samples[microbatch if there else 0].to(device, copy=True)
        numbers = all_reduce(numbers if there else numbers.zero_(), world).wait()
        text += f", of samples {', '.join(map(str, numbers.tolist()))}"
    return text


def _order(one: Sign, stages: int, rank: int) -> int:
    """Return a number that sorts passes in the order in which a bad value travels; a whole pass
    comes after its blocks."""
    way = stages - 1 - one.stage if one.backward else one.stage
    unit = _UNITS - 1
    if one.block is not None:
        unit = _UNITS - 4 - one.block if one.backward else one.block + 1
    order = (one.backward * _MICROBATCHES + one.microbatch) * _STAGES + way
    return (order * _UNITS + unit) * _RANKS + rank
