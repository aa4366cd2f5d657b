"""Rotary positions (Su et al. 2021): the two halves of a head are rotated against each other.

Cosine and sine are read once for all heads of a token. The backward pass is the opposite rotation,
so nothing of the input is kept.
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
from megaframe_kernels.kernel import Implementation, Kernel, refuse_nothing, refuse_types

_TILE = 2048
"""Pairs that a program rotates."""


def run_reference(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """(a, b) -> (a cos - b sin, b cos + a sin) for a = x[..., i], b = x[..., i + R].

    Args:
        x: [B, S, N, D].
        cos: [S, R] or [B, S, R] with 2R <= D; gets no gradient.
        sin: Like cos.

    Returns:
        x rotated, [B, S, N, D]; dims from 2R on stay as they are.
    """
    half = cos.shape[-1]
    kind = torch.promote_types(x.dtype, torch.float32)
    # unsqueeze: the same angle for all heads of a token.
    cos, sin = cos.detach().to(kind).unsqueeze(-2), sin.detach().to(kind).unsqueeze(-2)
    first, second, unrotated = x.to(kind).split((half, half, x.shape[-1] - 2 * half), -1)
    rotated = (first * cos - second * sin, second * cos + first * sin, unrotated)
    return torch.cat(rotated, -1).to(x.dtype)


@triton.jit
def load_angles(
    cos: tl.tensor,
    sin: tl.tensor,
    token: tl.tensor,
    pair: tl.tensor,
    tokens: tl.tensor,
    length: tl.tensor,
    half: tl.tensor,
    table_stride: tl.tensor,
    BACK: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Return the cosines and sines of some tokens, fp32 [tokens, 1, pairs], read once for all heads
    of a program; with BACK those of the opposite rotation. Tokens of all samples are numbered
    consecutively."""
    # The stride is 0 if all samples share one table.
    at = (token // length) * table_stride + (token % length) * half
    inside = (token < tokens)[:, None] & (pair < half)[None, :]
    cosine = tl.load(cos + at[:, None] + pair[None, :], mask=inside, other=0.0).to(tl.float32)
    sine = tl.load(sin + at[:, None] + pair[None, :], mask=inside, other=0.0).to(tl.float32)
    if BACK:
        # The inverse of a rotation is its transpose.
        sine = -sine
    return cosine[:, None, :], sine[:, None, :]


@triton.jit
def _turn(
    x: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    y: tl.tensor,
    tokens: tl.tensor,
    length: tl.tensor,
    heads: tl.tensor,
    head_width: tl.tensor,
    half: tl.tensor,
    batch_stride: tl.tensor,
    token_stride: tl.tensor,
    head_stride: tl.tensor,
    table_stride: tl.tensor,
    BACK: tl.constexpr,
    TOKENS: tl.constexpr,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    REST: tl.constexpr,
) -> None:
    """y = x rotated by the angles of its tokens, or by their negatives with BACK, for some heads of
    some tokens."""
    across = tl.cdiv(heads, HEADS)
    token = (tl.program_id(0) // across).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    head = (tl.program_id(0) % across) * HEADS + tl.arange(0, HEADS)
    pair = tl.arange(0, HALF)
    batch, place = token // length, token % length
    cosine, sine = load_angles(cos, sin, token, pair, tokens, length, half, table_stride, BACK)
    # x keeps its strides, so a view of a larger tensor is not copied; y is contiguous.
    start = (batch * batch_stride + place * token_stride)[:, None]
    start += (head * head_stride)[None, :]
    out = (token * heads)[:, None] * head_width + head[None, :] * head_width
    in_range = (token < tokens)[:, None] & (head < heads)[None, :]
    inside = in_range[:, :, None] & (pair < half)[None, None, :]
    at, to = x + start[:, :, None] + pair[None, None, :], y + out[:, :, None] + pair[None, None, :]
    first = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(at + half, mask=inside, other=0.0).to(tl.float32)
    # Both products and their sum are fp32, and rounded once.
    tl.store(to, (first * cosine - second * sine).to(y.dtype.element_ty), mask=inside)
    tl.store(to + half, (second * cosine + first * sine).to(y.dtype.element_ty), mask=inside)
    if REST > 0:
        # Dims beyond the rotated ones are copied as they are.
        column = 2 * half + tl.arange(0, REST)
        inside = in_range[:, :, None] & (column < head_width)[None, None, :]
        unrotated = tl.load(x + start[:, :, None] + column[None, None, :], mask=inside, other=0.0)
        tl.store(y + out[:, :, None] + column[None, None, :], unrotated, mask=inside)


def launch_turn(x: Tensor, cos: Tensor, sin: Tensor, inverse: bool) -> Tensor:
    """Return x rotated.

    Args:
        x: [B, S, N, D].
        cos: [S, R] or [B, S, R] with 2R <= D.
        sin: Like cos.
        inverse: Rotate in the opposite direction, as the gradient is.
    """
    if x.stride(-1) != 1 and x.shape[-1] > 1:
        x = x.contiguous()
    batch, length, heads, width = x.shape
    half = cos.shape[-1]
    y = x.new_empty(batch, length, heads, width)
    padded = next_power_of_2(max(half, 1))
    # As many heads as fit, because they share cosine and sine; then as many tokens.
    tall = min(next_power_of_2(max(heads, 1)), max(1, _TILE // padded))
    tokens = max(1, _TILE // (padded * tall))
    launch(
        _turn,
        (ceil_div(batch * length, tokens) * ceil_div(heads, tall),),
        x,
        cos.contiguous(),
        sin.contiguous(),
        y,
        batch * length,
        length,
        heads,
        width,
        half,
        *x.stride()[:3],
        length * half if cos.dim() == 3 else 0,
        BACK=inverse,
        TOKENS=tokens,
        HEADS=tall,
        HALF=padded,
        REST=next_power_of_2(width - 2 * half) if width > 2 * half else 0,
    )
    return y


_turn_op = torch.library.custom_op("megaframe::rotary", launch_turn, mutates_args=())


@_turn_op.register_fake
def _(x: Tensor, cos: Tensor, sin: Tensor, inverse: bool) -> Tensor:
    return x.new_empty(x.shape)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, cos, sin, ctx.inverse = inputs
    # A rotation is linear, so its gradient does not depend on x.
    ctx.save_for_backward(cos, sin)


def _compute_gradients(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
    return _direct_turn(gradients[0], *ctx.saved_tensors, not ctx.inverse), None, None, None


_turn_op.register_autograd(_compute_gradients, setup_context=_keep)
_direct_turn = bypass_dispatcher(_turn_op, launch_turn, _keep, _compute_gradients)


def run_triton(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Compute the reference in Triton."""
    return _direct_turn(x, cos, sin, False)


KERNEL = Kernel(
    "rotary",
    run_reference,
    {
        "triton": Implementation("triton", run_triton, require_nothing, refuse_types),
        "torch": Implementation("torch", run_reference, require_nothing, refuse_nothing),
    },
)
