"""Grouped products in 8 bits: the rows and matrices of all experts are multiplied in one launch.

Every result is the same as from multiplying each expert on its own, because only numbers of one
expert share a scale (`grouped_quantize`).

Shape legend: P places (rows in the order of experts), E experts, K summed over, N outputs.
"""

from __future__ import annotations

from functools import partial

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
from megaframe_kernels.experts.tiles import Tiles, find_tile, walk
from megaframe_kernels.fp8 import quantize, scaled_product
from megaframe_kernels.fp8.grouped_quantize import iterate_spans
from megaframe_kernels.fp8.quantize import SHARED, TYPES
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


def run_reference(
    a_PK: Tensor,
    b_ENK: Tensor,
    a_scales: Tensor,
    b_scales: Tensor,
    ends_E: Tensor,
    dtype: torch.dtype = torch.bfloat16,
    fast: bool = False,
) -> Tensor:
    """y[p] = a[p] b[e]^T for the expert e to which place p belongs, rounded once to `dtype`.

    Args:
        a_PK: Rows in 8 bits.
        b_ENK: One matrix per expert, in 8 bits.
        a_scales: Per row, [P, 1], or per 128 elements of a row, [P, ceil(K / 128)].
        b_scales: Per row, [E, N, 1], or per 128 elements, [E, N or ceil(N / 128), ceil(K / 128)].
        ends_E: Where each expert's places end; places beyond the last end give 0.
        dtype: Type of the result.
        fast: As in `scaled_product.run_reference`.

    Returns:
        y [P, N].
    """
    y_PN = a_PK.new_zeros(a_PK.shape[0], b_ENK.shape[1], dtype=dtype)
    for expert, (rows, _) in enumerate(iterate_spans(ends_E)):
        if rows.stop > rows.start:
            operands = a_PK[rows], b_ENK[expert], a_scales[rows], b_scales[expert]
            y_PN[rows] = scaled_product.run_reference(*operands, dtype)
    return y_PN


@triton.jit
def add_product(
    total: tl.tensor,
    a: tl.tensor,
    b: tl.tensor,
    down: tl.tensor,
    across: tl.tensor,
    BLOCKS: tl.constexpr,
    FEW_BITS: tl.constexpr,
) -> tl.tensor:
    """Return total + a b.

    Args:
        total: The sum so far, fp32 [rows, columns].
        a: [rows, depth] in 8 bits.
        b: [depth, columns] in 8 bits.
        down: Scale of each row of a; read only with BLOCKS.
        across: Scale of each column of b; read only with BLOCKS.
        BLOCKS: Multiply a b by the scales of this part of the sum first.
        FEW_BITS: Matrix units keep few bits when they sum 8-bit numbers, as those of generation 9
            do. They then sum no more than the depth of a tile, and the sums of tiles are added
            outside of them.
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
        in_depth = start + depth < terms
        a_tile = tl.load(left + start, mask=inside[:, None] & in_depth[None, :], other=0.0)
        b_tile = tl.load(right + start, mask=in_depth[:, None] & within[None, :], other=0.0)
        if BLOCKS:
            # A tile is as deep as the numbers that share a scale.
            left_scale = tl.load(down + start // DEPTH, mask=inside, other=0.0)
            right_scale = tl.load(across + start // DEPTH, mask=within, other=0.0)
        total = add_product(total, a_tile, b_tile, left_scale, right_scale, BLOCKS, FEW_BITS)
    if not BLOCKS:
        # Scales that hold for the whole sum are applied once.
        total *= left_scale[:, None] * right_scale[None, :]
    at = out + place.to(tl.int64)[:, None] * outputs + column[None, :]
    tl.store(at, total.to(out.dtype.element_ty), mask=inside[:, None] & within[None, :])


def launch_multiply(
    a_PK: Tensor,
    b_ENK: Tensor,
    a_scales: Tensor,
    b_scales: Tensor,
    ends_E: Tensor,
    dtype: torch.dtype,
) -> Tensor:
    """Compute `run_reference`, whose arguments these are."""
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


_multiply_op = torch.library.custom_op(
    "megaframe::grouped_scaled_product", launch_multiply, mutates_args=()
)


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


_direct_multiply = bypass_dispatcher(_multiply_op, launch_multiply)


def run_triton(
    a_PK: Tensor,
    b_ENK: Tensor,
    a_scales: Tensor,
    b_scales: Tensor,
    ends_E: Tensor,
    dtype: torch.dtype = torch.bfloat16,
    fast: bool = False,
) -> Tensor:
    """Compute `run_reference` in Triton, whatever `fast` allows."""
    return _direct_multiply(a_PK, b_ENK, a_scales, b_scales, ends_E, dtype)


def run_torch(
    a_PK: Tensor,
    b_ENK: Tensor,
    a_scales: Tensor,
    b_scales: Tensor,
    ends_E: Tensor,
    dtype: torch.dtype = torch.bfloat16,
    fast: bool = False,
) -> Tensor:
    """Compute `run_reference` by torch's scaled grouped product, for scales of rows."""
    out = torch._scaled_grouped_mm(
        a_PK,
        b_ENK.transpose(1, 2),
        a_scales.flatten(),
        b_scales.flatten(1),
        offs=ends_E,
        out_dtype=dtype,
        use_fast_accum=fast,
    )
    grouped_product.clear(out, ends_E)  # torch leaves rows beyond the last end uninitialised
    return out


def refuse_inputs(
    a: Tensor,
    b: Tensor,
    a_scales: Tensor,
    b_scales: Tensor,
    ends_E: Tensor,
    dtype: torch.dtype = torch.bfloat16,
    fast: bool = False,
) -> str | None:
    """Return why the kernel cannot run with these arguments of `run_reference`, or None."""
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
    fast: bool = False,
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
    return refuse_inputs(a_PK, b_ENK, a_scales, b_scales, ends_E, dtype)


_check_machine = partial(check_triton, (3, 6))
KERNEL = Kernel(
    "grouped_scaled_product",
    run_reference,
    {
        "triton": Implementation("triton", run_triton, _check_machine, refuse_inputs),
        "torch": Implementation("torch", run_torch, check_cuda, _refuse_for_torch),
    },
)
