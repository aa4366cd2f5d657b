"""Weights that are kept as codes (`model.adapters.quantize_base`): bytes, and where blocks end.

A block is some consecutive inputs of a row of the whole matrix. Ranks that divide the inputs must
therefore cut them where blocks end; then every rank makes the same codes of what it has.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from fractions import Fraction

from megaframe.architecture.linear import GroupedLinearSpec, LinearSpec
from megaframe.architecture.spec import locate_shard
from megaframe.config.adapters import QuantisationConfig
from megaframe.config.parallel import ParallelConfig
from megaframe.errors import find_nearest_divisors

BITS = {"nf4": 4, "int8": 8}
"""Of a code, by type."""
DECODED_AT_ONCE = 1 << 24
"""Elements that are coded or decoded at once: temporaries are small beside a layer, and launches
few."""


def count_unit(config: QuantisationConfig) -> int:
    """Return how many elements are coded together."""
    return config.block * (config.absmax_block or 1)


def compute_bits_per_element(config: QuantisationConfig) -> Fraction:
    """Return the bits of an element: of its code, and its share of those of its absmax."""
    scales = Fraction(32, count_unit(config))
    if config.absmax_block is not None:
        scales += Fraction(8, config.block)
    return BITS[config.type] + scales


def count_decoded_bytes(config: QuantisationConfig, width: int, *, by_kernel: bool) -> float:
    """Return the bytes that are read and written for each element whose value is made: its code and
    its share of absmax, the value, and what plain code makes in between.

    Args:
        config: How it is kept.
        width: Bytes of a value.
        by_kernel: Whether a kernel makes it.
    """
    moved = float(compute_bits_per_element(config)) / 8 + width
    # Temporaries are written and read.
    return moved if by_kernel else moved + 2 * count_temporary_bytes(config)


def count_temporary_bytes(config: QuantisationConfig) -> float:
    """Return the bytes for each element whose value plain code is making: a number of 4 bytes for
    each byte of codes, and its level. Kernels need none, but a run may fall back."""
    return 4 * BITS[config.type] / 8 + 4


def find_block_mistakes(name: str, linear: LinearSpec, parallel: ParallelConfig) -> Iterator[str]:
    """Yield a message if blocks do not end where the inputs of a rank do.

    Args:
        name: Of the product in its block.
        linear: What it declares.
        parallel: The layout.
    """
    config = linear.quantised
    if config is None:
        return
    axis = "expert_tensor" if isinstance(linear, GroupedLinearSpec) else "tensor"
    ranks = getattr(parallel, axis) if linear.is_row else 1
    items, cuts = linear.inputs[0], range(ranks)
    each = linear.terms // items
    shared = math.gcd(*(size * each for cut in cuts for size in locate_shard(items, cut, ranks)))
    for key in ("block", "absmax_block"):
        size = getattr(config, key) or 1
        if shared % size:
            of = "" if key == "block" else f" blocks of {config.block}"
            where = f"the {shared}{of or ' inputs'} that each row of {name} has"
            where += f" on each of parallel.{axis}={ranks} ranks" if ranks > 1 else ""
            yield (
                f"model.adapters.quantize_base.{key}={size} does not divide {where}; use "
                f"{find_nearest_divisors(shared, size)}"
            )
            return
        shared //= size
