"""Orthogonal: what Muon costs, which works on whole matrices (`optim.name=muon`).

The ranks that hold one copy of a stage deal its matrices among them, by work. Pieces travel to
their owner and what became of them travels back, once a step each, and nothing runs beside that.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from megaframe.plan.kernels import Rates, product_seconds
from megaframe.plan.machine import Machine
from megaframe.plan.matrices import Matrix, matrices

Number = Any
_ITERATIONS = 5
"""Of Newton and Schulz: each is the product of a matrix with itself, of that with itself, and of
that with the matrix."""


def orthogonal_seconds(machine: Machine, layer: int) -> tuple[float, float]:
    """Of all matrices of a layer on one owner, and of the one that takes longest."""
    if machine.config.optim.name != "muon":
        return 0.0, 0.0
    found = matrices(machine.config.model, layer)
    each = [seconds_of(machine.rate, matrix) for matrix in found]
    whole = sum(one * matrix.number for one, matrix in zip(each, found, strict=True))
    return whole, max(each, default=0.0)


def seconds_of(rate: Rates, matrix: Matrix) -> float:
    """Of one matrix on its owner."""
    few, many = sorted((matrix.outputs, matrix.inputs))
    products = ((few, few, many), (few, few, few), (few, many, few))
    return _ITERATIONS * float(sum(product_seconds(rate, *sizes) for sizes in products))


def muon_seconds(machine: Machine, elements: Number, whole: Number, longest: Number) -> Number:
    """What comes to an update of matrices, of which a rank has so many elements before data ranks
    divide them. whole, longest: as `orthogonal_seconds` has them, of the rank's stages."""
    if machine.config.optim.name != "muon":
        return 0.0
    sizes = machine.sizes
    given, taken = muon_bytes(machine, elements)
    collect = machine.seconds("all_to_all", given, "owners")
    everywhere = machine.seconds("all_gather", taken, "owners")
    spread = np.where(sizes.zero == 0, everywhere, collect)
    return np.maximum(whole / (sizes.shard * sizes.tensor), longest) + collect + spread


def muon_bytes(machine: Machine, elements: Number) -> tuple[Number, Number]:
    """What a rank gives to owners, its part of the gradients, and what it takes from them: all that
    it keeps of the weights."""
    size, sizes = machine.rate.width * elements, machine.sizes
    return size / sizes.shard, np.where(sizes.zero == 0, size, size / sizes.shard)
