"""Kernels: seconds of each class of kernel on a chip, a roofline with what keeps them from it.

All sizes are numbers or numpy arrays. A product takes the longer of computing and of moving its
operands; the host launches a kernel each so many seconds and runs ahead of the device, so of a
whole pass the longer of both counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from megaframe.errors import UserError
from megaframe.plan.chips import WIDTH, Chip
from megaframe.plan.constants import Constants

Number = Any
"""A float, or a numpy array of them."""

_TILE = 128 * 256
"""Elements of a tile that one unit of a chip makes at a time: that of the fast kernels of GPUs."""


@dataclass(frozen=True)
class Rates:
    """What kernels reach. flops: of endless products. start: terms that begin and end a tile. wave:
    elements that are made in vain in the last wave of tiles, on average half of it. attention:
    FLOP/s of fused attention. memory: bytes/s of elementwise kernels. read: bytes/s of the operands
    of products. launch: seconds of the host. width: bytes of a value."""

    flops: float
    start: float
    wave: float
    attention: float
    memory: float
    read: float
    launch: float
    width: int


def rates(chip: Chip, constants: Constants, kind: str) -> Rates:
    """Rates of a chip in the type `kind`. Raises `UserError` where the chip has no such type."""
    sustained = chip.sustained(kind)
    if sustained is None:
        raise UserError(
            f"train.precision={kind}: chip {chip.name} has no figure for it; use "
            f"{', '.join(sorted(chip.peaks))}"
        )
    return Rates(
        flops=sustained * constants.product,
        start=constants.start,
        wave=0.5 * chip.units * _TILE if chip.units > 1 else 0.0,
        attention=sustained * constants.attention,
        memory=chip.bandwidth * constants.memory,
        read=chip.bandwidth,
        launch=constants.launch,
        width=WIDTH[kind],
    )


def product_seconds(rate: Rates, rows: Number, outputs: Number, terms: Number) -> Number:
    """A product of [rows, terms] and [terms, outputs]: 2 (terms + start) (rows outputs + wave)
    operations' time, or that of moving its operands."""
    computing = 2.0 * (terms + rate.start) * (rows * outputs + rate.wave) / rate.flops
    moved = rate.width * (rows * terms + terms * outputs + rows * outputs)
    return np.maximum(computing, moved / rate.read)


def grouped_product_seconds(
    rate: Rates, groups: Number, rows: Number, outputs: Number, terms: Number
) -> Number:
    """So many products of the same size in one kernel: one last wave for all."""
    computing = 2.0 * (terms + rate.start) * (groups * rows * outputs + rate.wave) / rate.flops
    moved = rate.width * groups * (rows * terms + terms * outputs + rows * outputs)
    return np.maximum(computing, moved / rate.read)


def three_products(
    rate: Rates, rows: Number, outputs: Number, terms: Number, groups: Number = 1.0
) -> tuple[Number, Number, Number]:
    """Forward, input gradient and weight gradient of a linear layer."""
    return (
        grouped_product_seconds(rate, groups, rows, outputs, terms),
        grouped_product_seconds(rate, groups, rows, terms, outputs),
        grouped_product_seconds(rate, groups, terms, outputs, rows),
    )


def moving_seconds(rate: Rates, size: Number) -> Number:
    """Elementwise kernels that read and write `size` bytes."""
    return size / rate.memory


def roofline(intensity: float, flops: float, bandwidth: float) -> float:
    """FLOP/s that can be had at so many operations per byte (Williams et al. 2009)."""
    return min(flops, intensity * bandwidth)


def fit_line(sizes: Sequence[float], seconds: Sequence[float]) -> tuple[float, float, float]:
    """(alpha, beta, largest relative error) of seconds = alpha + size beta, with the least relative
    squares, so that small sizes count as much as large ones; neither is below 0."""
    x, y = np.asarray(sizes, float), np.asarray(seconds, float)
    table = np.stack([1.0 / y, x / y], axis=1)
    best = (np.inf, 0.0, 0.0)
    for columns in ((0, 1), (0,), (1,)):
        part, *_ = np.linalg.lstsq(table[:, columns], np.ones_like(y), rcond=None)
        pair = np.zeros(2)
        pair[list(columns)] = part
        loss = float(np.sum((table @ pair - 1) ** 2))
        if (pair >= 0).all() and loss < best[0]:
            best = (loss, float(pair[0]), float(pair[1]))
    _, alpha, beta = best
    return alpha, beta, float(np.max(np.abs(alpha + beta * x - y) / y))
