"""Router of a mixture of experts: scores, the k best experts of a token, and their weights.

Experts are chosen by score plus bias but weighted by score alone, so the bias balances the load
without changing the gradient (Wang et al. 2024). Ties go to the expert with the lower number, so
all ranks agree. Shape legend: T tokens, E experts, K chosen.
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

_TILE = 1024
_MOST_EXPERTS = 1024


def run_reference(
    logits_TE: Tensor,
    k: int,
    bias_E: Tensor | None = None,
    *,
    score: str = "softmax",
    normalise: bool = True,
) -> tuple[Tensor, Tensor]:
    """Return the k best experts of each token and their weights, best first.

    Args:
        logits_TE: [T, E].
        k: Number of experts of a token.
        bias_E: Added to the scores for the choice only.
        score: softmax or sigmoid of the logits.
        normalise: Divide the weights of a token by their sum.

    Returns:
        Weights, in at least fp32 [T, K], and experts, int32 [T, K].
    """
    wide = logits_TE.to(torch.promote_types(logits_TE.dtype, torch.float32))
    # In fp32 at least, like the weights that are read from them.
    scores = wide.softmax(-1) if score == "softmax" else wide.sigmoid()
    # The bias changes who is chosen, but not the weights, and gets no gradient.
    by = scores.detach() if bias_E is None else scores.detach() + bias_E.to(wide.dtype)
    # A stable sort, because topk does not define the order of equal scores.
    experts = by.sort(dim=-1, descending=True, stable=True).indices[:, :k]
    weights = scores.gather(1, experts)
    if normalise:
        weights = weights / weights.sum(-1, keepdim=True)
    return weights, experts.to(torch.int32)


@triton.jit
def _compute_scores(logits: tl.tensor, is_expert: tl.tensor, SIGMOID: tl.constexpr) -> tl.tensor:
    if SIGMOID:
        return tl.where(is_expert, tl.sigmoid(logits), 0.0)
    # The maximum is subtracted, so no exponential exceeds 1. Padding counts as -inf.
    top = tl.max(tl.where(is_expert, logits, -float("inf")), 1)
    grown = tl.where(is_expert, tl.exp(logits - top[:, None]), 0.0)
    return grown / tl.sum(grown, 1)[:, None]


@triton.jit
def _forward(
    logits: tl.tensor,
    bias: tl.tensor,
    weights: tl.tensor,
    experts: tl.tensor,
    tokens: tl.tensor,
    count: tl.tensor,
    k: tl.tensor,
    stride: tl.tensor,
    SIGMOID: tl.constexpr,
    NORMALISE: tl.constexpr,
    TOKENS: tl.constexpr,
    EXPERTS: tl.constexpr,
    CHOSEN: tl.constexpr,
) -> None:
    """weights = scores of the k experts with the highest score + bias, over their sum with
    NORMALISE."""
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    expert = tl.arange(0, EXPERTS)
    is_expert = expert[None, :] < count
    inside = (token[:, None] < tokens) & is_expert
    at = logits + token[:, None] * stride + expert[None, :]
    scores = _compute_scores(tl.load(at, mask=inside, other=0.0).to(tl.float32), is_expert, SIGMOID)
    by = scores
    if bias is not None:
        # Only the choice is by score plus bias; `scores` stays as it is.
        by += tl.load(bias + expert, mask=expert < count, other=0.0).to(tl.float32)[None, :]
    # NaN ranks highest, as in a sort. Otherwise argmax could choose padding when it meets NaN.
    by = tl.where(by == by, by, float("inf"))
    by = tl.where(is_expert, by, -float("inf"))
    rank = tl.arange(0, CHOSEN)
    # k rounds of argmax: k is small, and ties go to the lower number, which a sort would have to be
    # stable for.
    best = tl.zeros([TOKENS, CHOSEN], tl.int32)
    share = tl.zeros([TOKENS, CHOSEN], tl.float32)
    for place in range(0, k):
        chosen = tl.argmax(by, 1, tie_break_left=True)
        is_chosen = expert[None, :] == chosen[:, None]
        # One element per row is left, so the sum reads it exactly. It is the score without bias.
        value = tl.sum(tl.where(is_chosen, scores, 0.0), 1)
        # Not chosen again.
        by = tl.where(is_chosen, -float("inf"), by)
        now = rank[None, :] == place
        best = tl.where(now, chosen[:, None], best)
        share = tl.where(now, value[:, None], share)
    if NORMALISE:
        share = share / tl.sum(share, 1)[:, None]
    at = token[:, None] * k + rank[None, :]
    written = (token[:, None] < tokens) & (rank[None, :] < k)
    tl.store(weights + at, share, mask=written)
    tl.store(experts + at, best, mask=written)


@triton.jit
def _backward(
    d_weights: tl.tensor,
    logits: tl.tensor,
    weights: tl.tensor,
    experts: tl.tensor,
    d_logits: tl.tensor,
    tokens: tl.tensor,
    count: tl.tensor,
    k: tl.tensor,
    stride: tl.tensor,
    SIGMOID: tl.constexpr,
    NORMALISE: tl.constexpr,
    TOKENS: tl.constexpr,
    EXPERTS: tl.constexpr,
) -> None:
    """d_logits = p (d_s - sum(d_s p)) for the softmax, d_s p (1 - p) for the sigmoid, with d_s 0
    for experts that were not chosen."""
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    expert = tl.arange(0, EXPERTS)
    is_expert = expert[None, :] < count
    inside = (token[:, None] < tokens) & is_expert
    at = token[:, None] * stride + expert[None, :]
    # Computed again from the logits: only these, weights and experts are saved.
    scores = _compute_scores(
        tl.load(logits + at, mask=inside, other=0.0).to(tl.float32), is_expert, SIGMOID
    )
    d_scores = tl.zeros([TOKENS, EXPERTS], tl.float32)
    total = tl.zeros([TOKENS], tl.float32)
    inner = tl.zeros([TOKENS], tl.float32)
    for place in range(0, k):
        choice = token * k + place
        # Tokens of padding choose expert -1, which matches none.
        chosen = tl.load(experts + choice, mask=token < tokens, other=-1)
        d_weight = tl.load(d_weights + choice, mask=token < tokens, other=0.0).to(tl.float32)
        is_chosen = expert[None, :] == chosen[:, None]
        d_scores += tl.where(is_chosen, d_weight[:, None], 0.0)
        total += tl.sum(tl.where(is_chosen, scores, 0.0), 1)
        inner += d_weight * tl.load(weights + choice, mask=token < tokens, other=0.0)
    if NORMALISE:  # w = s / sum(s), so d_s = (d_w - sum(d_w w)) / sum(s) for chosen experts
        num_chosen = tl.zeros([TOKENS, EXPERTS], tl.float32)
        for place in range(0, k):
            chosen = tl.load(experts + token * k + place, mask=token < tokens, other=-1)
            num_chosen += tl.where(expert[None, :] == chosen[:, None], 1.0, 0.0)
        # Padding has a total of 0; 0 / 0 would be NaN.
        total = tl.where(total == 0.0, 1.0, total)
        d_scores = (d_scores - num_chosen * inner[:, None]) / total[:, None]
    if SIGMOID:
        # The slope of the sigmoid.
        result = d_scores * scores * (1.0 - scores)
    else:
        # The Jacobian of the softmax: p (d - sum(d p)).
        result = scores * (d_scores - tl.sum(d_scores * scores, 1)[:, None])
    # The gradient is contiguous, whatever the stride of the logits.
    at = token[:, None] * count + expert[None, :]
    tl.store(d_logits + at, result.to(d_logits.dtype.element_ty), mask=inside)


def _choose_tile(tokens: int, experts: int) -> tuple[tuple[int], dict[str, int]]:
    padded = next_power_of_2(max(experts, 16))
    tall = max(1, _TILE // padded)
    return (ceil_div(tokens, tall),), {"TOKENS": tall, "EXPERTS": padded}


def launch_forward(
    logits_TE: Tensor, k: int, bias_E: Tensor | None, sigmoid: bool, normalise: bool
) -> tuple[Tensor, Tensor]:
    """Compute the reference in Triton, with weights in fp32.

    Args:
        logits_TE: [T, E].
        k: Number of experts of a token.
        bias_E: Added to the scores for the choice only.
        sigmoid: Scores are the sigmoid of the logits, not their softmax.
        normalise: Divide the weights of a token by their sum.
    """
    flat = logits_TE if logits_TE.stride(1) == 1 else logits_TE.contiguous()
    tokens, count = flat.shape
    weights = flat.new_empty(tokens, k, dtype=torch.float32)
    experts = flat.new_empty(tokens, k, dtype=torch.int32)
    grid, tile = _choose_tile(tokens, count)
    bias = None if bias_E is None else bias_E.contiguous()
    options = {"SIGMOID": sigmoid, "NORMALISE": normalise, "CHOSEN": next_power_of_2(k), **tile}
    arguments = (flat, bias, weights, experts, tokens, count, k, flat.stride(0))
    launch(_forward, grid, *arguments, **options)
    return weights, experts


def launch_backward(
    d_weights_TK: Tensor,
    logits_TE: Tensor,
    weights_TK: Tensor,
    experts_TK: Tensor,
    sigmoid: bool,
    normalise: bool,
) -> Tensor:
    """Return the gradient of the logits.

    Args:
        d_weights_TK: Gradient of the weights.
        logits_TE: What the forward pass was given.
        weights_TK: Its weights.
        experts_TK: Its experts, int32.
        sigmoid: Whether scores are sigmoids, not a softmax.
        normalise: Whether the weights of a token were divided by their sum.

    Returns:
        [T, E], contiguous.
    """
    flat = logits_TE if logits_TE.stride(1) == 1 else logits_TE.contiguous()
    tokens, count = flat.shape
    d_logits = torch.empty_like(flat, memory_format=torch.contiguous_format)
    grid, tile = _choose_tile(tokens, count)
    launch(
        _backward,
        grid,
        d_weights_TK.contiguous(),
        flat,
        weights_TK,
        experts_TK,
        d_logits,
        tokens,
        count,
        weights_TK.shape[1],
        flat.stride(0),
        SIGMOID=sigmoid,
        NORMALISE=normalise,
        **tile,
    )
    return d_logits


_forward_op = torch.library.custom_op("megaframe::router", launch_forward, mutates_args=())
_backward_op = torch.library.custom_op(
    "megaframe::router_backward", launch_backward, mutates_args=()
)


@_forward_op.register_fake
def _(
    logits_TE: Tensor, k: int, bias_E: Tensor | None, sigmoid: bool, normalise: bool
) -> tuple[Tensor, Tensor]:
    shape = (logits_TE.shape[0], k)
    weights = logits_TE.new_empty(shape, dtype=torch.float32)
    return weights, logits_TE.new_empty(shape, dtype=torch.int32)


@_backward_op.register_fake
def _(d_weights_TK: Tensor, logits_TE: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(logits_TE, memory_format=torch.contiguous_format)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    logits, _, _, ctx.sigmoid, ctx.normalise = inputs
    ctx.save_for_backward(logits, *output)
    # The chosen experts are integers.
    ctx.mark_non_differentiable(output[1])


def _compute_gradients(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
    d_logits = _direct_backward(gradients[0], *ctx.saved_tensors, ctx.sigmoid, ctx.normalise)
    return d_logits, None, None, None, None


_forward_op.register_autograd(_compute_gradients, setup_context=_keep)
_direct_forward = bypass_dispatcher(_forward_op, launch_forward, _keep, _compute_gradients)
_direct_backward = bypass_dispatcher(_backward_op, launch_backward)


def run_triton(
    logits_TE: Tensor,
    k: int,
    bias_E: Tensor | None = None,
    *,
    score: str = "softmax",
    normalise: bool = True,
) -> tuple[Tensor, Tensor]:
    """Compute the reference in Triton."""
    return _direct_forward(logits_TE, k, bias_E, score == "sigmoid", normalise)


def _refuse_inputs(logits_TE: Tensor, k: int, bias_E: Tensor | None = None, **_: Any) -> str | None:
    count = logits_TE.shape[1]
    if not 0 < k <= count <= _MOST_EXPERTS:
        return f"{k} of {count} experts; it takes 1 to all of at most {_MOST_EXPERTS}"
    return refuse_types(logits_TE, bias_E)


KERNEL = Kernel(
    "router",
    run_reference,
    {"triton": Implementation("triton", run_triton, require_nothing, _refuse_inputs)},
    constant=8.0,
)
