"""Rotary positions of the joint product of queries, keys and values, which it divides.

One pass reads the product and writes rotated queries, rotated keys and values, each in memory of
its own; the backward pass writes the gradient of the product from theirs. Separately these are
three passes forward, and backward two and one that joins them.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from megaframe_kernels.device import ceil_div, launch, next_power_of_2
from megaframe_kernels.direct import bypass_dispatcher
from megaframe_kernels.elementwise import rotary
from megaframe_kernels.installed import require_nothing
from megaframe_kernels.kernel import Implementation, Kernel, refuse_nothing, refuse_types

_TILE = 1024
"""Pairs that a program rotates."""


def run_reference(qkv: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Divide into heads and rotate queries and keys.

    Args:
        qkv: [B, S, G, R + 2, D]: for each group of heads R queries, a key and a value.
        cos: [S, D'] or [B, S, D'] with 2D' <= D; gets no gradient.
        sin: Like cos.

    Returns:
        Queries [B, S, G R, D], keys and values [B, S, G, D].
    """
    query, key, value = qkv.split((qkv.shape[3] - 2, 1, 1), 3)
    rotated = (rotary.run_reference(part.flatten(2, 3), cos, sin) for part in (query, key))
    return *rotated, value.squeeze(3).contiguous()


@triton.jit
def _read(
    qkv: tl.tensor,
    query: tl.tensor,
    key: tl.tensor,
    value: tl.tensor,
    is_query: tl.tensor,
    is_key: tl.tensor,
    is_value: tl.tensor,
    BACK: tl.constexpr,
) -> tl.tensor:
    """Return elements in fp32: of the product, or with BACK of the parts that they belong to."""
    if BACK:
        x = tl.load(query, mask=is_query, other=0.0).to(tl.float32)
        x += tl.load(key, mask=is_key, other=0.0).to(tl.float32)
        return x + tl.load(value, mask=is_value, other=0.0).to(tl.float32)
    return tl.load(qkv, mask=is_query | is_key | is_value, other=0.0).to(tl.float32)


@triton.jit
def _write(
    x: tl.tensor,
    qkv: tl.tensor,
    query: tl.tensor,
    key: tl.tensor,
    value: tl.tensor,
    is_query: tl.tensor,
    is_key: tl.tensor,
    is_value: tl.tensor,
    BACK: tl.constexpr,
) -> None:
    """Round elements once and write them to the other side of `_read`."""
    x = x.to(qkv.dtype.element_ty)
    if BACK:
        tl.store(qkv, x, mask=is_query | is_key | is_value)
    else:
        tl.store(query, x, mask=is_query)
        tl.store(key, x, mask=is_key)
        tl.store(value, x, mask=is_value)


