"""Quantisation of the rows of all experts to 8 bits in one launch, for grouped products.

Only numbers of one expert share a scale. Rows are quantised by the usual kernel
(`quantize.QUANTISE`), unless each expert has one scale. The gradient of a matrix is a sum over the
rows of its expert, and matrix units multiply 8-bit numbers only if the summed dimension is
contiguous. Columns are therefore written as rows, in which each expert starts at a multiple of 128.
The buffers have room for any division of the rows over experts, so the host needs no counts.

Shape legend: P places (rows in the order of experts), E experts, C columns, W = 128 (ceil(P / 128)
+ E) spaced places, S scales of a column.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from megaframe_kernels.device import ceil_div, launch, next_power_of_2
from megaframe_kernels.direct import bypass_dispatcher
from megaframe_kernels.experts.tiles import find_tile
from megaframe_kernels.fp8 import quantize
from megaframe_kernels.fp8.quantize import SHARED
from megaframe_kernels.fp8.quantize_device import read_magnitude_bits, round_to_fp8, scale_of
from megaframe_kernels.installed import check_triton
from megaframe_kernels.kernel import Implementation, Kernel

SHARING = ("expert", "column", "block")
"""Which numbers share a scale when columns are quantised: all of an expert, each column of an
expert, or every 128 numbers of a column."""
_COLUMNS = 64


def iterate_spans(ends_E: Tensor) -> Iterator[tuple[slice, slice]]:
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
    quantised = [quantize.run_reference(part, dtype) for part in parts]
    scales = [s.expand(len(part), 1) for part, (_, s) in zip(parts, quantised, strict=True)]
    # As bytes, so that concatenation need not know the 8-bit types.
    return torch.cat([q.view(torch.uint8) for q, _ in quantised]).view(dtype), torch.cat(scales)


def run_reference_columns(
    x_PC: Tensor,
    ends_E: Tensor,
    dtype: torch.dtype = torch.float8_e4m3fn,
    sharing: str = "column",
) -> tuple[Tensor, Tensor]:
    """Quantise the columns and write them as rows.

    Each expert's places start at a multiple of 128 and are followed by zeros.

    Args:
        x_PC: Rows in the order of experts.
        ends_E: Where each expert's places end.
        dtype: The 8-bit type.
        sharing: Which numbers share a scale, one of `SHARING`.

    Returns:
        The columns in 8 bits, [C, W], and fp32 scales [S, C] with S = E, or W / 128 for blocks.
    """
    places, columns = x_PC.shape
    spaced = _count_spaced(places, len(ends_E))
    out = x_PC.new_zeros(columns, spaced, dtype=dtype)
    no_maxima = x_PC.new_zeros(
        _count_scales(spaced, len(ends_E), sharing), columns, dtype=torch.float32
    )
    # An expert without rows has the scale of zeros.
    scales = quantize.scale_by(no_maxima, dtype)
    block = {"expert": None, "column": (1, 0), "block": (1, SHARED)}[sharing]
    for expert, (in_width, in_out) in enumerate(iterate_spans(ends_E)):
        if in_width.stop == in_width.start:
            continue
        quantised, by = quantize.run_reference(x_PC[in_width].t(), dtype, block)
        start = in_out.start
        out[:, start : start + quantised.shape[1]] = quantised
        rows = slice(expert, expert + 1)
        if sharing == "block":
            rows = slice(start // SHARED, in_out.stop // SHARED)
        scales[rows] = by.t()
    return out, scales


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
    scale = scale_of(tl.max(top, 0), MOST)
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
    in_width = column < width
    inside = ((place < end) & (expert < experts))[:, None] & in_width[None, :]
    at = x + place.to(tl.int64)[:, None] * stride + column[None, :]
    # Zeros between experts: they add nothing to the sum over places.
    value = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    if known is not None:
        scale = tl.load(
            known + expert * width + column, mask=in_width & (expert < experts), other=1.0
        )
    else:
        scale = scale_of(tl.max(read_magnitude_bits(value), 0), MOST)
        tl.store(scales + tile.to(tl.int64) * width + column, scale, mask=in_width)
    result = round_to_fp8(value, scale[None, :], MOST, out.dtype.element_ty)
    to = tile * ROWS + tl.arange(0, ROWS)
    # Columns become rows, because 8-bit products need the summed dimension contiguous.
    at = out + column.to(tl.int64)[:, None] * spaced + to[None, :]
    tl.store(at, tl.trans(result), mask=in_width[:, None])


def _compute_expert_scales(
    x_PC: Tensor, ends_E: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return one scale per expert and one more for places beyond the last end, [E + 1]; and the
    expert of each place."""
    # The largest magnitude of each row; those of an expert's rows are then combined on the device.
    magnitude_P = quantize.launch_largest(x_PC)
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
        arguments = x, ends_E, scales, columns, x.stride(0)
        launch(_find_largest_of_columns, (experts * across,), *arguments, **tile, warps=8)
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


_experts_op = torch.library.custom_op(
    "megaframe::quantise_experts", launch_experts, mutates_args=()
)
_columns_op = torch.library.custom_op(
    "megaframe::quantise_columns", launch_columns, mutates_args=()
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


_direct_experts = bypass_dispatcher(_experts_op, launch_experts)
_direct_columns = bypass_dispatcher(_columns_op, launch_columns)


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


_check_machine = partial(check_triton, (3, 6))
QUANTISE_EXPERTS = Kernel(
    "quantise_experts",
    run_reference_experts,
    {"triton": Implementation("triton", run_experts, _check_machine, _refuse_for_rounding)},
    constant=1.0,
)
QUANTISE_COLUMNS = Kernel(
    "quantise_columns",
    run_reference_columns,
    {"triton": Implementation("triton", run_columns, _check_machine, _refuse_for_rounding)},
    constant=1.0,
)
