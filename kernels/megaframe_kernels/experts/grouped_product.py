"""Grouped matrix product: each expert's rows times its own matrix, in one launch.

Tiles are assigned on the device, from where the experts' rows end, so the host never waits to learn
how many tokens an expert got. Rows can be gathered from their tokens, and scattered to their
choices, within the kernel; each saves a pass over memory. Shape legend: T tokens, K experts chosen
by each, P = T K places (choices in the order of experts), E experts, N outputs, H inputs.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
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
from megaframe_kernels.device_math import multiply_add
from megaframe_kernels.direct import bypass_dispatcher
from megaframe_kernels.experts import permute
from megaframe_kernels.experts.tiles import find_tile, walk
from megaframe_kernels.installed import check_cuda, check_triton
from megaframe_kernels.kernel import Implementation, Kernel, refuse_types


@dataclass(frozen=True)
class Tiles:
    """Rows, columns and depth of a tile; warps and stages in Triton's sense."""

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int


TILES = {
    8: Tiles(128, 128, 64, 8, 3),
    9: Tiles(128, 256, 64, 8, 3),
    10: Tiles(128, 256, 64, 8, 3),
}
"""For 16-bit types, by generation of the chip."""
_COLUMNS_OF_ADDING = 128
_CLEARED = 64
_WIDE_NUMBERS = Tiles(32, 32, 32, 4, 2)
"""For fp32."""


