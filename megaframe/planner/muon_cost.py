"""Orthogonal: the cost of Muon (`optim.name=muon`), which works on whole matrices.

The ranks that hold one copy of a stage divide its matrices among themselves by work. Once per step,
pieces are sent to the owners and the results are sent back; nothing overlaps with that.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from megaframe.architecture.matrices import Matrix, matrices
from megaframe.planner.kernel_times import Rates, product_seconds
from megaframe.planner.machine import Machine

Number = Any
_ITERATIONS = 5
"""Newton-Schulz iterations. Each has three products: the matrix X times its transpose gives A, then
A times A, and the sum of these times X."""


def orthogonal_seconds(machine: Machine, layer: int) -> tuple[float, float]:
    """Return the seconds to orthogonalise all matrices of a layer on one rank, and those of the
    matrix that takes longest; zeros under other optimizers."""
    if machine.config.optim.name != "muon":
        return 0.0, 0.0
    found = matrices(machine.config.model, layer)
    each = [seconds_of(machine.rate, matrix) for matrix in found]
    whole = sum(one * matrix.number for one, matrix in zip(each, found, strict=True))
    return whole, max(each, default=0.0)


def seconds_of(rate: Rates, matrix: Matrix) -> float:
    """Return the seconds to orthogonalise one matrix (a single one, whatever its `number`)."""
    few, many = sorted((matrix.outputs, matrix.inputs))
    products = ((few, few, many), (few, few, few), (few, many, few))
    return _ITERATIONS * float(sum(product_seconds(rate, *sizes) for sizes in products))


def muon_seconds(machine: Machine, elements: Number, whole: Number, longest: Number) -> Number:
    """Return the seconds that Muon adds to the update; 0 under other optimizers.

    elements: elements of a rank's matrices before data ranks divide them. whole, longest: the
    results of `orthogonal_seconds` for the rank's stages.
    """
    if machine.config.optim.name != "muon":
        return 0.0
    sizes = machine.sizes
    given, taken = muon_bytes(machine, elements)
    collect = machine.seconds("all_to_all", given, "owners")
    everywhere = machine.seconds("all_gather", taken, "owners")
    spread = np.where(sizes.zero == 0, everywhere, collect)
    return np.maximum(whole / (sizes.shard * sizes.tensor), longest) + collect + spread


def muon_bytes(machine: Machine, elements: Number) -> tuple[Number, Number]:
    """Return the bytes that a rank sends to owners (its part of the gradients), and those that it
    gets back from them (for everything that it keeps of the weights). elements: as above."""
    size, sizes = machine.rate.width * elements, machine.sizes
    return size / sizes.shard, np.where(sizes.zero == 0, size, size / sizes.shard)
