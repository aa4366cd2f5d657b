"""Quantisation to 8-bit floats, with one scale per tensor, per row or per block.

A scale is the factor that restores the original numbers: the exact quotient of the largest
magnitude and the largest number of the type. Each scale is inverted once, and numbers are
multiplied by the inverse. A tensor takes two passes, because its scale depends on all of it, and so
do rows that do not fit in registers; other rows and blocks take one pass.

The transpose of a matrix is read as the matrix lies and written as its rows, tile by tile: 8-bit
products need the summed dimension contiguous, and a copy would move the 16-bit numbers twice more.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from megaframe_kernels.device import (
    ceil_div,
    count_processors,
    launch,
    next_power_of_2,
    read_capability,
)
from megaframe_kernels.direct import bypass_dispatcher
from megaframe_kernels.fp8.quantize_device import (
    find_largest_of_columns,
    find_largest_of_rows,
    quantise_by,
    quantise_transposed,
    read_magnitude_bits,
    round_to_fp8,
    scale_of,
)
from megaframe_kernels.installed import require_nothing
from megaframe_kernels.kernel import Implementation, Kernel, refuse_types

TYPES = (torch.float8_e4m3fn, torch.float8_e5m2)
_WIDEST = 16384
"""Elements of the largest block that fits in registers."""
_TILE = 4096
_PROGRAMS_PER_PROCESSOR = 8
_TRANSPOSED_COLUMNS = 64
"""Columns of a tile that is transposed: 128 bytes of a row in 16 bits."""
SHARED = 128
"""Size of blocks: how many elements of a row, or how many rows, share a scale."""
_LEAST = 1e-30
"""Lower bound of the largest magnitude, so that a block of zeros has a scale."""


def run_reference(
    x_RC: Tensor,
    dtype: torch.dtype = torch.float8_e4m3fn,
    block: tuple[int, int] | None = None,
) -> tuple[Tensor, Tensor]:
    """Return x in 8 bits, and the scales that restore it: x = quantised * scale.

    Args:
        x_RC: [R, C].
        dtype: The 8-bit type.
        block: (rows, columns) that share a scale; a number of at most 0 means all. None: one scale
            for all.

    Returns:
        [R, C] in 8 bits, and fp32 scales [ceil(R / rows), ceil(C / columns)], or [1, 1] without a
        block.
    """
    rows, columns = _block(x_RC, block)
    wide = x_RC.to(torch.float32)
    down, across = ceil_div(x_RC.shape[0], rows), ceil_div(x_RC.shape[1], columns)
    # Padded with zeros, which change no largest magnitude.
    padding = (0, across * columns - x_RC.shape[1], 0, down * rows - x_RC.shape[0])
    blocks = torch.nn.functional.pad(wide, padding).view(down, rows, across, columns)
    scale = scale_by(blocks.abs().amax((1, 3)), dtype)
    # Inverted once per scale; the kernel does the same, so both round alike.
    by = (1.0 / scale).repeat_interleave(rows, 0).repeat_interleave(columns, 1)
    by = by[: x_RC.shape[0], : x_RC.shape[1]]
    largest = torch.finfo(dtype).max
    # The product may round to just above the largest number, which the type does not have.
    return (wide * by).clamp(-largest, largest).to(dtype), scale


def restore(quantised_RC: Tensor, scales: Tensor, block: tuple[int, int] | None = None) -> Tensor:
    """Return the fp32 numbers that 8-bit numbers and scales represent.

    Args:
        quantised_RC: [R, C] in 8 bits.
        scales: As `run_reference` returns them.
        block: (rows, columns) that share a scale, as in `run_reference`.
    """
    rows, columns = _block(quantised_RC, block)
    by = scales.repeat_interleave(rows, 0).repeat_interleave(columns, 1)
    return quantised_RC.to(torch.float32) * by[: quantised_RC.shape[0], : quantised_RC.shape[1]]


def _block(x: Tensor, block: tuple[int, int] | None) -> tuple[int, int]:
    rows, columns = (0, 0) if block is None else block
    return rows if rows > 0 else max(x.shape[0], 1), columns if columns > 0 else max(x.shape[1], 1)


@triton.jit
def _quantise_blocks(
    x: tl.tensor,
    out: tl.tensor,
    scales: tl.tensor,
    height: tl.tensor,
    width: tl.tensor,
    rows: tl.tensor,
    columns: tl.tensor,
    stride: tl.tensor,
    MOST: tl.constexpr,
    DOWN: tl.constexpr,
    ROWS: tl.constexpr,
    ACROSS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    """Quantise a few blocks per program, laid out as [block, row in it, block, column in it]."""
    blocks = tl.cdiv(width, columns)
    programs = tl.cdiv(blocks, ACROSS)
    down = (tl.program_id(0) // programs).to(tl.int64) * DOWN
    down += tl.arange(0, DOWN)[:, None, None, None]
    right = (tl.program_id(0) % programs) * ACROSS + tl.arange(0, ACROSS)[None, None, :, None]
    # Blocks are padded to powers of two; `inside` excludes the padding.
    within = tl.arange(0, ROWS)[None, :, None, None], tl.arange(0, COLUMNS)[None, None, None, :]
    row, column = down * rows + within[0], right * columns + within[1]
    inside = (row < height) & (within[0] < rows) & (column < width) & (within[1] < columns)
    value = tl.load(x + row * stride + column, mask=inside, other=0.0).to(tl.float32)
    # A maximum of integers, the bits of magnitudes, because one of floats may lose NaN.
    largest = tl.max(tl.max(read_magnitude_bits(value), 3, keep_dims=True), 1, keep_dims=True)
    scale = scale_of(largest, MOST)
    # Only blocks that exist have a scale.
    exists = (down * rows < height) & (right < blocks)
    tl.store(scales + down * blocks + right, scale, mask=exists)
    result = round_to_fp8(value, scale, MOST, out.dtype.element_ty)
    tl.store(out + row * width + column, result, mask=inside)


@triton.jit
def _quantise_row(
    x: tl.tensor,
    out: tl.tensor,
    scales: tl.tensor,
    width: tl.tensor,
    stride: tl.tensor,
    MOST: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Quantise one row per program that does not fit in registers. It is read a second time from
    the cache."""
    # 64-bit: rows times width may exceed 32 bits.
    row = tl.program_id(0).to(tl.int64)
    top = tl.zeros([BLOCK], tl.int32)
    for first in range(0, width, BLOCK):
        column = first + tl.arange(0, BLOCK)
        value = tl.load(x + row * stride + column, mask=column < width, other=0.0)
        top = tl.maximum(top, read_magnitude_bits(value))
    scale = scale_of(tl.max(top, 0), MOST)
    tl.store(scales + row, scale)
    for first in range(0, width, BLOCK):
        column = first + tl.arange(0, BLOCK)
        value = tl.load(x + row * stride + column, mask=column < width, other=0.0).to(tl.float32)
        result = round_to_fp8(value, scale, MOST, out.dtype.element_ty)
        tl.store(out + row * width + column, result, mask=column < width)


