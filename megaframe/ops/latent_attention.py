"""Attention to the latents of chosen keys, by a kernel or in plain code for some queries at a time.

All heads of a query score the same rows, whose last columns are also what they sum: products are of
matrices, heads times keys. Shape legend: Q queries, T keys, C chosen keys of a query, N heads, L
width of a latent, V of its last columns.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from megaframe.ops.autograd import get_direct_apply
from megaframe.ops.kernel_dispatch import Kernels


def attend_to_latents(
    kernels: Kernels,
    query_QNL: Tensor,
    latents_TL: Tensor,
    rows_QC: Tensor,
    value_width: int,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Compute softmax(scale q k) v over the chosen keys of each query.

    Args:
        kernels: Of the run.
        query_QNL: Queries.
        latents_TL: Keys; their last columns are values.
        rows_QC: Those that each query sees, int32; -1 for none.
        value_width: V.
        scale: Factor of the scores.

    Returns:
        The outputs [Q, N, V], 0 for a query that sees nothing, and the log-sum-exps [Q, N] in at
        least fp32, which have no gradient.
    """
    operands, options = (
        (query_QNL, latents_TL, rows_QC),
        {"value_width": value_width, "scale": scale},
    )
    if kernel := kernels.find("sparse_attention", *operands, **options):
        out, lse = kernel(*operands, **options)
        return out, lse
    out, lse = _attend(*operands, value_width, scale)
    return out, lse


def sum_shares(
    kernels: Kernels,
    query_QNL: Tensor,
    latents_TL: Tensor,
    rows_QC: Tensor,
    lse_QN: Tensor,
    value_width: int,
    scale: float,
) -> Tensor:
    """Return the sums over heads of the shares of chosen keys, [Q, C] in at least fp32, 0 for what
    is not seen. It has no gradient. The other arguments are those of `attend_to_latents`.

    Args:
        kernels: Of the run.
        query_QNL: Queries.
        latents_TL: Keys.
        rows_QC: Those that each query sees.
        lse_QN: The log-sum-exps that it returns.
        value_width: V.
        scale: Factor of the scores.
    """
    operands = query_QNL, latents_TL, rows_QC, lse_QN
    options = {"value_width": value_width, "scale": scale}
    if kernel := kernels.find("attention_shares", *operands, **options):
        shares: Tensor = kernel(*operands, **options)
        return shares
    parts = [
        _compute_shares(query_QNL[some], latents_TL, rows_QC[some], lse_QN[some], scale)[0].sum(1)
        for some in _iterate_queries(query_QNL, rows_QC)
    ]
    return torch.cat(parts)


