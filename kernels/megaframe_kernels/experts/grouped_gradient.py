"""Gradient of the experts' matrices: each expert's rows of two matrices, multiplied in one launch.

The gradient can be added to what is there, in higher precision than that of the rows. Shape
legend: P places (rows in the order of experts), E experts, N outputs, H inputs.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from megaframe_kernels.device import ceil_div, launch, read_capability, read_generation
from megaframe_kernels.device_math import multiply_add
from megaframe_kernels.direct import bypass_dispatcher
from megaframe_kernels.experts.tiles import TILES, Tiles, choose_tiles, walk
from megaframe_kernels.installed import check_cuda, check_triton, choose_for_triton
from megaframe_kernels.kernel import Implementation, Kernel, refuse_types

_ADDING = {generation: replace(tiles, columns=128) for generation, tiles in TILES.items()}
_ADDING[9] = choose_for_triton(_ADDING[9], before_3_7=replace(_ADDING[9], rows=64, columns=256))
"""Tiles of sums that are added to what is there, for 16-bit types, by generation of the chip. The
old values take as many registers as the sums, so they are smaller than those of `TILES`."""


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


def make_adjacent(x: Tensor) -> Tensor:
    """Return x with the elements of its last dim adjacent in memory."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def launch_weight_gradient(
    d_y: Tensor,
    x: Tensor,
    weights_ENH: Tensor,
    ends_E: Tensor,
    tiles: Tiles | None = None,
) -> Tensor:
    """Return the gradient of the weights, [E, N, H].

    Args:
        d_y: Gradient of the product, [P, N].
        x: The rows, [P, H].
        weights_ENH: The weights; give shape and type of the result.
        ends_E: Where each expert's places end.
        tiles: Sizes of tiles; None for those of this type and chip.
    """
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
        d_y: Gradient of the result, [P, N], in the order of experts.
        x: Rows [P, H], in the order of experts.
        ends_E: Where each expert's places end, int32.
        add: Whether the gradient is added to what is there.
        tiles: By default those of `TILES`, with `add` smaller ones.
    """
    d_y, x = make_adjacent(d_y), make_adjacent(x)
    experts, outputs, inputs = d_weights.shape
    if add and tiles is None and x.dtype != torch.float32:
        tiles = _ADDING[read_generation(x)]
    tiles, precision = choose_tiles(x, tiles)
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


@torch.library.custom_op("megaframe::grouped_weight_gradient", mutates_args=())
def _weight_op(d_y: Tensor, x: Tensor, weights_ENH: Tensor, ends_E: Tensor) -> Tensor:
    return launch_weight_gradient(d_y, x, weights_ENH, ends_E)


def _add_gradient(grads_ENH: Tensor, d_y: Tensor, x: Tensor, ends_E: Tensor, add: bool) -> None:
    launch_weight_gradient_into(grads_ENH, d_y, x, ends_E, add=add)


_gradient_op = torch.library.custom_op(
    "megaframe::grouped_gradient_", _add_gradient, mutates_args=("grads_ENH",)
)
_direct_gradient = bypass_dispatcher(_gradient_op, _add_gradient)


@_weight_op.register_fake
def _(d_y: Tensor, x: Tensor, weights_ENH: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(weights_ENH, memory_format=torch.contiguous_format)


compute_weight_gradient = bypass_dispatcher(_weight_op, launch_weight_gradient)


def run_reference(
    grads_ENH: Tensor, d_y_PN: Tensor, x_PH: Tensor, ends_E: Tensor, add: bool
) -> Tensor:
    """grads[e] = sum over the places of e of d_y[p]^T x[p], in place; with `add`, grads[e] += that.

    Args:
        grads_ENH: Receives the gradients; may be of higher precision than the rows.
        d_y_PN: Gradient of the result, in the order of experts.
        x_PH: Rows in the order of experts.
        ends_E: Where each expert's places end.
        add: Whether the gradient is added to what is there.

    Returns:
        grads_ENH.
    """
    start = 0
    for grad, end in zip(grads_ENH, ends_E.tolist(), strict=True):
        gradient = d_y_PN[start:end].to(grad.dtype).t() @ x_PH[start:end].to(grad.dtype)
        grad.copy_(grad + gradient if add else gradient)
        start = end
    return grads_ENH


def run_triton(
    grads_ENH: Tensor, d_y_PN: Tensor, x_PH: Tensor, ends_E: Tensor, add: bool
) -> Tensor:
    """Compute the reference in Triton. The gradient never exists in low precision."""
    _direct_gradient(grads_ENH, d_y_PN, x_PH, ends_E, add)
    return grads_ENH


def run_torch(grads_ENH: Tensor, d_y_PN: Tensor, x_PH: Tensor, ends_E: Tensor, add: bool) -> Tensor:
    """Compute the reference by torch's grouped product, whose result has the type of the rows."""
    # In the type of the rows: it is rounded once more than in the Triton kernel.
    gradient = torch._grouped_mm(d_y_PN.t(), x_PH, offs=ends_E)
    return grads_ENH.add_(gradient) if add else grads_ENH.copy_(gradient)


def _refuse_inputs(
    grads_ENH: Tensor, d_y_PN: Tensor, x_PH: Tensor, ends_E: Tensor, add: bool
) -> str | None:
    if not grads_ENH.is_contiguous():
        return "gradients are not contiguous"
    if ends_E.dtype != torch.int32 or d_y_PN.dtype != x_PH.dtype:
        return f"ends are {ends_E.dtype}, not int32, or rows {d_y_PN.dtype} and {x_PH.dtype}"
    return refuse_types(grads_ENH, d_y_PN)


def _refuse_for_torch(grads_ENH: Tensor, d_y_PN: Tensor, x_PH: Tensor, *_: Any) -> str | None:
    return refuse_place_for_torch(d_y_PN) or refuse_strides_for_torch(d_y_PN, x_PH)


def refuse_place_for_torch(x: Tensor) -> str | None:
    """Return why torch's grouped product is not used for this type and device, or None."""
    if not x.is_cuda or x.dtype != torch.bfloat16:
        return "torch's grouped product takes bf16 on a GPU"
    if read_capability(x.device.index)[0] not in (9, 10):
        return "torch's grouped product waits for the device unless that is of generation 9 or 10"
    return None


def refuse_strides_for_torch(*matrices: Tensor) -> str | None:
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
    "grouped_gradient",
    run_reference,
    {
        "triton": Implementation(
            "triton", run_triton, partial(check_triton, (3, 6)), _refuse_inputs
        ),
        "torch": Implementation("torch", run_torch, check_cuda, _refuse_for_torch),
    },
)
