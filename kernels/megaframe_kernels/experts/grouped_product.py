"""Grouped matrix product: each expert's rows times its own matrix, in one launch.

Tiles are assigned on the device, from where the experts' rows end, so the host never waits to learn
how many tokens an expert got. Shape legend: P places (rows in the order of experts), E
experts, N outputs, H inputs.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from megaframe_kernels.device import ceil_div, launch, next_power_of_2
from megaframe_kernels.device_math import multiply_add
from megaframe_kernels.direct import bypass_dispatcher
from megaframe_kernels.experts.grouped_gradient import (
    compute_weight_gradient,
    make_adjacent,
    refuse_place_for_torch,
    refuse_strides_for_torch,
)
from megaframe_kernels.experts.tiles import Tiles, choose_tiles, find_tile, walk
from megaframe_kernels.installed import check_cuda, check_triton
from megaframe_kernels.kernel import Implementation, Kernel, refuse_types

_CLEARED = 64


def run_reference(x_PH: Tensor, weights_ENH: Tensor, ends_E: Tensor) -> Tensor:
    """y[p] = x[p] weights[e]^T for the expert e to which place p belongs.

    Args:
        x_PH: The rows.
        weights_ENH: One matrix per expert.
        ends_E: Where each expert's places end; places beyond the last end give 0.

    Returns:
        y [P, N].
    """
    # Masked, so that places beyond the last end keep the 0 that `out` starts with.
    place = torch.arange(x_PH.shape[0], device=x_PH.device)
    out = x_PH.new_zeros(x_PH.shape[0], weights_ENH.shape[1])
    start = 0
    for weight, end in zip(weights_ENH, ends_E.tolist(), strict=True):
        inside = (place >= start) & (place < end)
        out = out + torch.where(inside[:, None], x_PH, 0.0) @ weight.t()
        start = end
    return out


@triton.jit
def _multiply(
    x: tl.tensor,
    weights: tl.tensor,
    ends: tl.tensor,
    out: tl.tensor,
    places: tl.tensor,
    experts: tl.tensor,
    outputs: tl.tensor,
    inputs: tl.tensor,
    x_stride: tl.tensor,
    expert_stride: tl.tensor,
    output_stride: tl.tensor,
    input_stride: tl.tensor,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    EXPERTS: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    """out[p] = x[p] weights[e]^T for a tile of places of one expert."""
    across = tl.cdiv(outputs, COLUMNS)
    # Tiles of the same rows and matrices run at the same time, so the cache serves both operands.
    tile, right = walk(tl.program_id(0), tl.num_programs(0) // across, across)
    expert, first, end = find_tile(ends, tile, experts, places, ROWS, EXPERTS)
    # The grid is an upper bound, because the host does not know the counts. Programs beyond the
    # last tile end here.
    if expert > experts:
        return
    # The extra expert has the places beyond the last end: it sums nothing, so they become 0.
    terms = tl.where(expert < experts, inputs, 0)
    place = first + tl.arange(0, ROWS)
    inside = place < end
    row = place.to(tl.int64)
    column = right * COLUMNS + tl.arange(0, COLUMNS)
    depth = tl.arange(0, DEPTH)
    # 64-bit: all matrices together may exceed 32 bits of offsets.
    matrix = weights + expert.to(tl.int64) * expert_stride
    left = x + row[:, None] * x_stride + depth[None, :]
    right = matrix + column[None, :] * output_stride + depth[:, None] * input_stride
    # fp32 over the whole depth, rounded once.
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(0, terms, DEPTH):
        in_depth = start + depth < terms
        a = tl.load(left + start, mask=inside[:, None] & in_depth[None, :], other=0.0)
        # Both operands are 0 beyond the depth, so that 0 is never multiplied by garbage.
        within = in_depth[:, None] & (column[None, :] < outputs)
        b = tl.load(right + start * input_stride, mask=within, other=0.0)
        total = multiply_add(a, b, total, PRECISION)
    at = out + row[:, None] * outputs + column[None, :]
    written = inside[:, None] & (column[None, :] < outputs)
    tl.store(at, total.to(out.dtype.element_ty), mask=written)


@triton.jit
def _clear(
    out: tl.tensor,
    ends: tl.tensor,
    experts: tl.tensor,
    places: tl.tensor,
    outputs: tl.tensor,
    stride: tl.tensor,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    """out[p] = 0 for the places p beyond the last end."""
    first = tl.program_id(0) * ROWS
    # The last end: beyond it no expert has rows.
    end = tl.load(ends + experts - 1)
    if first + ROWS <= end:
        return
    place = first + tl.arange(0, ROWS)
    beyond = (place >= end) & (place < places)
    row = out + place.to(tl.int64)[:, None] * stride
    zeros = tl.zeros([ROWS, COLUMNS], out.dtype.element_ty)
    for start in range(0, outputs, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        tl.store(row + column[None, :], zeros, mask=beyond[:, None] & (column[None, :] < outputs))


def launch_multiply(
    x_PH: Tensor, weights_ENH: Tensor, ends_E: Tensor, tiles: Tiles | None = None
) -> Tensor:
    """Multiply the rows of all experts in one launch.

    Args:
        x_PH: The rows.
        weights_ENH: One matrix per expert; may be a transposed view.
        ends_E: Where each expert's places end, int32.
        tiles: By default those of `TILES`.

    Returns:
        y [P, N].
    """
    x, places = make_adjacent(x_PH), x_PH.shape[0]
    experts, outputs, inputs = weights_ENH.shape
    out = x.new_empty(places, outputs)
    tiles, precision = choose_tiles(x, tiles)
    launch(
        _multiply,
        # Each expert may end with a partial tile, so this many tiles suffice for any counts.
        ((ceil_div(places, tiles.rows) + experts) * ceil_div(outputs, tiles.columns),),
        x,
        weights_ENH,
        ends_E,
        out,
        places,
        experts,
        outputs,
        inputs,
        x.stride(0),
        # All three strides, so a transposed view needs no copy.
        *weights_ENH.stride(),
        ROWS=tiles.rows,
        COLUMNS=tiles.columns,
        DEPTH=tiles.depth,
        # One more, for the places beyond the last end.
        EXPERTS=next_power_of_2(experts + 1),
        PRECISION=precision,
        warps=tiles.warps,
        stages=tiles.stages,
    )
    return out


def launch_clear(out_PN: Tensor, ends_E: Tensor) -> None:
    """Write zeros to the rows beyond the last end."""
    places, outputs = out_PN.shape
    tile = {"ROWS": _CLEARED, "COLUMNS": _CLEARED}
    arguments = (out_PN, ends_E, ends_E.shape[0], places, outputs, out_PN.stride(0))
    launch(_clear, (ceil_div(places, _CLEARED),), *arguments, **tile)


@torch.library.custom_op("megaframe::grouped_product", mutates_args=())
def _multiply_op(x_PH: Tensor, weights_ENH: Tensor, ends_E: Tensor) -> Tensor:
    return launch_multiply(x_PH, weights_ENH, ends_E)


_clear_op = torch.library.custom_op(
    "megaframe::grouped_clear_", launch_clear, mutates_args=("out_PN",)
)
clear = bypass_dispatcher(_clear_op, launch_clear)


@_multiply_op.register_fake
def _(x_PH: Tensor, weights_ENH: Tensor, ends_E: Tensor) -> Tensor:
    return x_PH.new_empty(x_PH.shape[0], weights_ENH.shape[1])


_direct_multiply = bypass_dispatcher(_multiply_op, launch_multiply)


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
        ctx.save_for_backward(x, weights, ends)
        return _direct_multiply(x, weights, ends)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, weights, ends = ctx.saved_tensors
        d_y, d_x, d_weights = gradients[0], None, None
        if ctx.needs_input_grad[0]:
            d_x = _direct_multiply(d_y, weights.transpose(1, 2), ends)
        if ctx.needs_input_grad[1]:
            d_weights = compute_weight_gradient(d_y, x, weights, ends)
        return d_x, d_weights, None


def run_triton(x_PH: Tensor, weights_ENH: Tensor, ends_E: Tensor) -> Tensor:
    """Compute the reference in Triton."""
    return _Product.apply(x_PH, weights_ENH, ends_E)


def _multiply_by_torch(x: Tensor, weights_ENH: Tensor, ends_E: Tensor) -> Tensor:
    out = torch._grouped_mm(x, weights_ENH.transpose(1, 2), offs=ends_E)
    clear(out, ends_E)  # torch leaves rows beyond the last end uninitialised
    return out


class _TorchProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
        ctx.save_for_backward(x, weights, ends)
        return _multiply_by_torch(x, weights, ends)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, weights, ends = ctx.saved_tensors
        # Autograd may pass an expanded view, whose strides torch's product does not take.
        d_y = gradients[0].contiguous()
        d_x = d_weights = None
        if ctx.needs_input_grad[0]:
            d_x = _multiply_by_torch(d_y, weights.transpose(1, 2), ends)
        if ctx.needs_input_grad[1]:
            d_weights = torch._grouped_mm(d_y.t(), x, offs=ends)
        return d_x, d_weights, None


def run_torch(x_PH: Tensor, weights_ENH: Tensor, ends_E: Tensor) -> Tensor:
    """Compute the reference by torch's grouped product."""
    return _TorchProduct.apply(x_PH, weights_ENH, ends_E)


def _refuse_inputs(x_PH: Tensor, weights_ENH: Tensor, ends_E: Tensor) -> str | None:
    if ends_E.dtype != torch.int32:
        return f"ends must be int32, not {ends_E.dtype}"
    if x_PH.dtype != weights_ENH.dtype:
        return f"rows in {x_PH.dtype} and weights in {weights_ENH.dtype}"
    return refuse_types(x_PH, weights_ENH)


def _refuse_for_torch(x_PH: Tensor, weights_ENH: Tensor, *_: Any) -> str | None:
    return refuse_place_for_torch(x_PH) or refuse_strides_for_torch(x_PH, weights_ENH)


KERNEL = Kernel(
    "grouped_product",
    run_reference,
    {
        "triton": Implementation(
            "triton", run_triton, partial(check_triton, (3, 6)), _refuse_inputs
        ),
        "torch": Implementation("torch", run_torch, check_cuda, _refuse_for_torch),
    },
)
