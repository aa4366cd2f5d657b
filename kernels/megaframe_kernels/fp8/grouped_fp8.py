"""Grouped products in 8 bits: the rows and matrices of all experts are quantised, and multiplied in
one launch.

Every result is the same as from multiplying each expert on its own, because only numbers of one
expert share a scale. Rows are quantised by the usual kernel (`fp8.QUANTISE`), unless each expert
has one scale. The gradient of a matrix is a sum over the rows of its expert, and matrix units
multiply 8-bit numbers only if the summed dimension is contiguous. Columns are therefore written as
rows, in which each expert starts at a multiple of 128. The buffers have room for any division of
the rows over experts, so the host needs no counts.

Shape legend: P places (rows in the order of experts), E experts, C columns, K summed over, N
outputs, H inputs, W = 128 (ceil(P / 128) + E) spaced places, S scales of a column.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from megaframe_kernels.device import (
    ceil_div,
    launch,
    next_power_of_2,
    read_capability,
    read_generation,
)
from megaframe_kernels.device_math import INTERPRETED
from megaframe_kernels.direct import bypass_dispatcher
from megaframe_kernels.experts import grouped_product
from megaframe_kernels.experts.grouped_product import Tiles
from megaframe_kernels.experts.tiles import find_tile, find_tiles, walk
from megaframe_kernels.fp8 import quantize
from megaframe_kernels.fp8.quantize import SHARED, TYPES
from megaframe_kernels.fp8.quantize_device import read_magnitude_bits, round_to_fp8, scale_of
from megaframe_kernels.installed import check_cuda, check_triton
from megaframe_kernels.kernel import FLOATS, Implementation, Kernel, refuse_place, refuse_types

TILES = {
    8: Tiles(64, 128, SHARED, 8, 3),
    9: Tiles(128, 128, SHARED, 8, 4),
    10: Tiles(128, 128, SHARED, 8, 4),
}
"""By generation of the chip. The depth of a tile is the number of elements that share a scale.
Before generation 10, the sums of that many products are added in fp32 outside of the matrix units,
because those of generation 9 keep only about 14 bits of their sums (DeepSeek-AI 2024). With scales
per 128 elements this is so on every generation, because each sum is scaled first."""
SHARING = ("expert", "column", "block")
"""Which numbers share a scale when columns are quantised: all of an expert, each column of an
expert, or every 128 numbers of a column."""
_COLUMNS = 64


def _iterate_spans(ends_E: Tensor) -> Iterator[tuple[slice, slice]]:
    """Yield the places of each expert, and its spaced places including padding."""
    start = spaced = 0
    for end in ends_E.tolist():
        # Each expert starts at a multiple of 128, so no tile has numbers of two experts.
        filled = ceil_div(end - start, SHARED) * SHARED
        yield slice(start, end), slice(spaced, spaced + filled)
        start, spaced = end, spaced + filled


def _count_spaced(places: int, experts: int) -> int:
    # Enough for any division of the places over experts, so the host needs no counts.
    return SHARED * (ceil_div(places, SHARED) + experts)


def _count_scales(spaced: int, experts: int, sharing: str) -> int:
    """Return the number of scales of a column."""
    return spaced // SHARED if sharing == "block" else experts


def run_reference_experts(
    x_PC: Tensor, ends_E: Tensor, dtype: torch.dtype = torch.float8_e4m3fn
) -> tuple[Tensor, Tensor]:
    """Return x [P, C] in 8 bits with one scale per expert, repeated for its places, fp32 [P, 1].
    Places beyond the last end share a scale of their own."""
    parts = x_PC.tensor_split(ends_E.tolist())
    made = [quantize.run_reference(part, dtype) for part in parts]
    scales = [s.expand(len(part), 1) for part, (_, s) in zip(parts, made, strict=True)]
    # As bytes, so that concatenation need not know the 8-bit types.
    return torch.cat([q.view(torch.uint8) for q, _ in made]).view(dtype), torch.cat(scales)


def run_reference_columns(
    x_PC: Tensor,
    ends_E: Tensor,
    dtype: torch.dtype = torch.float8_e4m3fn,
    sharing: str = "column",
) -> tuple[Tensor, Tensor]:
    """Quantise the columns and write them as rows.

    Each expert's places start at a multiple of 128 and are followed by zeros.

    Args:
        x_PC: rows in the order of experts.
        ends_E: where each expert's places end.
        dtype: the 8-bit type.
        sharing: which numbers share a scale, one of `SHARING`.

    Returns:
        The columns in 8 bits, [C, W], and fp32 scales [S, C] with S = E, or W / 128 for blocks.
    """
    places, columns = x_PC.shape
    spaced = _count_spaced(places, len(ends_E))
    out = x_PC.new_zeros(columns, spaced, dtype=dtype)
    none = x_PC.new_zeros(_count_scales(spaced, len(ends_E), sharing), columns, dtype=torch.float32)
    # An expert without rows has the scale of zeros.
    scales = quantize.scale_by(none, dtype)
    block = {"expert": None, "column": (1, 0), "block": (1, SHARED)}[sharing]
    for expert, (here, there) in enumerate(_iterate_spans(ends_E)):
        if here.stop == here.start:
            continue
        made, by = quantize.run_reference(x_PC[here].t(), dtype, block)
        start = there.start
        out[:, start : start + made.shape[1]] = made
        rows = slice(expert, expert + 1)
        if sharing == "block":
            rows = slice(start // SHARED, there.stop // SHARED)
        scales[rows] = by.t()
    return out, scales


def run_reference(
    a_PK: Tensor,
    b_ENK: Tensor,
    a_scales: Tensor,
    b_scales: Tensor,
    ends_E: Tensor,
    dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """y[p] = a[p] b[e]^T for the expert e to which place p belongs, rounded once to `dtype`.

    Args:
        a_PK: rows in 8 bits.
        b_ENK: one matrix per expert, in 8 bits.
        a_scales: per row, [P, 1], or per 128 elements of a row, [P, ceil(K / 128)].
        b_scales: per row, [E, N, 1], or per 128 elements, [E, N or ceil(N / 128), ceil(K / 128)].
        ends_E: where each expert's places end; places beyond the last end give 0.
        dtype: type of the result.

    Returns:
        y [P, N].
    """
    y_PN = a_PK.new_zeros(a_PK.shape[0], b_ENK.shape[1], dtype=dtype)
    for expert, (here, _) in enumerate(_iterate_spans(ends_E)):
        if here.stop > here.start:
            given = a_PK[here], b_ENK[expert], a_scales[here], b_scales[expert]
            y_PN[here] = quantize.run_reference_product(*given, dtype)
    return y_PN


def run_reference_gradient(
    grads_ENH: Tensor,
    a_NW: Tensor,
    b_HW: Tensor,
    a_scales: Tensor,
    b_scales: Tensor,
    ends_E: Tensor,
    add: bool,
) -> Tensor:
    """grads[e] = sum over the spaced places w of expert e of a[n, w] b[h, w], in place; with `add`,
    grads[e] += that.

    Args:
        grads_ENH: receives the gradients.
        a_NW: gradients of the result in 8 bits, as from `run_reference_columns`.
        b_HW: inputs in 8 bits, as from `run_reference_columns`.
        a_scales: [S, N].
        b_scales: [S, H].
        ends_E: where the places of each expert end, without spacing.
        add: whether the gradient is added to what is there.

    Returns:
        grads_ENH.
    """
    for expert, (_, there) in enumerate(_iterate_spans(ends_E)):
        rows = slice(expert, expert + 1)
        if len(a_scales) != len(ends_E):
            rows = slice(there.start // SHARED, there.stop // SHARED)
        given = a_NW[:, there], b_HW[:, there], a_scales[rows].t(), b_scales[rows].t()
        grad = grads_ENH[expert]
        # An expert without rows has a gradient of 0.
        made = torch.zeros_like(grad)
        if there.stop > there.start:
            made = quantize.run_reference_product(*given, grad.dtype)
        grad.copy_(grad + made if add else made)
    return grads_ENH


@triton.jit
def _find_largest_of_columns(
    x: tl.tensor,
    ends: tl.tensor,
    scales: tl.tensor,
    width: tl.tensor,
    stride: tl.tensor,
    MOST: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    """Compute the scales of some columns of an expert."""
    across = tl.cdiv(width, COLUMNS)
    expert = tl.program_id(0) // across
    column = (tl.program_id(0) % across) * COLUMNS + tl.arange(0, COLUMNS)
    start = 0
    if expert > 0:
        start = tl.load(ends + expert - 1)
    end = tl.load(ends + expert)
    # Bits of magnitudes, whose order as integers is that of the numbers; NaN is highest.
    top = tl.zeros([ROWS, COLUMNS], tl.int32)
    for first in range(start, end, ROWS):
        place = first + tl.arange(0, ROWS)
        inside = (place < end)[:, None] & (column < width)[None, :]
        at = x + place.to(tl.int64)[:, None] * stride + column[None, :]
        top = tl.maximum(top, read_magnitude_bits(tl.load(at, mask=inside, other=0.0)))
    scale = scale_of(tl.max(top, 0), MOST, False)
    tl.store(scales + expert * width + column, scale, mask=column < width)


@triton.jit
def _quantise_columns(
    x: tl.tensor,
    ends: tl.tensor,
    known: tl.tensor,
    out: tl.tensor,
    scales: tl.tensor,
    places: tl.tensor,
    experts: tl.tensor,
    width: tl.tensor,
    spaced: tl.tensor,
    stride: tl.tensor,
    MOST: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    EXPERTS: tl.constexpr,
) -> None:
    """Quantise a tile of rows, by `known` scales of experts or by the scales of the tile's own
    columns, which are stored. Tiles that belong to no expert become zeros, although they are never
    read."""
    across = tl.cdiv(width, COLUMNS)
    tile = tl.program_id(0) // across
    column = (tl.program_id(0) % across) * COLUMNS + tl.arange(0, COLUMNS)
    # Tile i of the spaced places is tile i of the rows, because both start each expert anew.
    expert, first, end = find_tile(ends, tile, experts, places, ROWS, EXPERTS)
    place = first + tl.arange(0, ROWS)
    here = column < width
    inside = ((place < end) & (expert < experts))[:, None] & here[None, :]
    at = x + place.to(tl.int64)[:, None] * stride + column[None, :]
    # Zeros between experts: they add nothing to the sum over places.
    value = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    if known is not None:
        scale = tl.load(known + expert * width + column, mask=here & (expert < experts), other=1.0)
    else:
        scale = scale_of(tl.max(read_magnitude_bits(value), 0), MOST, False)
        tl.store(scales + tile.to(tl.int64) * width + column, scale, mask=here)
    result = round_to_fp8(value, scale[None, :], MOST, out.dtype.element_ty)
    to = tile * ROWS + tl.arange(0, ROWS)
    # Columns become rows, because 8-bit products need the summed dimension contiguous.
    at = out + column.to(tl.int64)[:, None] * spaced + to[None, :]
    tl.store(at, tl.trans(result), mask=here[:, None])


@triton.jit
def _add_product(
    total: tl.tensor,
    a: tl.tensor,
    b: tl.tensor,
    down: tl.tensor,
    across: tl.tensor,
    BLOCKS: tl.constexpr,
    FEW_BITS: tl.constexpr,
) -> tl.tensor:
    """Return total + a b. With BLOCKS, a b is first multiplied by the scales of this part of the
    sum.

    FEW_BITS: matrix units keep few bits when they sum 8-bit numbers, as those of generation 9 do.
    They then sum no more than the depth of a tile, and the sums of tiles are added outside of them.
    """
    if INTERPRETED:
        # The interpreter's products of e5m2 lose the smallest numbers; in fp32 they are exact.
        a, b = a.to(tl.float32), b.to(tl.float32)
    if BLOCKS:
        # The sum over one block has one scale per row and per column, so it is scaled before it is
        # added.
        return total + tl.dot(a, b) * (down[:, None] * across[None, :])
    if FEW_BITS:
        # The sum is written out, so that it is done in fp32 outside of the matrix units. With
        # max_num_imprecise_acc in its place, products would wait for each other.
        return total + tl.dot(a, b)
    return tl.dot(a, b, total)


@triton.jit
def _multiply(
    a: tl.tensor,
    b: tl.tensor,
    a_scales: tl.tensor,
    b_scales: tl.tensor,
    ends: tl.tensor,
    out: tl.tensor,
    places: tl.tensor,
    experts: tl.tensor,
    outputs: tl.tensor,
    inputs: tl.tensor,
    parts: tl.tensor,
    expert_stride: tl.tensor,
    output_stride: tl.tensor,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    EXPERTS: tl.constexpr,
    ALIKE: tl.constexpr,
    BLOCKS: tl.constexpr,
    FEW_BITS: tl.constexpr,
) -> None:
    """Multiply rows by their expert's matrix. parts: number of scales along a row. ALIKE: how many
    rows of b share their scales."""
    over = tl.cdiv(outputs, COLUMNS)
    tile, right = walk(tl.program_id(0), tl.num_programs(0) // over, over)
    expert, first, end = find_tile(ends, tile, experts, places, ROWS, EXPERTS)
    # The grid is an upper bound; programs beyond the last tile end here.
    if expert > experts:
        return
    place = first + tl.arange(0, ROWS)
    column = right * COLUMNS + tl.arange(0, COLUMNS)
    depth = tl.arange(0, DEPTH)
    inside, within = place < end, column < outputs
    # The extra expert's places sum nothing and become 0.
    terms = tl.where(expert < experts, inputs, 0)
    matrix = expert.to(tl.int64)
    left = a + place.to(tl.int64)[:, None] * inputs + depth[None, :]
    right = b + matrix * expert_stride + column.to(tl.int64)[None, :] * output_stride
    right += depth[:, None]
    down = a_scales + place.to(tl.int64) * parts
    # ALIKE rows of b share a scale: 1, or 128 for scales of 128 x 128.
    across = b_scales + (matrix * tl.cdiv(outputs, ALIKE) + column // ALIKE) * parts
    # Loaded before the loop if they hold for the whole depth; with BLOCKS, once per tile.
    left_scale = tl.load(down, mask=inside & (expert < experts), other=0.0)
    right_scale = tl.load(across, mask=within & (expert < experts), other=0.0)
    # Sums of products are fp32, scaled in fp32, and rounded once.
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(0, terms, DEPTH):
        known = start + depth < terms
        one = tl.load(left + start, mask=inside[:, None] & known[None, :], other=0.0)
        other = tl.load(right + start, mask=known[:, None] & within[None, :], other=0.0)
        if BLOCKS:
            # A tile is as deep as the numbers that share a scale.
            left_scale = tl.load(down + start // DEPTH, mask=inside, other=0.0)
            right_scale = tl.load(across + start // DEPTH, mask=within, other=0.0)
        total = _add_product(total, one, other, left_scale, right_scale, BLOCKS, FEW_BITS)
    if not BLOCKS:
        # Scales that hold for the whole sum are applied once.
        total *= left_scale[:, None] * right_scale[None, :]
    at = out + place.to(tl.int64)[:, None] * outputs + column[None, :]
    tl.store(at, total.to(out.dtype.element_ty), mask=inside[:, None] & within[None, :])


@triton.jit
def _multiply_columns(
    a: tl.tensor,
    b: tl.tensor,
    a_scales: tl.tensor,
    b_scales: tl.tensor,
    ends: tl.tensor,
    grads: tl.tensor,
    experts: tl.tensor,
    outputs: tl.tensor,
    inputs: tl.tensor,
    spaced: tl.tensor,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    EXPERTS: tl.constexpr,
    BLOCKS: tl.constexpr,
    FEW_BITS: tl.constexpr,
    ADD: tl.constexpr,
) -> None:
    """grads[e] (+)= sum over the spaced places w of expert e of a[n, w] b[h, w], with scales."""
    high, wide = tl.cdiv(outputs, ROWS), tl.cdiv(inputs, COLUMNS)
    expert, tile = tl.program_id(0) // (high * wide), tl.program_id(0) % (high * wide)
    below, right = walk(tile, high, wide)
    row = below * ROWS + tl.arange(0, ROWS)
    column = right * COLUMNS + tl.arange(0, COLUMNS)
    inside, within = row < outputs, column < inputs
    # Tiles of 128 spaced places: padding is 0, so only whole tiles are read and depth needs no
    # mask.
    first, tiles = find_tiles(ends, expert, experts, DEPTH, EXPERTS)
    place = first * DEPTH + tl.arange(0, DEPTH)
    left = a + row.to(tl.int64)[:, None] * spaced + place[None, :]
    right = b + column.to(tl.int64)[None, :] * spaced + place[:, None]
    group = expert
    if BLOCKS:
        # With scales of blocks, one row of scales per 128 places; otherwise one per expert.
        group = first
    down = a_scales + group.to(tl.int64) * outputs + row
    across = b_scales + group.to(tl.int64) * inputs + column
    left_scale = tl.load(down, mask=inside, other=0.0)
    right_scale = tl.load(across, mask=within, other=0.0)
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for step in range(0, tiles):
        one = tl.load(left + step * DEPTH, mask=inside[:, None], other=0.0)
        other = tl.load(right + step * DEPTH, mask=within[None, :], other=0.0)
        if BLOCKS:
            left_scale = tl.load(down + step * outputs, mask=inside, other=0.0)
            right_scale = tl.load(across + step * inputs, mask=within, other=0.0)
        total = _add_product(total, one, other, left_scale, right_scale, BLOCKS, FEW_BITS)
    if not BLOCKS:
        total *= left_scale[:, None] * right_scale[None, :]
    at = grads + expert.to(tl.int64) * outputs * inputs + row[:, None] * inputs + column[None, :]
    written = inside[:, None] & within[None, :]
    if ADD:
        # Added in fp32 and rounded once. Only this program has the tile.
        total += tl.load(at, mask=written, other=0.0).to(tl.float32)
    tl.store(at, total.to(grads.dtype.element_ty), mask=written)


def _compute_expert_scales(
    x_PC: Tensor, ends_E: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return one scale per expert and one more for places beyond the last end, [E + 1]; and the
    expert of each place."""
    # The largest magnitude of each row; those of an expert's rows are then combined on the device.
    magnitude_P = quantize.launch_largest(x_PC, len(x_PC))
    place_P = torch.arange(len(x_PC), dtype=torch.int32, device=x_PC.device)
    # The number of ends at or before a place: E for places beyond the last.
    expert_P = torch.searchsorted(ends_E, place_P, right=True)
    magnitude_X = magnitude_P.new_zeros(len(ends_E) + 1)
    magnitude_X = magnitude_X.scatter_reduce(0, expert_P, magnitude_P, "amax")
    return quantize.scale_by(magnitude_X, dtype), expert_P


