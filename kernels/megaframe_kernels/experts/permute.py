"""Moves rows of tokens to the places of their experts (`expert_order.py`), and back.

Shape legend: T tokens, K experts chosen by each, P = T K places, H hidden.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from megaframe_kernels.device import ceil_div, launch, next_power_of_2
from megaframe_kernels.direct import bypass_dispatcher
from megaframe_kernels.installed import require_nothing
from megaframe_kernels.kernel import Implementation, Kernel, refuse_types

_COLUMNS = 1024


def run_reference_permute(x_TH: Tensor, order_P: Tensor, places_TK: Tensor) -> Tensor:
    """Return each token's row at each of its places, [P, H]."""
    return x_TH[order_P.long() // max(places_TK.shape[1], 1)]


def run_reference_unpermute(
    y_PH: Tensor, weights_TK: Tensor | None, order_P: Tensor, places_TK: Tensor
) -> Tensor:
    """Return for each token the sum of the rows at its places times their weights.

    Args:
        y_PH: Rows in the order of experts.
        weights_TK: Weight of each choice, or None for 1.
        order_P: Choice at each place.
        places_TK: Place of each choice.

    Returns:
        [T, H], summed in at least fp32 and rounded once.
    """
    wide = torch.promote_types(y_PH.dtype, torch.float32)
    rows = y_PH[places_TK.long()].to(wide)
    if weights_TK is not None:
        rows = rows * weights_TK.to(wide)[..., None]
    return rows.sum(1).to(y_PH.dtype)


@triton.jit
def _gather(
    x: tl.tensor,
    order: tl.tensor,
    weights: tl.tensor,
    out: tl.tensor,
    width: tl.tensor,
    k: tl.tensor,
    stride: tl.tensor,
    COLUMNS: tl.constexpr,
) -> None:
    """out[p] = x[order[p] // k], times the weight of the choice if there are weights."""
    across = tl.cdiv(width, COLUMNS)
    place = (tl.program_id(0) // across).to(tl.int64)
    column = (tl.program_id(0) % across) * COLUMNS + tl.arange(0, COLUMNS)
    choice = tl.load(order + place)
    row = (choice // k).to(tl.int64)
    value = tl.load(x + row * stride + column, mask=column < width, other=0.0)
    if weights is not None:
        # Weighted in fp32 and rounded once.
        value = value.to(tl.float32) * tl.load(weights + choice).to(tl.float32)
    tl.store(out + place * width + column, value.to(out.dtype.element_ty), mask=column < width)


@triton.jit
def _combine(
    y: tl.tensor,
    weights: tl.tensor,
    places: tl.tensor,
    out: tl.tensor,
    width: tl.tensor,
    k: tl.tensor,
    stride: tl.tensor,
    COLUMNS: tl.constexpr,
) -> None:
    """out[t] = sum over j of weights[t, j] y[places[t, j]]."""
    across = tl.cdiv(width, COLUMNS)
    token = (tl.program_id(0) // across).to(tl.int64)
    column = (tl.program_id(0) % across) * COLUMNS + tl.arange(0, COLUMNS)
    # fp32, in the order of the choices: no atomics, so the sum is repeatable.
    total = tl.zeros([COLUMNS], tl.float32)
    for j in range(0, k):
        place = tl.load(places + token * k + j).to(tl.int64)
        # Each token gathers its rows, instead of each row being added to its token.
        row = tl.load(y + place * stride + column, mask=column < width, other=0.0).to(tl.float32)
        if weights is not None:
            row *= tl.load(weights + token * k + j).to(tl.float32)
        total += row
    tl.store(out + token * width + column, total.to(out.dtype.element_ty), mask=column < width)


@triton.jit
def _reduce_inner_product(
    d_out: tl.tensor,
    y: tl.tensor,
    places: tl.tensor,
    d_weights: tl.tensor,
    width: tl.tensor,
    k: tl.tensor,
    d_stride: tl.tensor,
    stride: tl.tensor,
    COLUMNS: tl.constexpr,
) -> None:
    """d_weights[t, j] = d_out[t] . y[places[t, j]]."""
    # One program per choice, with its whole row, so the sum has a fixed order.
    choice = tl.program_id(0).to(tl.int64)
    token, place = choice // k, tl.load(places + choice).to(tl.int64)
    total = tl.zeros([COLUMNS], tl.float32)
    for first in range(0, width, COLUMNS):
        column = first + tl.arange(0, COLUMNS)
        d_row = tl.load(d_out + token * d_stride + column, mask=column < width, other=0.0)
        row = tl.load(y + place * stride + column, mask=column < width, other=0.0)
        total += d_row.to(tl.float32) * row.to(tl.float32)
    tl.store(d_weights + choice, tl.sum(total, 0).to(d_weights.dtype.element_ty))


def _choose_columns(width: int) -> int:
    return min(_COLUMNS, next_power_of_2(max(width, 16)))


def _make_rows_adjacent(x: Tensor) -> Tensor:
    return x if x.stride(1) == 1 else x.contiguous()


def launch_gather(x_TH: Tensor, order_P: Tensor, weights: Tensor | None, k: int) -> Tensor:
    """Return the rows of x at their places, [P, H].

    Args:
        x_TH: The rows.
        order_P: The choice at each place.
        weights: Of the choices, by which rows are multiplied; None for 1.
        k: Experts of a row.
    """
    x, width = _make_rows_adjacent(x_TH), x_TH.shape[1]
    out = x.new_empty(order_P.shape[0], width)
    columns = _choose_columns(width)
    weights = None if weights is None else weights.contiguous()
    grid = (order_P.shape[0] * ceil_div(width, columns),)
    launch(_gather, grid, x, order_P, weights, out, width, k, x.stride(0), COLUMNS=columns)
    return out


def launch_combine(y_PH: Tensor, weights: Tensor | None, places_TK: Tensor) -> Tensor:
    """Return the sums of rows, [T, H].

    Args:
        y_PH: Rows at their places.
        weights: Of the choices, [T, K]; None for 1.
        places_TK: The place of each choice.
    """
    y, width = _make_rows_adjacent(y_PH), y_PH.shape[1]
    tokens, k = places_TK.shape
    out = y.new_empty(tokens, width)
    columns = _choose_columns(width)
    weights = None if weights is None else weights.contiguous()
    grid = (tokens * ceil_div(width, columns),)
    launch(_combine, grid, y, weights, places_TK, out, width, k, y.stride(0), COLUMNS=columns)
    return out


def launch_inner(d_out_TH: Tensor, y_PH: Tensor, places_TK: Tensor, like: Tensor) -> Tensor:
    """Return the gradient of the weights, [T, K].

    Args:
        d_out_TH: Gradient of the sums.
        y_PH: Rows at their places.
        places_TK: The place of each choice.
        like: The weights, for the type of the result.
    """
    d_out, y = _make_rows_adjacent(d_out_TH), _make_rows_adjacent(y_PH)
    d_weights = torch.empty_like(like, memory_format=torch.contiguous_format)
    width = y.shape[1]
    sizes = (width, places_TK.shape[1], d_out.stride(0), y.stride(0))
    columns = _choose_columns(width)
    arguments = (d_out, y, places_TK, d_weights)
    launch(_reduce_inner_product, (places_TK.numel(),), *arguments, *sizes, COLUMNS=columns)
    return d_weights


_gather_op = torch.library.custom_op("megaframe::expert_gather", launch_gather, mutates_args=())
_combine_op = torch.library.custom_op("megaframe::expert_combine", launch_combine, mutates_args=())
_inner_op = torch.library.custom_op("megaframe::expert_inner", launch_inner, mutates_args=())


@_gather_op.register_fake
def _(x_TH: Tensor, order_P: Tensor, weights: Tensor | None, k: int) -> Tensor:
    return x_TH.new_empty(order_P.shape[0], x_TH.shape[1])


@_combine_op.register_fake
def _(y_PH: Tensor, weights: Tensor | None, places_TK: Tensor) -> Tensor:
    return y_PH.new_empty(places_TK.shape[0], y_PH.shape[1])


@_inner_op.register_fake
def _(d_out_TH: Tensor, y_PH: Tensor, places_TK: Tensor, like: Tensor) -> Tensor:
    return torch.empty_like(like, memory_format=torch.contiguous_format)


gather = bypass_dispatcher(_gather_op, launch_gather)
combine = bypass_dispatcher(_combine_op, launch_combine)
_direct_inner = bypass_dispatcher(_inner_op, launch_inner)


class _Permute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TH: Tensor, order_P: Tensor, places_TK: Tensor) -> Tensor:
        ctx.save_for_backward(places_TK)
        return gather(x_TH, order_P, None, places_TK.shape[1])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        # Each token was copied to K places, so its gradient is the sum over them.
        return combine(gradients[0], None, *ctx.saved_tensors), None, None


class _Unpermute(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, y_PH: Tensor, weights_TK: Tensor | None, order_P: Tensor, places_TK: Tensor
    ) -> Tensor:
        ctx.save_for_backward(y_PH, weights_TK, order_P, places_TK)
        return combine(y_PH, weights_TK, places_TK)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        y, weights, order, places = ctx.saved_tensors
        # d_y[p] = weight d_out[t]: the same kernel as the permutation's, with weights.
        d_y = gather(gradients[0], order, weights, places.shape[1])
        d_weights = None
        if weights is not None and ctx.needs_input_grad[1]:
            d_weights = _direct_inner(gradients[0], y, places, weights)
        return d_y, d_weights, None, None


def _unpermute_refuses(y_PH: Tensor, weights_TK: Tensor | None, *_: Any) -> str | None:
    return refuse_types(y_PH, weights_TK)


def _permute_refuses(x_TH: Tensor, *_: Any) -> str | None:
    return refuse_types(x_TH)


PERMUTE = Kernel(
    "permute",
    run_reference_permute,
    {"triton": Implementation("triton", _Permute.apply, require_nothing, _permute_refuses)},
)
UNPERMUTE = Kernel(
    "unpermute",
    run_reference_unpermute,
    {"triton": Implementation("triton", _Unpermute.apply, require_nothing, _unpermute_refuses)},
)
