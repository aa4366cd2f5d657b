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


def run_reference_unpermute(y_PH: Tensor, order_P: Tensor, places_TK: Tensor) -> Tensor:
    """Return for each token the sum of the rows at its places.

    Args:
        y_PH: Rows in the order of experts.
        order_P: Choice at each place.
        places_TK: Place of each choice.

    Returns:
        [T, H], summed in at least fp32 and rounded once.
    """
    wide = torch.promote_types(y_PH.dtype, torch.float32)
    return y_PH[places_TK.long()].to(wide).sum(1).to(y_PH.dtype)


@triton.jit
def _gather(
    x: tl.tensor,
    order: tl.tensor,
    out: tl.tensor,
    width: tl.tensor,
    k: tl.tensor,
    stride: tl.tensor,
    COLUMNS: tl.constexpr,
) -> None:
    """out[p] = x[order[p] // k]."""
    across = tl.cdiv(width, COLUMNS)
    place = (tl.program_id(0) // across).to(tl.int64)
    column = (tl.program_id(0) % across) * COLUMNS + tl.arange(0, COLUMNS)
    row = (tl.load(order + place) // k).to(tl.int64)
    value = tl.load(x + row * stride + column, mask=column < width, other=0.0)
    tl.store(out + place * width + column, value, mask=column < width)


@triton.jit
def _combine(
    y: tl.tensor,
    places: tl.tensor,
    out: tl.tensor,
    width: tl.tensor,
    k: tl.tensor,
    stride: tl.tensor,
    COLUMNS: tl.constexpr,
) -> None:
    """out[t] = sum over j of y[places[t, j]]."""
    across = tl.cdiv(width, COLUMNS)
    token = (tl.program_id(0) // across).to(tl.int64)
    column = (tl.program_id(0) % across) * COLUMNS + tl.arange(0, COLUMNS)
    # fp32, in the order of the choices: no atomics, so the sum is repeatable.
    total = tl.zeros([COLUMNS], tl.float32)
    for j in range(0, k):
        place = tl.load(places + token * k + j).to(tl.int64)
        # Each token gathers its rows, instead of each row being added to its token.
        row = tl.load(y + place * stride + column, mask=column < width, other=0.0)
        total += row.to(tl.float32)
    tl.store(out + token * width + column, total.to(out.dtype.element_ty), mask=column < width)


def _choose_columns(width: int) -> int:
    return min(_COLUMNS, next_power_of_2(max(width, 16)))


def _make_rows_adjacent(x: Tensor) -> Tensor:
    return x if x.stride(1) == 1 else x.contiguous()


def launch_gather(x_TH: Tensor, order_P: Tensor, k: int) -> Tensor:
    """Return the rows of x at their places, [P, H].

    Args:
        x_TH: The rows.
        order_P: The choice at each place.
        k: Experts of a row.
    """
    x, width = _make_rows_adjacent(x_TH), x_TH.shape[1]
    out = x.new_empty(order_P.shape[0], width)
    columns = _choose_columns(width)
    grid = (order_P.shape[0] * ceil_div(width, columns),)
    launch(_gather, grid, x, order_P, out, width, k, x.stride(0), COLUMNS=columns)
    return out


def launch_combine(y_PH: Tensor, places_TK: Tensor) -> Tensor:
    """Return the sums of rows, [T, H].

    Args:
        y_PH: Rows at their places.
        places_TK: The place of each choice.
    """
    y, width = _make_rows_adjacent(y_PH), y_PH.shape[1]
    tokens, k = places_TK.shape
    out = y.new_empty(tokens, width)
    columns = _choose_columns(width)
    grid = (tokens * ceil_div(width, columns),)
    launch(_combine, grid, y, places_TK, out, width, k, y.stride(0), COLUMNS=columns)
    return out


_gather_op = torch.library.custom_op("megaframe::expert_gather", launch_gather, mutates_args=())
_combine_op = torch.library.custom_op("megaframe::expert_combine", launch_combine, mutates_args=())


@_gather_op.register_fake
def _(x_TH: Tensor, order_P: Tensor, k: int) -> Tensor:
    return x_TH.new_empty(order_P.shape[0], x_TH.shape[1])


@_combine_op.register_fake
def _(y_PH: Tensor, places_TK: Tensor) -> Tensor:
    return y_PH.new_empty(places_TK.shape[0], y_PH.shape[1])


_direct_gather = bypass_dispatcher(_gather_op, launch_gather)
_direct_combine = bypass_dispatcher(_combine_op, launch_combine)


class _Permute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TH: Tensor, order_P: Tensor, places_TK: Tensor) -> Tensor:
        ctx.save_for_backward(places_TK)
        return _direct_gather(x_TH, order_P, places_TK.shape[1])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        # Each token was copied to K places, so its gradient is the sum over them.
        return _direct_combine(gradients[0], *ctx.saved_tensors), None, None


class _Unpermute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y_PH: Tensor, order_P: Tensor, places_TK: Tensor) -> Tensor:
        ctx.save_for_backward(order_P)
        ctx.chosen = places_TK.shape[1]
        return _direct_combine(y_PH, places_TK)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        # Each place was added to its token, so its gradient is a copy of the token's.
        return _direct_gather(gradients[0], *ctx.saved_tensors, ctx.chosen), None, None


def _refuse_rows(rows: Tensor, *_: Any) -> str | None:
    return refuse_types(rows)


PERMUTE = Kernel(
    "permute",
    run_reference_permute,
    {"triton": Implementation("triton", _Permute.apply, require_nothing, _refuse_rows)},
)
UNPERMUTE = Kernel(
    "unpermute",
    run_reference_unpermute,
    {"triton": Implementation("triton", _Unpermute.apply, require_nothing, _refuse_rows)},
)
