"""Gradients of the experts' matrices in 8 bits: a sum over the rows of each expert, in one launch.

The columns of both operands come as rows from `grouped_quantize`, because matrix units multiply
8-bit numbers only if the summed dimension is contiguous.

Shape legend: E experts, N outputs, H inputs, W spaced places, S scales of a column.
"""

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from megaframe_kernels.device import ceil_div, launch, next_power_of_2, read_generation
from megaframe_kernels.direct import bypass_dispatcher
from megaframe_kernels.experts.tiles import find_tiles, walk
from megaframe_kernels.fp8 import scaled_product
from megaframe_kernels.fp8.grouped_fp8 import TILES, add_product, refuse_inputs
from megaframe_kernels.fp8.grouped_quantize import iterate_spans
from megaframe_kernels.fp8.quantize import SHARED
from megaframe_kernels.installed import check_triton
from megaframe_kernels.kernel import Implementation, Kernel


def run_reference(
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
        grads_ENH: Receives the gradients.
        a_NW: Gradients of the result in 8 bits, as from `run_reference_columns`.
        b_HW: Inputs in 8 bits, as from `run_reference_columns`.
        a_scales: [S, N].
        b_scales: [S, H].
        ends_E: Where the places of each expert end, without spacing.
        add: Whether the gradient is added to what is there.

    Returns:
        grads_ENH.
    """
    for expert, (_, places) in enumerate(iterate_spans(ends_E)):
        rows = slice(expert, expert + 1)
        if len(a_scales) != len(ends_E):
            rows = slice(places.start // SHARED, places.stop // SHARED)
        operands = a_NW[:, places], b_HW[:, places], a_scales[rows].t(), b_scales[rows].t()
        grad = grads_ENH[expert]
        # An expert without rows has a gradient of 0.
        gradient = torch.zeros_like(grad)
        if places.stop > places.start:
            gradient = scaled_product.run_reference(*operands, grad.dtype)
        grad.copy_(grad + gradient if add else gradient)
    return grads_ENH


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
        a_tile = tl.load(left + step * DEPTH, mask=inside[:, None], other=0.0)
        b_tile = tl.load(right + step * DEPTH, mask=within[None, :], other=0.0)
        if BLOCKS:
            left_scale = tl.load(down + step * outputs, mask=inside, other=0.0)
            right_scale = tl.load(across + step * inputs, mask=within, other=0.0)
        total = add_product(total, a_tile, b_tile, left_scale, right_scale, BLOCKS, FEW_BITS)
    if not BLOCKS:
        total *= left_scale[:, None] * right_scale[None, :]
    at = grads + expert.to(tl.int64) * outputs * inputs + row[:, None] * inputs + column[None, :]
    written = inside[:, None] & within[None, :]
    if ADD:
        # Added in fp32 and rounded once. Only this program has the tile.
        total += tl.load(at, mask=written, other=0.0).to(tl.float32)
    tl.store(at, total.to(grads.dtype.element_ty), mask=written)


def launch_gradient(
    grads_ENH: Tensor,
    a_NW: Tensor,
    b_HW: Tensor,
    a_scales: Tensor,
    b_scales: Tensor,
    ends_E: Tensor,
    add: bool,
) -> None:
    """Compute `run_reference`, whose arguments these are."""
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


_gradient_op = torch.library.custom_op(
    "megaframe::grouped_scaled_gradient_", launch_gradient, mutates_args=("grads_ENH",)
)
_direct_gradient = bypass_dispatcher(_gradient_op, launch_gradient)


def run_triton(
    grads_ENH: Tensor,
    a_NW: Tensor,
    b_HW: Tensor,
    a_scales: Tensor,
    b_scales: Tensor,
    ends_E: Tensor,
    add: bool,
) -> Tensor:
    """Compute `run_reference` in Triton."""
    _direct_gradient(grads_ENH, a_NW, b_HW, a_scales, b_scales, ends_E, add)
    return grads_ENH


def _refuse_arguments(
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
    return refuse_inputs(a_NW, b_HW, a_scales, b_scales, ends_E, grads_ENH.dtype)


# There is no torch implementation: its product fails on the device if an expert has no rows.
KERNEL = Kernel(
    "grouped_scaled_gradient",
    run_reference,
    {
        "triton": Implementation(
            "triton", run_triton, partial(check_triton, (3, 6)), _refuse_arguments
        )
    },
)
