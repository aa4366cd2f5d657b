"""Attention to the latents of chosen keys: multi-head latent attention whose products with `kv` are
absorbed (DeepSeek-V2, 2024, section 2.1.2), to the keys that an indexer chooses (DeepSeek-V3.2,
2025).

All heads of a query score the same rows, and what is summed is a part of the same rows. So a query
reads each chosen key once.

Shape legend: Q queries, T keys, C chosen keys of a query, H heads, L width of a latent, V of its
last columns, which are summed.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from megaframe_kernels.direct import bypass_dispatcher
from megaframe_kernels.installed import require_nothing
from megaframe_kernels.kernel import Implementation, Kernel, refuse_types
from megaframe_kernels.sparse_attention.launches import (
    WIDEST,
    launch_backward,
    launch_forward,
    launch_shares,
)


def run_reference(
    query_QHL: Tensor, latents_TL: Tensor, places_QC: Tensor, *, value_width: int, scale: float
) -> tuple[Tensor, Tensor]:
    """softmax(scale q k) v over the chosen keys of each query, and 0 for a query that sees none.

    Args:
        query_QHL: Queries [Q, H, L].
        latents_TL: Latents [T, L], which are keys; their last columns are values.
        places_QC: Rows of the latents that each query sees, int32 [Q, C], each at most once; -1 for
            none.
        value_width: V, number of columns of values.
        scale: Factor of the scores.

    Returns:
        The output [Q, H, V], and the log-sum-exp of the scores, [Q, H] in at least fp32, which has
        no gradient.
    """
    scores_QHC, chosen_QCL = _compute_scores(query_QHL, latents_TL, places_QC, scale)
    lse_QH = scores_QHC.logsumexp(-1)
    # -inf - (-inf) would be NaN. Shifted by 0, all shares of a query that sees nothing are 0.
    shift = lse_QH.masked_fill(lse_QH == -math.inf, 0.0)
    out = (scores_QHC - shift[..., None]).exp() @ chosen_QCL[..., -value_width:]
    return out.to(query_QHL.dtype), lse_QH.detach()


def run_reference_shares(
    query_QHL: Tensor,
    latents_TL: Tensor,
    places_QC: Tensor,
    lse_QH: Tensor,
    *,
    value_width: int,
    scale: float,
) -> Tensor:
    """Return the sums over heads of exp(scale q k - lse), the shares of chosen keys, [Q, C] in at
    least fp32; 0 for what is not seen. It has no gradient.

    Args:
        query_QHL: As for `run_reference`, and so are the others.
        latents_TL: Latents.
        places_QC: Of chosen keys.
        lse_QH: What it returns.
        value_width: Number of columns of values.
        scale: Factor of the scores.
    """
    scores_QHC, _ = _compute_scores(query_QHL.detach(), latents_TL.detach(), places_QC, scale)
    shift = lse_QH.to(scores_QHC.dtype).masked_fill(lse_QH == -math.inf, 0.0)
    return (scores_QHC - shift[..., None]).exp().sum(1)


def _compute_scores(
    query: Tensor, latents: Tensor, places: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """Return the scores [Q, H, C] and the latents [Q, C, L] of chosen keys, in at least fp32."""
    # fp32 at least; fp64 stays fp64, in which layouts are compared.
    wide = torch.promote_types(query.dtype, torch.float32)
    chosen_QCL = latents.to(wide)[places.clamp_min(0).long()]
    scores_QHC = query.to(wide) @ chosen_QCL.mT * scale
    return scores_QHC.masked_fill((places < 0)[:, None], -math.inf), chosen_QCL


def _backward(
    d_out: Tensor,
    query: Tensor,
    latents: Tensor,
    places: Tensor,
    out: Tensor,
    lse: Tensor,
    value_width: int,
    scale: float,
) -> tuple[Tensor, Tensor]:
    return launch_backward(d_out, query, latents, places, out, lse, value_width, scale)


_forward_op = torch.library.custom_op(
    "megaframe::sparse_attention", launch_forward, mutates_args=()
)
_backward_op = torch.library.custom_op(
    "megaframe::sparse_attention_backward", _backward, mutates_args=()
)
_shares_op = torch.library.custom_op("megaframe::attention_shares", launch_shares, mutates_args=())


@_forward_op.register_fake
def _(query: Tensor, latents: Tensor, places: Tensor, value_width: int, scale: float) -> Any:
    out = query.new_empty(*query.shape[:2], value_width)
    return out, query.new_empty(query.shape[:2], dtype=torch.float32)


@_backward_op.register_fake
def _(d_out: Tensor, query: Tensor, latents: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    whole = torch.contiguous_format
    return (
        torch.empty_like(query, memory_format=whole),
        torch.empty_like(latents, memory_format=whole),
    )


@_shares_op.register_fake
def _(query: Tensor, latents: Tensor, places: Tensor, *_: Any) -> Tensor:
    return query.new_empty(places.shape, dtype=torch.float32)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.value_width, ctx.scale = inputs
    ctx.save_for_backward(*tensors, *output)
    ctx.mark_non_differentiable(output[1])
    # None instead of zeros for what has no gradient, the log-sum-exp.
    ctx.set_materialize_grads(False)


def _compute_gradients(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
    saved = ctx.saved_tensors
    d_out = torch.zeros_like(saved[3]) if gradients[0] is None else gradients[0]
    d_query, d_latents = _direct_backward(d_out, *saved, ctx.value_width, ctx.scale)
    return d_query, d_latents, None, None, None


_forward_op.register_autograd(_compute_gradients, setup_context=_keep)
_direct_forward = bypass_dispatcher(_forward_op, launch_forward, _keep, _compute_gradients)
_direct_backward = bypass_dispatcher(_backward_op, _backward)
_direct_shares = bypass_dispatcher(_shares_op, launch_shares)


def run_triton(
    query_QHL: Tensor, latents_TL: Tensor, places_QC: Tensor, *, value_width: int, scale: float
) -> tuple[Tensor, Tensor]:
    """Compute the reference in Triton."""
    out, lse = _direct_forward(query_QHL, latents_TL, places_QC, value_width, scale)
    return out, lse


def run_triton_shares(
    query_QHL: Tensor,
    latents_TL: Tensor,
    places_QC: Tensor,
    lse_QH: Tensor,
    *,
    value_width: int,
    scale: float,
) -> Tensor:
    """Compute the reference in Triton."""
    tensors = (x.detach() for x in (query_QHL, latents_TL, places_QC, lse_QH))
    shares: Tensor = _direct_shares(*tensors, value_width, scale)
    return shares


def _refuse(
    query: Tensor, latents: Tensor, places: Tensor, *_: Tensor, value_width: int, scale: float
) -> str | None:
    """Return why these arguments are not for these kernels."""
    if query.dtype != latents.dtype:
        return f"queries are {query.dtype} and latents {latents.dtype}"
    if query.shape[-1] - value_width < 1:
        return f"latents of {query.shape[-1]} columns have none that are only scored"
    widest = WIDEST // 4 if query.dtype == torch.float32 else WIDEST
    if max(value_width, query.shape[-1] - value_width) > widest:
        return f"{value_width} columns are summed, more than the {widest} that registers hold"
    return refuse_types(query, latents)


_ROUNDINGS = 8.0
"""Of shares, outputs, their gradients and those of scores, and of what reads them."""
KERNEL = Kernel(
    "sparse_attention",
    run_reference,
    {"triton": Implementation("triton", run_triton, require_nothing, _refuse)},
    _ROUNDINGS,
)
SHARES = Kernel(
    "attention_shares",
    run_reference_shares,
    {"triton": Implementation("triton", run_triton_shares, require_nothing, _refuse)},
    _ROUNDINGS,
)