@triton.jit
def _turn(
    qkv: tl.tensor,
    query: tl.tensor,
    key: tl.tensor,
    value: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    tokens: tl.tensor,
    length: tl.tensor,
    groups: tl.tensor,
    queries: tl.tensor,
    width: tl.tensor,
    half: tl.tensor,
    table_stride: tl.tensor,
    BACK: tl.constexpr,
    TOKENS: tl.constexpr,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    REST: tl.constexpr,
) -> None:
    """Write rotated queries, rotated keys and values from the product, or with BACK the product
    from them, rotated back, for some heads of some tokens."""
    heads = groups * (queries + 2)
    across = tl.cdiv(heads, HEADS)
    token = (tl.program_id(0) // across).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    head = (tl.program_id(0) % across) * HEADS + tl.arange(0, HEADS)
    pair = tl.arange(0, HALF)
    cosine, sine = rotary.load_angles(
        cos, sin, token, pair, tokens, length, half, table_stride, BACK
    )
    group, place = head // (queries + 2), head % (queries + 2)
    joint = ((token * heads)[:, None] + head[None, :]) * width
    of_query = ((token * groups * queries)[:, None] + (group * queries + place)[None, :]) * width
    of_other = ((token * groups)[:, None] + group[None, :]) * width
    qkv, query = qkv + joint[:, :, None], query + of_query[:, :, None]
    key, value = key + of_other[:, :, None], value + of_other[:, :, None]
    inside = ((token < tokens)[:, None] & (head < heads)[None, :])[:, :, None]
    is_query = inside & (place < queries)[None, :, None]
    is_key = inside & (place == queries)[None, :, None]
    is_value = inside & (place > queries)[None, :, None]
    column, within = pair[None, None, :], (pair < half)[None, None, :]
    masks = is_query & within, is_key & within, is_value & within
    places = qkv + column, query + column, key + column, value + column
    beside = qkv + column + half, query + column + half, key + column + half, value + column + half
    first = _read(*places, *masks, BACK)
    second = _read(*beside, *masks, BACK)
    turns = (place <= queries)[None, :, None]
    # Both products and their sum are fp32, and rounded once.
    _write(tl.where(turns, first * cosine - second * sine, first), *places, *masks, BACK)
    _write(tl.where(turns, second * cosine + first * sine, second), *beside, *masks, BACK)
    if REST > 0:
        # Dims beyond the rotated ones are copied as they are.
        column = (2 * half + tl.arange(0, REST))[None, None, :]
        within = column < width
        masks = is_query & within, is_key & within, is_value & within
        places = qkv + column, query + column, key + column, value + column
        _write(_read(*places, *masks, BACK), *places, *masks, BACK)


def launch_forward(qkv: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Divide and rotate in Triton; arguments and results as in `run_reference`."""
    batch, length, groups, per_group, width = qkv.shape
    query = qkv.new_empty(batch, length, groups * (per_group - 2), width)
    key = qkv.new_empty(batch, length, groups, width)
    value = torch.empty_like(key)
    _launch(qkv.contiguous(), query, key, value, cos, sin, back=False)
    return query, key, value


def launch_backward(
    d_query: Tensor, d_key: Tensor, d_value: Tensor, cos: Tensor, sin: Tensor
) -> Tensor:
    """Return the gradient of the product, [B, S, G, R + 2, D].

    Args:
        d_query: Gradient of the rotated queries, [B, S, G R, D].
        d_key: Gradient of the rotated keys, [B, S, G, D].
        d_value: Gradient of the values, like d_key.
        cos: As in `run_reference`.
        sin: Like cos.
    """
    d_qkv = _make_gradient(d_query, d_key)
    parts = d_query.contiguous(), d_key.contiguous(), d_value.contiguous()
    _launch(d_qkv, *parts, cos, sin, back=True)
    return d_qkv


def _make_gradient(d_query: Tensor, d_key: Tensor) -> Tensor:
    batch, length, groups, width = d_key.shape
    return d_key.new_empty(batch, length, groups, d_query.shape[2] // max(groups, 1) + 2, width)


def _launch(
    qkv: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    back: bool,
) -> None:
    batch, length, groups, per_group, width = qkv.shape
    tokens, heads, half = batch * length, groups * per_group, cos.shape[-1]
    padded = next_power_of_2(max(half, 1))
    rest = next_power_of_2(width - 2 * half) if width > 2 * half else 0
    # As many heads as fit, because they share cosine and sine; then as many tokens.
    pairs = max(padded, rest // 2)
    tall = min(next_power_of_2(max(heads, 1)), max(1, _TILE // pairs))
    wide = max(1, _TILE // (pairs * tall))
    launch(
        _turn,
        (ceil_div(tokens, wide) * ceil_div(heads, tall),),
        qkv,
        query,
        key,
        value,
        cos.contiguous(),
        sin.contiguous(),
        tokens,
        length,
        groups,
        per_group - 2,
        width,
        half,
        length * half if cos.dim() == 3 else 0,
        BACK=back,
        TOKENS=wide,
        HEADS=tall,
        HALF=padded,
        REST=rest,
    )


_forward_op = torch.library.custom_op("megaframe::qkv_rotary", launch_forward, mutates_args=())
_backward_op = torch.library.custom_op(
    "megaframe::qkv_rotary_backward", launch_backward, mutates_args=()
)


@_forward_op.register_fake
def _(qkv: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    batch, length, groups, per_group, width = qkv.shape
    query = qkv.new_empty(batch, length, groups * (per_group - 2), width)
    key = qkv.new_empty(batch, length, groups, width)
    return query, key, torch.empty_like(key)


@_backward_op.register_fake
def _(d_query: Tensor, d_key: Tensor, d_value: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return _make_gradient(d_query, d_key)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _, cos, sin = inputs
    # A rotation is linear, so its gradient does not depend on the product.
    ctx.save_for_backward(cos, sin)


def _compute_gradients(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
    return _direct_backward(*gradients, *ctx.saved_tensors), None, None


_forward_op.register_autograd(_compute_gradients, setup_context=_keep)
_direct_backward = bypass_dispatcher(_backward_op, launch_backward)
run_triton = bypass_dispatcher(_forward_op, launch_forward, _keep, _compute_gradients)

KERNEL = Kernel(
    "qkv_rotary",
    run_reference,
    {
        "triton": Implementation("triton", run_triton, require_nothing, refuse_types),
        "torch": Implementation("torch", run_reference, require_nothing, refuse_nothing),
    },
)
