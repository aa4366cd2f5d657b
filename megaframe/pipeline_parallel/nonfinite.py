"""Finds where numbers stopped being finite. Every pass of a stage leaves the largest magnitude of
its result on the device, which nobody reads unless an update was refused."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megaframe.distributed.collectives import Group, all_reduce

_MICROBATCHES, _STAGES, _UNITS, _RANKS = 1 << 16, 1 << 12, 1 << 13, 1 << 20
"""Upper bounds, by which the coordinates of a pass are packed into one number."""
_FINITE = 2 * _MICROBATCHES * _STAGES * _UNITS * _RANKS
"""A number above those of all passes."""


@dataclass(frozen=True)
class PassMaximum:
    """The largest magnitude in the result of one pass.

    Attributes:
        backward: Whether the pass is a backward pass.
        stage: The stage's index.
        microbatch: The microbatch's index.
        largest: A scalar on the device; NaN if the result has one.
        block: The block's index, if the pass is that of one block only; -1 is the embedding.
    """

    backward: bool
    stage: int
    microbatch: int
    largest: Tensor
    block: int | None = None


def measure_pass(
    backward: bool, stage: int, microbatch: int, result: Tensor, block: int | None = None
) -> PassMaximum:
    """Return the maximum of a pass.

    Args:
        backward: Whether the pass is a backward pass.
        stage: The stage's index.
        microbatch: The microbatch's index.
        result: What the pass returned: an output or a gradient.
        block: The block's index, if the pass is that of one block only; -1 is the embedding.
    """
    # NaN and infinity both survive a maximum, and it stays on the device.
    largest = torch.linalg.vector_norm(result, torch.inf)
    return PassMaximum(backward, stage, microbatch, largest, block)


def locate_nonfinite(
    maxima: Sequence[PassMaximum],
    stages: int,
    world: Group,
    device: torch.device,
    samples: Sequence[Tensor] = (),
) -> str:
    """Describe the first pass of a step whose result was not finite, over all ranks: forward before
    backward, earlier microbatches first. Collective over `world`.

    Args:
        maxima: This rank's passes.
        stages: Number of stages of the pipeline.
        world: All ranks.
        device: Where to communicate from.
        samples: For each of this rank's microbatches the numbers of its samples, equally many on
            all ranks; given by all ranks or by none.
    """
    # Waits for the device, which is why this runs only after an update was refused.
    nonfinite = [maximum for maximum in maxima if not bool(torch.isfinite(maximum.largest))]
    rank = world.ranks[world.index]
    first = torch.tensor(
        min((_encode_pass(maximum, stages, rank) for maximum in nonfinite), default=_FINITE),
        device=device,
    )
    # One minimum finds the pass and its rank, because all coordinates are packed into the number.
    order = int(all_reduce(first, world, "min").wait())
    if order == _FINITE:
        return "every pass was finite, so a sum of gradients was too large"
    order, rank = divmod(order, _RANKS)
    order, unit = divmod(order, _UNITS)
    order, steps = divmod(order, _STAGES)
    backward, microbatch = divmod(order, _MICROBATCHES)
    kind, stage = ("backward", stages - 1 - steps) if backward else ("forward", steps)
    text = f"first in the {kind} pass of microbatch {microbatch}, stage {stage}"
    if unit < _UNITS - 1:
        block = _UNITS - 4 - unit if backward else unit - 1
        text += ", the embedding" if block < 0 else f", block {block}"
    text += f", on rank {rank}"
    if samples:
        # All other ranks send zeros, so a sum sends the numbers to everyone.
        is_first = rank == world.ranks[world.index]
        # A copy, because the other ranks overwrite it with zeros.
        numbers = samples[microbatch if is_first else 0].to(device, copy=True)
        numbers = all_reduce(numbers if is_first else numbers.zero_(), world).wait()
        text += f", of samples {', '.join(map(str, numbers.tolist()))}"
    return text


def _encode_pass(maximum: PassMaximum, stages: int, rank: int) -> int:
    """Return a number that sorts passes in the order in which a bad value travels; a whole pass
    comes after its blocks."""
    # A bad value travels to later stages in a forward pass, and to earlier ones in a backward pass.
    steps = stages - 1 - maximum.stage if maximum.backward else maximum.stage
    unit = _UNITS - 1
    if maximum.block is not None:
        unit = _UNITS - 4 - maximum.block if maximum.backward else maximum.block + 1
    order = (maximum.backward * _MICROBATCHES + maximum.microbatch) * _STAGES + steps
    return (order * _UNITS + unit) * _RANKS + rank