def _iterate_queries(query_QNL: Tensor, rows_QC: Tensor) -> Iterator[slice]:
    """Yield all queries, some at a time: so many that their latents and the gradients of these,
    both in at least fp32, are no more than queries and their gradients."""
    number, heads = query_QNL.shape[:2]
    step = max(1, number * heads // (2 * rows_QC.shape[1]))
    for start in range(0, number, step):
        yield slice(start, min(start + step, number))


def _gather(latents_TL: Tensor, rows_QC: Tensor, like: Tensor) -> Tensor:
    """Return the latents of chosen keys, [Q, C, L], in the type of `like`."""
    return latents_TL[rows_QC.clamp_min(0).long()].to(like.dtype)


def _compute_scores(
    query_QNL: Tensor, latents_TL: Tensor, rows_QC: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the scores [Q, N, C], -inf for what is not seen, with queries [Q, N, L] and latents
    [Q, C, L], all in at least fp32."""
    query_QNL = query_QNL.to(torch.promote_types(query_QNL.dtype, torch.float32))
    chosen_QCL = _gather(latents_TL, rows_QC, query_QNL)
    scores_QNC = (query_QNL @ chosen_QCL.mT).mul_(scale)
    hidden_Q1C = (rows_QC < 0)[:, None]
    return scores_QNC.masked_fill_(hidden_Q1C, -torch.inf), query_QNL, chosen_QCL


def _compute_shares(
    query_QNL: Tensor, latents_TL: Tensor, rows_QC: Tensor, lse_QN: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the shares of keys in place of the scores of `_compute_scores`."""
    scores_QNC, query_QNL, chosen_QCL = _compute_scores(query_QNL, latents_TL, rows_QC, scale)
    # Of a query that sees nothing it is -inf, and minus another -inf gives NaN.
    shift = lse_QN.clamp_min(torch.finfo(lse_QN.dtype).min).unsqueeze(-1)
    return scores_QNC.sub_(shift).exp_(), query_QNL, chosen_QCL


class _Attend(torch.autograd.Function):
    """Keeps queries, latents, outputs and log-sum-exps, and gathers latents again."""

    @staticmethod
    def forward(
        ctx: Any,
        query_QNL: Tensor,
        latents_TL: Tensor,
        rows_QC: Tensor,
        value_width: int,
        scale: float,
    ) -> tuple[Tensor, Tensor]:
        wide = torch.promote_types(query_QNL.dtype, torch.float32)
        out_QNV = query_QNL.new_empty(*query_QNL.shape[:2], value_width)
        lse_QN = query_QNL.new_empty(query_QNL.shape[:2], dtype=wide)
        for some in _iterate_queries(query_QNL, rows_QC):
            scores_QNC, _, chosen = _compute_scores(
                query_QNL[some], latents_TL, rows_QC[some], scale
            )
            lse = torch.logsumexp(scores_QNC, -1)
            shares = scores_QNC.sub_(lse.clamp_min(torch.finfo(wide).min).unsqueeze(-1)).exp_()
            out_QNV[some] = (shares @ chosen[..., -value_width:]).to(out_QNV.dtype)
            lse_QN[some] = lse
        ctx.save_for_backward(query_QNL, latents_TL, rows_QC, out_QNV, lse_QN)
        ctx.value_width, ctx.scale = value_width, scale
        ctx.mark_non_differentiable(lse_QN)
        ctx.set_materialize_grads(False)
        return out_QNV, lse_QN

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        query_QNL, latents_TL, rows_QC, out_QNV, lse_QN = ctx.saved_tensors
        d_query = torch.empty_like(query_QNL)
        d_latents = torch.zeros_like(latents_TL, dtype=lse_QN.dtype)
        for some in _iterate_queries(query_QNL, rows_QC):
            d_query[some], d_chosen_QCL = _differentiate(
                gradients[0][some],
                query_QNL[some],
                latents_TL,
                rows_QC[some],
                out_QNV[some],
                lse_QN[some],
                ctx.scale,
            )
            # What is not seen adds 0 to the first row.
            rows = rows_QC[some].clamp_min(0).flatten()
            d_latents.index_add_(0, rows, d_chosen_QCL.flatten(0, 1))
        return d_query, d_latents.to(latents_TL.dtype), None, None, None


_attend = get_direct_apply(_Attend)


def _differentiate(
    d_out: Tensor,
    query: Tensor,
    latents_TL: Tensor,
    rows_QC: Tensor,
    out: Tensor,
    lse_QN: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Return the gradients of some queries [Q, N, L] and of their chosen latents [Q, C, L]: with
    shares p and dp = d_out v they are those of scores, ds = scale p (dp - sum(d_out out))."""
    shares_QNC, query, chosen = _compute_shares(query, latents_TL, rows_QC, lse_QN, scale)
    d_out, width = d_out.to(query.dtype), d_out.shape[-1]
    mean_QN1 = torch.linalg.vecdot(d_out, out.to(query.dtype)).unsqueeze(-1)
    d_scores = (d_out @ chosen[..., -width:].mT).sub_(mean_QN1).mul_(shares_QNC).mul_(scale)
    d_chosen = d_scores.mT @ query
    d_chosen[..., -width:] += shares_QNC.mT @ d_out
    return (d_scores @ chosen).to(d_out.dtype), d_chosen
