"""Kernels: seconds of each class of kernel on a chip, by a roofline with corrections.

All sizes are numbers or numpy arrays. A product takes the longer of computing and moving its
operands. The host launches kernels at a fixed rate and runs ahead of the device, so launches are
compared with compute for a whole pass, not here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any

import numpy as np

from megaframe.architecture.window import Chunk, Window, compute_mean_keys
from megaframe.errors import UserError
from megaframe.hardware.chips import DTYPE_BYTES, Chip
from megaframe.hardware.cluster import describe_unknown_chip
from megaframe.planner.constants import Constants

Number = Any
"""A float, or a numpy array of them."""
_TILE = 128 * 256
"""Elements of the tile that one unit of a chip computes at a time, in fast kernels of GPUs."""

_ATTENTION_TILE = 128
"""Queries, and keys, of a tile of fused attention."""
_TILE_STARTS = {"triton": 338.0}
"""By kernel of attention: with how many keys a query could be computed while a tile of queries
starts and ends. On one H200, eight documents in 8,192 tokens took 0.2029 (forward) and 0.2034
(backward) of the time of one (benchmarks/results/h200/attention.json, grouped heads), as if each
query had 336 or 339 keys more; its tiles alone are 0.1385. Other kernels were not measured so."""
_MEASURED_KEYS = 8192 / 2 + _ATTENTION_TILE / 2
"""Keys of a query where the speeds of kernels were measured: causal, without a window."""


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


def count_computed_keys(seq: int, window: Window) -> float:
    """Return the mean number of keys with which a causal kernel computes scores of a query. Tiles
    at the edges of the mask are computed as a whole: that of the queries' own places, and behind a
    window the one that it ends in.

    Args:
        seq: Tokens of a sample.
        window: What a token sees.
    """
    if isinstance(window, Chunk):
        return min(seq, compute_mean_keys(seq, window) + _ATTENTION_TILE / 2)
    tiles = seq / _ATTENTION_TILE
    most = min(tiles, 1 + ceil(((window or seq) - 1) / _ATTENTION_TILE))
    # The first tiles of queries have 1, 2, 3 and so on tiles of keys, all further ones `most`.
    return min(seq, _ATTENTION_TILE * most * (1 - (most - 1) / (2 * tiles)))


def compute_start_factor(kernel: str, keys: float) -> float:
    """Return how many times longer a score takes in a kernel of attention than where the kernel's
    speed was measured, because a tile of queries starts and ends however few its keys are.

    Args:
        kernel: A key of `constants.ATTENTION_SPEEDS`.
        keys: With which a query is computed.
    """
    start = _TILE_STARTS.get(kernel, 0.0)
    return (1 + start / keys) / (1 + start / _MEASURED_KEYS)


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
