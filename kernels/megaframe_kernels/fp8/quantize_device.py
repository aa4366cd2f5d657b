"""Device code of quantisation to 8 bits: magnitudes, scales, rounding."""

from __future__ import annotations

import triton
import triton.language as tl

from megaframe_kernels.device_math import INTERPRETED


@triton.jit
def round_to_fp8(
    value: tl.tensor, scale: tl.tensor, MOST: tl.constexpr, KIND: tl.constexpr
) -> tl.tensor:
    """Divide by a scale and round to 8 bits, ties to even.

    The interpreter loses NaN, and the carry when a mantissa rounds up to the next power of two.
    There, numbers are first rounded to the grid of the type, and NaN is put back.

    Args:
        value: Numbers in fp32.
        scale: Their scale.
        MOST: The largest number of the type.
        KIND: The 8-bit type.
    """
    value = value * tl.div_rn(1.0, scale)  # one division per scale
    # Saturated, because the product may round to just above the largest number. NaN stays NaN.
    value = tl.clamp(value, -MOST, MOST, propagate_nan=tl.PropagateNan.ALL)
    if INTERPRETED:
        # The exponent of the number's last place in 8 bits: e4m3 has 3 bits of mantissa and
        # exponents from -6, e5m2 has 2 and exponents from -14.
        exponent = ((value.to(tl.int32, bitcast=True) >> 23) & 0xFF) - 127
        if tl.float8e4nv == KIND:
            exponent = tl.maximum(exponent, -6) - 3
        else:
            exponent = tl.maximum(exponent, -14) - 2
        step = ((exponent + 127) << 23).to(tl.float32, bitcast=True)
        # At 1.5 2^23 the last place of fp32 is 1, so adding it rounds to an integer, ties to even.
        value = ((value / step + 12582912.0) - 12582912.0) * step
        bits = value.to(KIND).to(tl.int8, bitcast=True)
        # 0x7F is NaN in both types.
        return tl.where(value == value, bits, 0x7F).to(tl.int8).to(KIND, bitcast=True)
    return value.to(KIND)


@triton.jit
def read_magnitude_bits(value: tl.tensor) -> tl.tensor:
    """Return the bits of |value| in fp32. As integers they have the order of the numbers, with NaN,
    which a maximum of floats may lose, at the top."""
    return value.to(tl.float32).to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def scale_of(largest: tl.tensor, MOST: tl.constexpr) -> tl.tensor:
    """Return the scale for the bits of the largest magnitude.

    Args:
        largest: Bits of the largest magnitude.
        MOST: The largest number of the 8-bit type.
    """
    largest = largest.to(tl.float32, bitcast=True)
    # The bound gives a block of zeros a scale. MOST's inverse is a constant of the kernel.
    return tl.maximum(largest, 1e-30, propagate_nan=tl.PropagateNan.ALL) * (1.0 / MOST)


@triton.jit
def find_largest_of_rows(
    x: tl.tensor, largest: tl.tensor, width: tl.tensor, stride: tl.tensor, BLOCK: tl.constexpr
) -> None:
    """Find the largest magnitude of a row.

    Args:
        x: [rows, width].
        largest: Receives the results, fp32 [rows].
        width: Columns of x.
        stride: Elements from a row to the next.
        BLOCK: Elements that are read at a time.
    """
    row = tl.program_id(0).to(tl.int64)
    top = tl.zeros([BLOCK], tl.int32)
    for first in range(0, width, BLOCK):
        column = first + tl.arange(0, BLOCK)
        value = tl.load(x + row * stride + column, mask=column < width, other=0.0)
        top = tl.maximum(top, read_magnitude_bits(value))
    tl.store(largest + row, tl.max(top, 0).to(tl.float32, bitcast=True))


