"""Kernels: seconds of each class of kernel on a chip, by a roofline with corrections.

All sizes are numbers or numpy arrays. A product takes the longer of computing and moving its
operands. The host launches kernels at a fixed rate and runs ahead of the device, so launches are
compared with compute for a whole pass, not here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from megaframe.errors import UserError
from megaframe.hardware.chips import DTYPE_BYTES, Chip
from megaframe.hardware.cluster import describe_unknown_chip
from megaframe.planner.constants import Constants

Number = Any
"""A float, or a numpy array of them."""
_TILE = 128 * 256
"""Elements of the tile that one unit of a chip computes at a time, in fast kernels of GPUs."""


@dataclass(frozen=True)
class KernelRates:
    """What kernels reach.

    Attributes:
        flops: FLOP/s of infinitely large products.
        start: Overhead of a tile, in terms of its sum.
        wave: Elements wasted in the last wave of tiles, on average half a wave.
        attention: FLOP/s of the family's fastest fused attention in forward, with heads of 128.
        memory: bytes/s of elementwise kernels.
        read: bytes/s at which products move their operands.
        launch: Seconds of the host per kernel.
        width: Bytes of a value.
    """

    flops: float
    start: float
    wave: float
    attention: float
    memory: float
    read: float
    launch: float
    width: int


def compute_kernel_rates(chip: Chip, constants: Constants, kind: str) -> KernelRates:
    """Return the rates of a chip in a type of values.

    Args:
        chip: The device.
        constants: What kernels reach of its peaks.
        kind: A value of `train.precision`.

    Raises:
        UserError: The chip lacks the type, or nothing is known of its speed.
    """
    if not chip.has_rates:
        raise UserError(describe_unknown_chip(chip))
    sustained = chip.get_sustained_flops(kind)
    if sustained is None:
        raise UserError(
            f"train.precision={kind}: chip {chip.name} has no figure for it; use "
            f"{', '.join(sorted(chip.peaks))}"
        )
    older = constants.older if constants.software.older_libraries else 1.0
    return KernelRates(
        flops=sustained * constants.product * older,
        start=constants.start,
        wave=0.5 * chip.units * _TILE if chip.units > 1 else 0.0,
        attention=sustained * constants.attention,
        memory=chip.bandwidth * constants.memory,
        read=chip.bandwidth,
        launch=constants.launch,
        width=DTYPE_BYTES[kind],
    )


def estimate_matmul_seconds(
    rate: KernelRates, rows: Number, outputs: Number, terms: Number
) -> Number:
    """Return the seconds of a product of [rows, terms] and [terms, outputs]
    (`estimate_grouped_matmul_seconds` of one product).

    Args:
        rate: Rates of the kernels on the chip.
        rows: Rows of the first operand and of the result, such as tokens.
        outputs: Columns of the second operand and of the result.
        terms: Products that each element of the result sums.
    """
    return estimate_grouped_matmul_seconds(rate, 1.0, rows, outputs, terms)


def estimate_grouped_matmul_seconds(
    rate: KernelRates, groups: Number, rows: Number, outputs: Number, terms: Number
) -> Number:
    """Return the seconds of `groups` products of the same size in one kernel.

    It is the time of 2 (terms + start) (groups rows outputs + wave) operations, or of moving the
    operands if longer. A result of few tiles is cut along its sum into s parts (split-k), so that
    the last wave is shorter: 2 ((terms + s start) groups rows outputs + (terms / s + start) wave),
    which is least for s^2 = terms wave / (start groups rows outputs).

    Args:
        rate: Rates of the kernels on the chip.
        groups: Number of products, such as experts.
        rows, outputs, terms: Sizes of one product, as in `estimate_matmul_seconds`.
    """
    results = groups * rows * outputs
    splits = np.sqrt(terms * rate.wave / (np.maximum(rate.start, 1.0) * results))
    splits = np.maximum(1.0, splits)
    work = (terms + splits * rate.start) * results + (terms / splits + rate.start) * rate.wave
    operand_bytes = rate.width * groups * (rows * terms + terms * outputs + rows * outputs)
    return np.maximum(2.0 * work / rate.flops, operand_bytes / rate.read)


def estimate_linear_seconds(
    rate: KernelRates, rows: Number, outputs: Number, terms: Number, groups: Number = 1.0
) -> tuple[Number, Number, Number]:
    """Return the seconds of a linear layer's forward, input gradient and weight gradient.

    Args:
        rate: Rates of the kernels on the chip.
        rows: Tokens of one layer.
        outputs: Width of the result.
        terms: Width of the input.
        groups: Number of such layers in one kernel.
    """
    return (
        estimate_grouped_matmul_seconds(rate, groups, rows, outputs, terms),
        estimate_grouped_matmul_seconds(rate, groups, rows, terms, outputs),
        estimate_grouped_matmul_seconds(rate, groups, terms, outputs, rows),
    )


def estimate_elementwise_seconds(rate: KernelRates, size: Number) -> Number:
    """Return the seconds of elementwise kernels that read and write `size` bytes in total."""
    return size / rate.memory


def fit_line(sizes: Sequence[float], seconds: Sequence[float]) -> tuple[float, float, float]:
    """Fit seconds = alpha + size beta, and return (alpha, beta, largest relative error).

    The fit minimises the squares of relative errors, so that small sizes count as much as large
    ones. Neither alpha nor beta is negative.
    """
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