def launch_quantise(
    x_RC: Tensor, dtype: torch.dtype, rows: int, columns: int
) -> tuple[Tensor, Tensor]:
    """Quantise x like the reference.

    Args:
        x_RC: [R, C].
        dtype: The 8-bit type.
        rows: Rows that share a scale; at most 0 means all.
        columns: Columns that share a scale; at most 0 means all.
    """
    if sharing := _name_sharing_of_transposed(x_RC, rows, columns):
        return _launch_transposed(x_RC.t(), dtype, sharing)
    x = x_RC if x_RC.stride(1) == 1 else x_RC.contiguous()
    if rows <= 0 and columns <= 0:
        return _launch_whole(x, dtype)
    height, width = x.shape
    rows, columns = _block(x, (rows, columns))
    out = torch.empty(height, width, dtype=dtype, device=x.device)
    most = torch.finfo(dtype).max
    grid = ceil_div(height, rows), ceil_div(width, columns)
    scales = x.new_empty(grid, dtype=torch.float32)
    tall, wide = next_power_of_2(rows), next_power_of_2(columns)
    if tall * wide > _WIDEST:
        launch(
            _quantise_row,
            (height,),
            x,
            out,
            scales,
            width,
            x.stride(0),
            MOST=most,
            BLOCK=_TILE,
            warps=8,
        )
        return out, scales
    # As many blocks as make up a tile: first along the row, where memory is adjacent.
    blocks = max(1, _TILE // (tall * wide))
    across = min(blocks, next_power_of_2(grid[1]))
    down = blocks // across
    launch(
        _quantise_blocks,
        (ceil_div(grid[0], down) * ceil_div(grid[1], across),),
        x,
        out,
        scales,
        height,
        width,
        rows,
        columns,
        x.stride(0),
        MOST=most,
        DOWN=down,
        ROWS=tall,
        ACROSS=across,
        COLUMNS=wide,
        warps=min(16, max(1, blocks * tall * wide // 512)),
    )
    return out, scales


def _launch_whole(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    if not x.numel():  # No program runs.
        return x.to(dtype), scale_by(x.new_zeros(1, 1, dtype=torch.float32), dtype)
    # The scale depends on the whole tensor, hence two passes. It stays on the device.
    scale = x.new_empty(1, 1, dtype=torch.float32)
    return _launch_quantise_by(x, _find_largest(x, single=True), dtype, scale), scale


def _find_largest(x_RC: Tensor, *, single: bool) -> Tensor:
    """Return the bits of the largest magnitude of all, int32 [1], or of each column, [C]."""
    height, width = x_RC.shape
    largest = x_RC.new_zeros(1 if single else width, dtype=torch.int32)
    # Tiles are wide, because memory is adjacent along a row, and fewer columns need fewer atomics.
    rows, columns = 8, min(1024, next_power_of_2(max(width, 16)))
    across = ceil_div(width, columns)
    # Enough programs to keep the GPU busy.
    down = ceil_div(_PROGRAMS_PER_PROCESSOR * count_processors(x_RC), across)
    launch(
        find_largest_of_columns,
        (across * min(ceil_div(height, rows), down),),
        x_RC,
        largest,
        height,
        width,
        x_RC.stride(0),
        SINGLE=single,
        ROWS=rows,
        COLUMNS=columns,
        warps=8,
    )
    return largest


def _name_sharing_of_transposed(x_RC: Tensor, rows: int, columns: int) -> str | None:
    """Return what shares a scale, if x is a transposed matrix that need not be copied."""
    lies_transposed = x_RC.stride(0) == 1 and x_RC.stride(1) >= max(2, x_RC.shape[0])
    if not lies_transposed or 0 in x_RC.shape:
        return None
    if rows <= 0 and columns <= 0:
        return "tensor"
    if rows == 1 and columns <= 0:
        return "row"
    return {(1, SHARED): "block", (SHARED, SHARED): "square"}.get((rows, columns))


def _launch_transposed(x_CR: Tensor, dtype: torch.dtype, sharing: str) -> tuple[Tensor, Tensor]:
    """Return the transpose of x [C, R] in 8 bits, [R, C], and its scales."""
    height, width = x_CR.shape
    columns = SHARED if sharing == "square" else _TRANSPOSED_COLUMNS
    tiles, across = ceil_div(height, SHARED), ceil_div(width, columns)
    shape = {
        "tensor": (1, 1),
        "row": (width, 1),
        "block": (width, tiles),
        "square": (across, tiles),
    }
    scales = x_CR.new_empty(shape[sharing], dtype=torch.float32)
    # Otherwise a tile contains all numbers that share a scale.
    needs_pass = sharing in ("tensor", "row")
    largest = _find_largest(x_CR, single=sharing == "tensor") if needs_pass else None
    out = torch.empty(width, height, dtype=dtype, device=x_CR.device)
    launch(
        quantise_transposed,
        (tiles * across,),
        x_CR,
        largest,
        out,
        scales,
        height,
        width,
        x_CR.stride(0),
        SHARING=sharing,
        MOST=torch.finfo(dtype).max,
        ROWS=SHARED,
        COLUMNS=columns,
        warps=8,
    )
    return out, scales


def launch_largest(x_RC: Tensor) -> Tensor:
    """Return the largest magnitude of each row, fp32 [R]. Rows must be contiguous."""
    height, width = x_RC.shape
    largest = x_RC.new_empty(height, dtype=torch.float32)
    tile = {"BLOCK": _choose_elements_per_program(width)}
    launch(find_largest_of_rows, (height,), x_RC, largest, width, x_RC.stride(0), **tile)
    return largest


def scale_by(magnitude: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the scale for numbers with this largest magnitude."""
    return magnitude.clamp_min(_LEAST) * (1.0 / torch.finfo(dtype).max)


def launch_quantise_by(x_RC: Tensor, scales_R: Tensor, dtype: torch.dtype) -> Tensor:
    """Return x [R, C] in 8 bits by known scales of its rows, which must be contiguous."""
    return _launch_quantise_by(x_RC, scales_R, dtype, None)


def _launch_quantise_by(
    x_RC: Tensor, scales: Tensor, dtype: torch.dtype, found: Tensor | None
) -> Tensor:
    height, width = x_RC.shape
    out = torch.empty(height, width, dtype=dtype, device=x_RC.device)
    launch(
        quantise_by,
        (height * ceil_div(width, _choose_elements_per_program(width)),),
        x_RC,
        out,
        scales,
        found,
        width,
        x_RC.stride(0),
        # With a stride of 0 all rows read the one magnitude.
        1 if found is None else 0,
        MOST=torch.finfo(dtype).max,
        BLOCK=_choose_elements_per_program(width),
    )
    return out


def _choose_elements_per_program(width: int) -> int:
    """Return how many elements of a row one program takes at a time."""
    return min(_TILE, next_power_of_2(max(width, 16)))


_quantise_op = torch.library.custom_op("megaframe::quantise", launch_quantise, mutates_args=())


@_quantise_op.register_fake
def _(x_RC: Tensor, dtype: torch.dtype, rows: int, columns: int) -> tuple[Tensor, Tensor]:
    down, across = _block(x_RC, (rows, columns))
    shape = ceil_div(x_RC.shape[0], down), ceil_div(x_RC.shape[1], across)
    if rows <= 0 and columns <= 0:
        shape = 1, 1
    return torch.empty_like(
        x_RC, dtype=dtype, memory_format=torch.contiguous_format
    ), x_RC.new_empty(shape, dtype=torch.float32)


_direct_quantise = bypass_dispatcher(_quantise_op, launch_quantise)


def run_triton(
    x_RC: Tensor,
    dtype: torch.dtype = torch.float8_e4m3fn,
    block: tuple[int, int] | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute the reference in Triton."""
    rows, columns = (0, 0) if block is None else block
    return _direct_quantise(x_RC, dtype, rows, columns)


def refuse_chip(x: Tensor) -> str | None:
    """Return why Triton cannot compute with 8-bit floats on this tensor's device, or None."""
    if x.is_cuda and torch.version.hip:
        return "8-bit floats of these types are NVIDIA's"
    if x.is_cuda and read_capability(x.device.index) < (8, 9):
        return f"8-bit floats need compute capability 8.9, and this GPU has {format_capability(x)}"
    return None


def format_capability(x: Tensor) -> str:
    """Return the compute capability of the device of x, such as 9.0."""
    return ".".join(map(str, read_capability(x.device.index)))


def refuse_rounding(x: Tensor, dtype: torch.dtype) -> str | None:
    """Return why a Triton kernel cannot round these numbers to this type, or None."""
    if dtype not in TYPES:
        return f"{dtype} is not one of {', '.join(map(str, TYPES))}"
    return refuse_chip(x) or refuse_types(x)


def _refuse_inputs(
    x_RC: Tensor,
    dtype: torch.dtype = torch.float8_e4m3fn,
    block: tuple[int, int] | None = None,
) -> str | None:
    rows, columns = _block(x_RC, block)
    fits = block is None or next_power_of_2(rows) * next_power_of_2(columns) <= _WIDEST
    if not fits and (rows > 1 or columns < x_RC.shape[1]):
        return f"a block of {rows} x {columns} does not fit in registers"
    return refuse_rounding(x_RC, dtype)


QUANTISE = Kernel(
    "quantise",
    run_reference,
    {"triton": Implementation("triton", run_triton, require_nothing, _refuse_inputs)},
    constant=1.0,
)