def launch_experts(x_PC: Tensor, ends_E: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Compute `run_reference_experts`."""
    x = x_PC if x_PC.stride(1) == 1 else x_PC.contiguous()
    scales_X, expert_P = _compute_expert_scales(x, ends_E, dtype)
    scales_P = scales_X[expert_P]
    return quantize.launch_quantise_by(x, scales_P, dtype), scales_P[:, None]


def launch_columns(
    x_PC: Tensor, ends_E: Tensor, dtype: torch.dtype, sharing: str
) -> tuple[Tensor, Tensor]:
    """Compute `run_reference_columns`."""
    x = x_PC if x_PC.stride(1) == 1 else x_PC.contiguous()
    (places, columns), experts = x.shape, len(ends_E)
    spaced, most = _count_spaced(places, experts), torch.finfo(dtype).max
    across = ceil_div(columns, _COLUMNS)
    tile: dict[str, Any] = {"MOST": most, "ROWS": SHARED, "COLUMNS": _COLUMNS}
    # With scales of blocks, the kernel finds and writes them while it has the tile.
    scales = x.new_empty(_count_scales(spaced, experts, sharing), columns, dtype=torch.float32)
    if sharing == "column":
        # A first pass for the scales: a column of an expert may be longer than a tile.
        given = x, ends_E, scales, columns, x.stride(0)
        launch(_find_largest_of_columns, (experts * across,), *given, **tile, warps=8)
    elif sharing == "expert":
        by_expert, _ = _compute_expert_scales(x, ends_E, dtype)
        scales.copy_(by_expert[:experts, None])
    out = torch.empty(columns, spaced, dtype=dtype, device=x.device)
    launch(
        _quantise_columns,
        (spaced // SHARED * across,),
        x,
        ends_E,
        None if sharing == "block" else scales,
        out,
        scales,
        places,
        experts,
        columns,
        spaced,
        x.stride(0),
        EXPERTS=next_power_of_2(experts + 1),
        **tile,
        warps=8,
    )
    return out, scales


def launch_multiply(
    a_PK: Tensor,
    b_ENK: Tensor,
    a_scales: Tensor,
    b_scales: Tensor,
    ends_E: Tensor,
    dtype: torch.dtype,
) -> Tensor:
    """Compute `run_reference`."""
    (places, inputs), (experts, outputs, _) = a_PK.shape, b_ENK.shape
    b = b_ENK if b_ENK.stride(2) == 1 else b_ENK.contiguous()
    out = torch.empty(places, outputs, dtype=dtype, device=a_PK.device)
    tiles, parts = TILES[read_generation(a_PK)], a_scales.shape[1]
    launch(
        _multiply,
        # Each expert may end with a partial tile, so this many suffice for any counts.
        ((ceil_div(places, tiles.rows) + experts) * ceil_div(outputs, tiles.columns),),
        a_PK.contiguous(),
        b,
        a_scales.contiguous(),
        b_scales.contiguous(),
        ends_E,
        out,
        places,
        experts,
        outputs,
        inputs,
        parts,
        *b.stride()[:2],
        ROWS=tiles.rows,
        COLUMNS=tiles.columns,
        DEPTH=tiles.depth,
        EXPERTS=next_power_of_2(experts + 1),
        ALIKE=1 if b_scales.shape[1] == outputs else SHARED,
        BLOCKS=parts > 1,
        # Units of generation 9 keep about 14 bits of a sum (DeepSeek-AI 2024).
        FEW_BITS=read_generation(a_PK) < 10,
        warps=tiles.warps,
        stages=tiles.stages,
    )
    return out


def launch_gradient(
    grads_ENH: Tensor,
    a_NW: Tensor,
    b_HW: Tensor,
    a_scales: Tensor,
    b_scales: Tensor,
    ends_E: Tensor,
    add: bool,
) -> None:
    """Compute `run_reference_gradient`."""
    experts, outputs, inputs = grads_ENH.shape
    tiles = TILES[read_generation(a_NW)]
    launch(
        _multiply_columns,
        (experts * ceil_div(outputs, tiles.rows) * ceil_div(inputs, tiles.columns),),
        *(t.contiguous() for t in (a_NW, b_HW, a_scales, b_scales)),
        ends_E,
        grads_ENH,
        experts,
        outputs,
        inputs,
        a_NW.shape[1],
        ROWS=tiles.rows,
        COLUMNS=tiles.columns,
        DEPTH=tiles.depth,
        EXPERTS=next_power_of_2(experts + 1),
        BLOCKS=len(a_scales) != experts,
        FEW_BITS=read_generation(a_NW) < 10,
        ADD=add,
        warps=tiles.warps,
        stages=tiles.stages,
    )


_experts_op = torch.library.custom_op(
    "megaframe::quantise_experts", launch_experts, mutates_args=()
)
_columns_op = torch.library.custom_op(
    "megaframe::quantise_columns", launch_columns, mutates_args=()
)
_multiply_op = torch.library.custom_op(
    "megaframe::grouped_scaled_product", launch_multiply, mutates_args=()
)
_gradient_op = torch.library.custom_op(
    "megaframe::grouped_scaled_gradient_", launch_gradient, mutates_args=("grads_ENH",)
)


@_experts_op.register_fake
def _(x_PC: Tensor, ends_E: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    scales = x_PC.new_empty(len(x_PC), 1, dtype=torch.float32)
    return x_PC.new_empty(x_PC.shape, dtype=dtype), scales


@_columns_op.register_fake
def _(x_PC: Tensor, ends_E: Tensor, dtype: torch.dtype, sharing: str) -> tuple[Tensor, Tensor]:
    (places, columns), experts = x_PC.shape, len(ends_E)
    spaced = _count_spaced(places, experts)
    shape = _count_scales(spaced, experts, sharing), columns
    scales = x_PC.new_empty(shape, dtype=torch.float32)
    return x_PC.new_empty(columns, spaced, dtype=dtype), scales


@_multiply_op.register_fake
def _(
    a_PK: Tensor,
    b_ENK: Tensor,
    a_scales: Tensor,
    b_scales: Tensor,
    ends_E: Tensor,
    dtype: torch.dtype,
) -> Tensor:
    return a_PK.new_empty(a_PK.shape[0], b_ENK.shape[1], dtype=dtype)


_direct_experts = bypass_dispatcher(_experts_op, launch_experts)
_direct_columns = bypass_dispatcher(_columns_op, launch_columns)
_direct_multiply = bypass_dispatcher(_multiply_op, launch_multiply)
_direct_gradient = bypass_dispatcher(_gradient_op, launch_gradient)


def run_experts(
    x_PC: Tensor, ends_E: Tensor, dtype: torch.dtype = torch.float8_e4m3fn
) -> tuple[Tensor, Tensor]:
    """Compute `run_reference_experts` in Triton."""
    return _direct_experts(x_PC, ends_E, dtype)


def run_columns(
    x_PC: Tensor,
    ends_E: Tensor,
    dtype: torch.dtype = torch.float8_e4m3fn,
    sharing: str = "column",
) -> tuple[Tensor, Tensor]:
    """Compute `run_reference_columns` in Triton."""
    return _direct_columns(x_PC, ends_E, dtype, sharing)


def run_triton(
    a_PK: Tensor,
    b_ENK: Tensor,
    a_scales: Tensor,
    b_scales: Tensor,
    ends_E: Tensor,
    dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """Compute `run_reference` in Triton."""
    return _direct_multiply(a_PK, b_ENK, a_scales, b_scales, ends_E, dtype)


def run_torch(
    a_PK: Tensor,
    b_ENK: Tensor,
    a_scales: Tensor,
    b_scales: Tensor,
    ends_E: Tensor,
    dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """Compute `run_reference` by torch's scaled grouped product, for scales of rows."""
    out = torch._scaled_grouped_mm(
        a_PK,
        b_ENK.transpose(1, 2),
        a_scales.flatten(),
        b_scales.flatten(1),
        offs=ends_E,
        out_dtype=dtype,
    )
    grouped_product.clear_op(out, ends_E)  # torch leaves rows beyond the last end uninitialised
    return out


def run_gradient(
    grads_ENH: Tensor,
    a_NW: Tensor,
    b_HW: Tensor,
    a_scales: Tensor,
    b_scales: Tensor,
    ends_E: Tensor,
    add: bool,
) -> Tensor:
    """Compute `run_reference_gradient` in Triton."""
    _direct_gradient(grads_ENH, a_NW, b_HW, a_scales, b_scales, ends_E, add)
    return grads_ENH


def _refuse_for_rounding(
    x_PC: Tensor,
    ends_E: Tensor,
    dtype: torch.dtype = torch.float8_e4m3fn,
    sharing: str = "column",
) -> str | None:
    if sharing not in SHARING:
        return f"{sharing!r} is none of {', '.join(SHARING)}"
    if ends_E.dtype != torch.int32:
        return f"ends are {ends_E.dtype}, not int32"
    return quantize.refuse_rounding(x_PC, dtype)


def _refuse_inputs(
    a: Tensor,
    b: Tensor,
    a_scales: Tensor,
    b_scales: Tensor,
    ends_E: Tensor,
    dtype: torch.dtype = torch.bfloat16,
) -> str | None:
    if ends_E.dtype != torch.int32:
        return f"ends are {ends_E.dtype}, not int32"
    if a.dtype not in TYPES or b.dtype not in TYPES:
        return f"operands are {a.dtype} and {b.dtype}, not of 8 bits"
    if dtype not in FLOATS:
        return f"results in {dtype} are left to the reference"
    return quantize.refuse_chip(a) or refuse_place(a) or refuse_types(a_scales, b_scales)


def _refuse_for_torch(
    a_PK: Tensor,
    b_ENK: Tensor,
    a_scales: Tensor,
    b_scales: Tensor,
    ends_E: Tensor,
    dtype: torch.dtype = torch.bfloat16,
) -> str | None:
    if not a_PK.is_cuda or read_capability(a_PK.device.index)[0] != 9:
        return "torch's scaled grouped product is known to run on generation 9 only"
    if a_scales.shape[1] > 1 or b_scales.shape[1] != b_ENK.shape[1]:
        return "torch's scaled grouped product takes one scale for a row"
    if (a_PK.dtype, b_ENK.dtype) != (torch.float8_e4m3fn,) * 2 or dtype != torch.bfloat16:
        return "torch's scaled grouped product takes e4m3, and gives bf16"
    if a_PK.shape[1] % 16 or b_ENK.shape[1] % 16:
        return "torch's scaled grouped product needs dims that 16 divides"
    if not a_PK.is_contiguous() or b_ENK.stride(2) != 1 or any(s % 16 for s in b_ENK.stride()[:2]):
        return "operands of torch's scaled grouped product lie together, by rows of whole 16 bytes"
    return _refuse_inputs(a_PK, b_ENK, a_scales, b_scales, ends_E, dtype)


def _refuse_for_gradient(
    grads_ENH: Tensor,
    a_NW: Tensor,
    b_HW: Tensor,
    a_scales: Tensor,
    b_scales: Tensor,
    ends_E: Tensor,
    add: bool,
) -> str | None:
    if not grads_ENH.is_contiguous():
        return "gradients do not lie together"
    return _refuse_inputs(a_NW, b_HW, a_scales, b_scales, ends_E, grads_ENH.dtype)


_missing = partial(check_triton, (3, 6))
QUANTISE_EXPERTS = Kernel(
    "quantise_experts",
    run_reference_experts,
    {"triton": Implementation("triton", run_experts, _missing, _refuse_for_rounding)},
    constant=1.0,
)
QUANTISE_COLUMNS = Kernel(
    "quantise_columns",
    run_reference_columns,
    {"triton": Implementation("triton", run_columns, _missing, _refuse_for_rounding)},
    constant=1.0,
)
KERNEL = Kernel(
    "grouped_scaled_product",
    run_reference,
    {
        "triton": Implementation("triton", run_triton, _missing, _refuse_inputs),
        "torch": Implementation("torch", run_torch, check_cuda, _refuse_for_torch),
    },
)
# There is no torch implementation: its product fails on the device if an expert has no rows.
GRADIENT = Kernel(
    "grouped_scaled_gradient",
    run_reference_gradient,
    {"triton": Implementation("triton", run_gradient, _missing, _refuse_for_gradient)},
)