def run_reference(
    x: Tensor,
    weights_ENH: Tensor,
    ends_E: Tensor,
    order_P: Tensor | None = None,
    places_TK: Tensor | None = None,
    *,
    gather: bool = False,
    scatter: bool = False,
) -> Tensor:
    """y[p] = x[p] weights[e]^T for the expert e to which place p belongs.

    Args:
        x: rows [P, H], or with `gather` tokens [T, H].
        weights_ENH: one matrix per expert.
        ends_E: where each expert's places end; places beyond the last end give 0.
        order_P: choice at each place, as in `permute.ExpertOrder`.
        places_TK: place of each choice.
        gather: place p reads x[order[p] // K].
        scatter: y[p] is written to y[order[p]], so that y is ordered by token and choice.

    Returns:
        y [P, N].
    """
    rows = x
    if gather and order_P is not None and places_TK is not None:
        rows = x[order_P.long() // max(places_TK.shape[1], 1)]
    # Masked, so that places beyond the last end keep the 0 that `out` starts with.
    place = torch.arange(rows.shape[0], device=rows.device)
    out = rows.new_zeros(rows.shape[0], weights_ENH.shape[1])
    start = 0
    for weight, end in zip(weights_ENH, ends_E.tolist(), strict=True):
        inside = (place >= start) & (place < end)
        out = out + torch.where(inside[:, None], rows, 0.0) @ weight.t()
        start = end
    if scatter and order_P is not None:
        return torch.zeros_like(out).index_copy(0, order_P.long(), out)
    return out


@triton.jit
def _multiply(
    x: tl.tensor,
    weights: tl.tensor,
    ends: tl.tensor,
    gather: tl.tensor,
    scatter: tl.tensor,
    out: tl.tensor,
    places: tl.tensor,
    experts: tl.tensor,
    outputs: tl.tensor,
    inputs: tl.tensor,
    chosen: tl.tensor,
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
    """out[scatter[p]] = x[gather[p] // chosen] weights[e]^T for a tile of places of one expert."""
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
    if gather is not None:
        # A choice is t K + k, so its token is the quotient.
        row = (tl.load(gather + place, mask=inside, other=0) // chosen).to(tl.int64)
    column = right * COLUMNS + tl.arange(0, COLUMNS)
    depth = tl.arange(0, DEPTH)
    # 64-bit: all matrices together may exceed 32 bits of offsets.
    matrix = weights + expert.to(tl.int64) * expert_stride
    left = x + row[:, None] * x_stride + depth[None, :]
    right = matrix + column[None, :] * output_stride + depth[:, None] * input_stride
    # fp32 over the whole depth, rounded once.
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(0, terms, DEPTH):
        known = start + depth < terms
        a = tl.load(left + start, mask=inside[:, None] & known[None, :], other=0.0)
        # Both operands are 0 beyond the depth, so that 0 is never multiplied by garbage.
        within = known[:, None] & (column[None, :] < outputs)
        b = tl.load(right + start * input_stride, mask=within, other=0.0)
        total = multiply_add(a, b, total, PRECISION)
    to = place.to(tl.int64)
    if scatter is not None:
        # Each choice has one place, so no two rows are written to the same one.
        to = tl.load(scatter + place, mask=inside, other=0).to(tl.int64)
    at = out + to[:, None] * outputs + column[None, :]
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


@triton.jit
def _multiply_transposed(
    d_y: tl.tensor,
    x: tl.tensor,
    ends: tl.tensor,
    d_weights: tl.tensor,
    outputs: tl.tensor,
    inputs: tl.tensor,
    d_stride: tl.tensor,
    x_stride: tl.tensor,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    PRECISION: tl.constexpr,
    ADD: tl.constexpr,
) -> None:
    """d_weights[e] = sum over the places of e of d_y[p]^T x[p], which is 0 for an expert without
    places. With ADD, d_weights += that."""
    down, across = tl.cdiv(outputs, ROWS), tl.cdiv(inputs, COLUMNS)
    expert, tile = tl.program_id(0) // (down * across), tl.program_id(0) % (down * across)
    below, right = walk(tile, down, across)
    output = below * ROWS + tl.arange(0, ROWS)
    column = right * COLUMNS + tl.arange(0, COLUMNS)
    start = 0
    if expert > 0:
        start = tl.load(ends + expert - 1)
    end = tl.load(ends + expert)
    # One program sums over all places of its expert, so the order of the sum is fixed.
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for first in range(start, end, DEPTH):
        place = first + tl.arange(0, DEPTH)
        inside = place < end
        row = place.to(tl.int64)
        # d_y is read transposed, [ROWS, DEPTH]; the sum is over places.
        at = d_y + row[None, :] * d_stride + output[:, None]
        a = tl.load(at, mask=inside[None, :] & (output[:, None] < outputs), other=0.0)
        at = x + row[:, None] * x_stride + column[None, :]
        b = tl.load(at, mask=inside[:, None] & (column[None, :] < inputs), other=0.0)
        total = multiply_add(a, b, total, PRECISION)
    at = expert.to(tl.int64) * outputs * inputs + output[:, None] * inputs + column[None, :]
    written = (output[:, None] < outputs) & (column[None, :] < inputs)
    if ADD:
        # Added in fp32 and rounded once to the gradient's type. Only this program has the tile, so
        # it can be read and written without atomics.
        total += tl.load(d_weights + at, mask=written, other=0.0).to(tl.float32)
    tl.store(d_weights + at, total.to(d_weights.dtype.element_ty), mask=written)


def _choose(x: Tensor, tiles: Tiles | None) -> tuple[Tiles, str]:
    wide = x.dtype == torch.float32
    chosen = _WIDE_NUMBERS if wide else TILES[read_generation(x)]
    # fp32 operands are not rounded to tf32; 16-bit operands ignore this option.
    return tiles or chosen, "ieee" if wide else "tf32"


def _make_adjacent(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def launch_multiply(
    x: Tensor,
    weights_ENH: Tensor,
    ends_E: Tensor,
    gather_P: Tensor | None,
    scatter_P: Tensor | None,
    chosen: int = 1,
    tiles: Tiles | None = None,
) -> Tensor:
    """Multiply the rows of all experts in one launch.

    Args:
        x: rows [P, H], or tokens [T, H] with `gather_P`.
        weights_ENH: one matrix per expert; may be a transposed view.
        ends_E: where each expert's places end, int32.
        gather_P: place p reads row gather[p] // chosen, unless it is None.
        scatter_P: place p writes row scatter[p], unless it is None.
        chosen: experts per token.
        tiles: by default those of `TILES`.

    Returns:
        y [P, N].
    """
    x = _make_adjacent(x)
    places = x.shape[0] if gather_P is None else gather_P.shape[0]
    experts, outputs, inputs = weights_ENH.shape
    out = x.new_empty(places, outputs)
    tiles, precision = _choose(x, tiles)
    launch(
        _multiply,
        # Each expert may end with a partial tile, so this many tiles suffice for any counts.
        ((ceil_div(places, tiles.rows) + experts) * ceil_div(outputs, tiles.columns),),
        x,
        weights_ENH,
        ends_E,
        gather_P,
        scatter_P,
        out,
        places,
        experts,
        outputs,
        inputs,
        chosen,
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
    given = (out_PN, ends_E, ends_E.shape[0], places, outputs, out_PN.stride(0))
    launch(_clear, (ceil_div(places, _CLEARED),), *given, **tile)


def launch_weight_gradient(
    d_y: Tensor,
    x: Tensor,
    weights_ENH: Tensor,
    ends_E: Tensor,
    tiles: Tiles | None = None,
) -> Tensor:
    """Return the gradient of the weights."""
    # Not zeros: the kernel writes every tile, also those of experts without rows.
    d_weights = torch.empty_like(weights_ENH, memory_format=torch.contiguous_format)
    launch_weight_gradient_into(d_weights, d_y, x, ends_E, add=False, tiles=tiles)
    return d_weights


def launch_weight_gradient_into(
    d_weights: Tensor,
    d_y: Tensor,
    x: Tensor,
    ends_E: Tensor,
    *,
    add: bool,
    tiles: Tiles | None = None,
) -> None:
    """Write the gradient of the weights to `d_weights`, or add it, in the type of `d_weights`.

    Args:
        d_weights: [E, N, H], contiguous.
        d_y: gradient of the result, [P, N], in the order of experts.
        x: rows [P, H], in the order of experts.
        ends_E: where each expert's places end, int32.
        add: whether the gradient is added to what is there.
        tiles: by default those of `TILES`, narrower with `add`.
    """
    d_y, x = _make_adjacent(d_y), _make_adjacent(x)
    experts, outputs, inputs = d_weights.shape
    if add and tiles is None and x.dtype != torch.float32:
        # The old values take as many registers as the sums, so tiles are narrower.
        tiles = replace(TILES[read_generation(x)], columns=_COLUMNS_OF_ADDING)
    tiles, precision = _choose(x, tiles)
    launch(
        _multiply_transposed,
        (experts * ceil_div(outputs, tiles.rows) * ceil_div(inputs, tiles.columns),),
        d_y,
        x,
        ends_E,
        d_weights,
        outputs,
        inputs,
        d_y.stride(0),
        x.stride(0),
        ROWS=tiles.rows,
        COLUMNS=tiles.columns,
        DEPTH=tiles.depth,
        PRECISION=precision,
        ADD=add,
        warps=tiles.warps,
        stages=tiles.stages,
    )


@torch.library.custom_op("megaframe::grouped_product", mutates_args=())
def _multiply_op(
    x: Tensor,
    weights_ENH: Tensor,
    ends_E: Tensor,
    gather_P: Tensor | None,
    scatter_P: Tensor | None,
    chosen: int,
) -> Tensor:
    return launch_multiply(x, weights_ENH, ends_E, gather_P, scatter_P, chosen)


@torch.library.custom_op("megaframe::grouped_weight_gradient", mutates_args=())
def _weight_op(d_y: Tensor, x: Tensor, weights_ENH: Tensor, ends_E: Tensor) -> Tensor:
    return launch_weight_gradient(d_y, x, weights_ENH, ends_E)


@torch.library.custom_op("megaframe::grouped_gradient_", mutates_args=("grads_ENH",))
def _gradient_op(grads_ENH: Tensor, d_y: Tensor, x: Tensor, ends_E: Tensor, add: bool) -> None:
    launch_weight_gradient_into(grads_ENH, d_y, x, ends_E, add=add)


clear_op = torch.library.custom_op(
    "megaframe::grouped_clear_", launch_clear, mutates_args=("out_PN",)
)


@_multiply_op.register_fake
def _(
    x: Tensor,
    weights_ENH: Tensor,
    ends_E: Tensor,
    gather_P: Tensor | None,
    scatter_P: Tensor | None,
    chosen: int,
) -> Tensor:
    places = x.shape[0] if gather_P is None else gather_P.shape[0]
    return x.new_empty(places, weights_ENH.shape[1])


@_weight_op.register_fake
def _(d_y: Tensor, x: Tensor, weights_ENH: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(weights_ENH, memory_format=torch.contiguous_format)


_direct_multiply = bypass_dispatcher(_multiply_op, launch_multiply)
_direct_weight = bypass_dispatcher(_weight_op, launch_weight_gradient)


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weights: Tensor,
        ends: Tensor,
        order: Tensor | None,
        places: Tensor | None,
        gather: bool,
        scatter: bool,
    ) -> Tensor:
        ctx.save_for_backward(x, weights, ends, order, places)
        ctx.chosen = 1 if places is None else max(places.shape[1], 1)
        ctx.gather, ctx.scatter = gather, scatter
        moved = order if gather else None, order if scatter else None
        return _direct_multiply(x, weights, ends, *moved, ctx.chosen)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, weights, ends, order, places = ctx.saved_tensors
        d_y, d_x, d_weights = gradients[0], None, None
        if ctx.scatter:
            # The gradient of a scatter is a gather: back to the order of experts.
            d_y = permute.gather(d_y, order, None, 1)
        if ctx.needs_input_grad[0]:
            d_x = _direct_multiply(d_y, weights.transpose(1, 2), ends, None, None, 1)
            # The choices of a token are summed in a fixed order.
            d_x = permute.combine(d_x, None, places) if ctx.gather else d_x
        if ctx.needs_input_grad[1]:
            # Rows are gathered first. The kernel reads each row once per tile of the other operand,
            # and for contiguous rows it needs no registers or loads for their places.
            x = permute.gather(x, order, None, ctx.chosen) if ctx.gather else x
            d_weights = _direct_weight(d_y, x, weights, ends)
        return d_x, d_weights, None, None, None, None, None


def run_triton(
    x: Tensor,
    weights_ENH: Tensor,
    ends_E: Tensor,
    order_P: Tensor | None = None,
    places_TK: Tensor | None = None,
    *,
    gather: bool = False,
    scatter: bool = False,
) -> Tensor:
    """Compute the reference in Triton."""
    return _Product.apply(x, weights_ENH, ends_E, order_P, places_TK, gather, scatter)


def run_reference_gradient(
    grads_ENH: Tensor, d_y_PN: Tensor, x_PH: Tensor, ends_E: Tensor, add: bool
) -> Tensor:
    """grads[e] = sum over the places of e of d_y[p]^T x[p], in place; with `add`, grads[e] += that.

    Args:
        grads_ENH: receives the gradients; may be of higher precision than the rows.
        d_y_PN: gradient of the result, in the order of experts.
        x_PH: rows in the order of experts.
        ends_E: where each expert's places end.
        add: whether the gradient is added to what is there.

    Returns:
        grads_ENH.
    """
    start = 0
    for grad, end in zip(grads_ENH, ends_E.tolist(), strict=True):
        made = d_y_PN[start:end].to(grad.dtype).t() @ x_PH[start:end].to(grad.dtype)
        grad.copy_(grad + made if add else made)
        start = end
    return grads_ENH


def run_triton_gradient(
    grads_ENH: Tensor, d_y_PN: Tensor, x_PH: Tensor, ends_E: Tensor, add: bool
) -> Tensor:
    """Compute the reference in Triton. The gradient never exists in low precision."""
    _gradient_op(grads_ENH, d_y_PN, x_PH, ends_E, add)
    return grads_ENH


def run_torch_gradient(
    grads_ENH: Tensor, d_y_PN: Tensor, x_PH: Tensor, ends_E: Tensor, add: bool
) -> Tensor:
    """Compute the reference by torch's grouped product, whose result has the type of the rows."""
    # In the type of the rows: it is rounded once more than in the Triton kernel.
    made = torch._grouped_mm(d_y_PN.t(), x_PH, offs=ends_E)
    return grads_ENH.add_(made) if add else grads_ENH.copy_(made)


def _multiply_by_torch(x: Tensor, weights_ENH: Tensor, ends_E: Tensor) -> Tensor:
    out = torch._grouped_mm(x, weights_ENH.transpose(1, 2), offs=ends_E)
    clear_op(out, ends_E)  # torch leaves rows beyond the last end uninitialised
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


def run_torch(
    x: Tensor,
    weights_ENH: Tensor,
    ends_E: Tensor,
    order_P: Tensor | None = None,
    places_TK: Tensor | None = None,
    *,
    gather: bool = False,
    scatter: bool = False,
) -> Tensor:
    """Compute the reference by torch's grouped product, with separate passes that move rows."""
    if gather and order_P is not None and places_TK is not None:
        # A pass over memory that the Triton kernel saves.
        x = x.index_select(0, order_P // max(places_TK.shape[1], 1))
    out = _TorchProduct.apply(x, weights_ENH, ends_E)
    if scatter and order_P is not None:
        return torch.empty_like(out).index_copy(0, order_P.long(), out)
    return out


def _refuse_inputs(
    x: Tensor,
    weights_ENH: Tensor,
    ends_E: Tensor,
    order_P: Tensor | None = None,
    places_TK: Tensor | None = None,
    *,
    gather: bool = False,
    scatter: bool = False,
) -> str | None:
    given = (ends_E, order_P, places_TK)
    if any(t is not None and t.dtype != torch.int32 for t in given):
        return "ends, order and places must be int32"
    if (gather or scatter) and (order_P is None or places_TK is None):
        return "rows can be moved only by an order and places"
    if x.dtype != weights_ENH.dtype:
        return f"rows in {x.dtype} and weights in {weights_ENH.dtype}"
    return refuse_types(x, weights_ENH)


def _refuse_for_gradient(
    grads_ENH: Tensor, d_y_PN: Tensor, x_PH: Tensor, ends_E: Tensor, add: bool
) -> str | None:
    if not grads_ENH.is_contiguous():
        return "gradients are not contiguous"
    if ends_E.dtype != torch.int32 or d_y_PN.dtype != x_PH.dtype:
        return f"ends are {ends_E.dtype}, not int32, or rows {d_y_PN.dtype} and {x_PH.dtype}"
    return refuse_types(grads_ENH, d_y_PN)


def _refuse_for_torch_gradient(
    grads_ENH: Tensor, d_y_PN: Tensor, x_PH: Tensor, *_: Any
) -> str | None:
    return _refuse_place_for_torch(d_y_PN) or _refuse_strides_for_torch(d_y_PN, x_PH)


def _refuse_for_torch(x: Tensor, weights_ENH: Tensor, *_: Any, **__: Any) -> str | None:
    return _refuse_place_for_torch(x) or _refuse_strides_for_torch(x, weights_ENH)


def _refuse_place_for_torch(x: Tensor) -> str | None:
    if not x.is_cuda or x.dtype != torch.bfloat16:
        return "torch's grouped product takes bf16 on a GPU"
    if read_capability(x.device.index)[0] not in (9, 10):
        return "torch's grouped product waits for the device unless that is of generation 9 or 10"
    return None


def _refuse_strides_for_torch(*matrices: Tensor) -> str | None:
    """Return why torch cannot take these matrices [.., H] or [E, N, H], or None. Their rows or
    columns must be contiguous and start at multiples of 16 bytes, and so must those of the product
    and of the gradients."""
    for x in matrices:
        columns, (down, across) = x.shape[-1], x.stride()[-2:]
        if across != 1:
            columns, down, across = x.shape[-2], across, down
        shifts = (*x.shape[1:], down, x.storage_offset())
        uneven = any(shift * x.element_size() % 16 for shift in shifts)
        if across != 1 or down < columns or uneven:
            return f"torch's grouped product needs strides of whole 16 bytes, not {x.stride()}"
    return None


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
GRADIENT = Kernel(
    "grouped_gradient",
    run_reference_gradient,
    {
        "triton": Implementation(
            "triton", run_triton_gradient, partial(check_triton, (3, 6)), _refuse_for_gradient
        ),
        "torch": Implementation(
            "torch", run_torch_gradient, check_cuda, _refuse_for_torch_gradient
        ),
    },
)