@triton.jit
def quantise_by(
    x: tl.tensor,
    out: tl.tensor,
    scales: tl.tensor,
    found: tl.tensor,
    width: tl.tensor,
    stride: tl.tensor,
    scale_stride: tl.tensor,
    MOST: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Quantise by known scales.

    Args:
        x: [rows, width].
        out: Receives the result, 8 bits [rows, width].
        scales: One per row, or one for all; with `found` the bits of the largest magnitude of all.
        found: Receives the scale for that magnitude; or None.
        width: Columns of x.
        stride: Elements from a row of x to the next.
        scale_stride: 1 for one scale per row, 0 for one for all.
        MOST: The largest number of the type.
        BLOCK: Columns of a program.
    """
    across = tl.cdiv(width, BLOCK)
    row = (tl.program_id(0) // across).to(tl.int64)
    column = (tl.program_id(0) % across) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + row * stride + column, mask=column < width, other=0.0).to(tl.float32)
    scale = tl.load(scales + row * scale_stride)
    if found is not None:
        scale = scale_of(scale, MOST)
        tl.store(found, scale, mask=tl.program_id(0) == 0)
    result = round_to_fp8(value, scale, MOST, out.dtype.element_ty)
    tl.store(out + row * width + column, result, mask=column < width)


@triton.jit
def find_largest_of_columns(
    x: tl.tensor,
    largest: tl.tensor,
    height: tl.tensor,
    width: tl.tensor,
    stride: tl.tensor,
    SINGLE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    """Raise the bits of largest magnitudes to those of tiles of rows.

    A program takes every n-th tile of its columns.

    Args:
        x: [height, width].
        largest: Bits of the largest magnitude of each column, int32 [width], or of all, [1]; they
            are raised.
        height: Rows of x.
        width: Columns of x.
        stride: Elements from a row to the next.
        SINGLE: There is one magnitude for all.
        ROWS: Rows of a tile.
        COLUMNS: Columns of a tile.
    """
    across = tl.cdiv(width, COLUMNS)
    column = (tl.program_id(0) % across) * COLUMNS + tl.arange(0, COLUMNS)
    tops = tl.zeros([ROWS, COLUMNS], tl.int32)
    down = tl.num_programs(0) // across
    for tile in range(tl.program_id(0) // across, tl.cdiv(height, ROWS), down):
        row = tl.cast(tile, tl.int64) * ROWS + tl.arange(0, ROWS)
        inside = (row < height)[:, None] & (column < width)[None, :]
        value = tl.load(x + row[:, None] * stride + column[None, :], mask=inside, other=0.0)
        tops = tl.maximum(tops, read_magnitude_bits(value))
    top = tl.max(tops, 0)
    # Atomics, and yet repeatable: a maximum does not depend on the order.
    if SINGLE:
        tl.atomic_max(largest, tl.max(top, 0))
    else:
        tl.atomic_max(largest + column, top, mask=column < width)


@triton.jit
def quantise_transposed(
    x: tl.tensor,
    largest: tl.tensor,
    out: tl.tensor,
    scales: tl.tensor,
    height: tl.tensor,
    width: tl.tensor,
    stride: tl.tensor,
    SHARING: tl.constexpr,
    MOST: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    """Quantise a tile, and write its columns as rows.

    Args:
        x: [height, width].
        largest: Bits of the largest magnitude of all, int32 [1], or of each column, [width]; None
            if a tile contains all numbers that share a scale.
        out: Receives the result, 8 bits [width, height].
        scales: Receives the scales in the order of `out`.
        height: Rows of x.
        width: Columns of x.
        stride: Elements from a row of x to the next.
        SHARING: What shares a scale: all (tensor), a column (row), a column of the tile (block), or
            the tile (square).
        MOST: The largest number of the type.
        ROWS: Rows of a tile.
        COLUMNS: Columns of a tile.
    """
    across = tl.cdiv(width, COLUMNS)
    tile, part = tl.program_id(0) // across, tl.program_id(0) % across
    row = tile * ROWS + tl.arange(0, ROWS)
    column = part * COLUMNS + tl.arange(0, COLUMNS)
    inside = (row < height)[:, None] & (column < width)[None, :]
    at = x + row.to(tl.int64)[:, None] * stride + column[None, :]
    value = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    if SHARING == "tensor":
        scale = scale_of(tl.load(largest), MOST)
        tl.store(scales, scale, mask=tl.program_id(0) == 0)
        result = round_to_fp8(value, scale, MOST, out.dtype.element_ty)
    elif SHARING == "square":
        scale = scale_of(tl.max(tl.max(read_magnitude_bits(value), 0), 0), MOST)
        tl.store(scales + part * tl.cdiv(height, ROWS) + tile, scale)
        result = round_to_fp8(value, scale, MOST, out.dtype.element_ty)
    else:
        within = column < width
        if SHARING == "row":
            scale = scale_of(tl.load(largest + column, mask=within, other=0), MOST)
            tl.store(scales + column, scale, mask=within & (tile == 0))
        else:
            scale = scale_of(tl.max(read_magnitude_bits(value), 0), MOST)
            tl.store(scales + column * tl.cdiv(height, ROWS) + tile, scale, mask=within)
        result = round_to_fp8(value, scale[None, :], MOST, out.dtype.element_ty)
    at = out + column.to(tl.int64)[:, None] * height + row[None, :]
    tl.store(at, tl.trans(result), mask=tl.trans(inside))
