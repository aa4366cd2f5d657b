"""Attention that never holds all scores, forward and backward, over the spans that queries see.

The backward pass recomputes the scores from the log-sum-exp of each query. It visits the tiles
twice: by queries for the gradients of queries, then by keys for those of keys and values. No two
programs add to the same place, so results are bitwise repeatable, at the cost of seven matrix
products per tile instead of five.

Shape legend: B samples, Q queries, K keys, N query heads, G key and value heads, D width of a head.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from megaframe_kernels.attention.launches import launch_backward, launch_forward, scale_or_default
from megaframe_kernels.attention.libraries import LIBRARIES
from megaframe_kernels.attention.spans import Spans
from megaframe_kernels.device import read_shared_memory
from megaframe_kernels.direct import bypass_dispatcher
from megaframe_kernels.installed import require_nothing
from megaframe_kernels.kernel import Implementation, Kernel, refuse_types

_WIDEST = 256
_SHARED_OF_WIDEST = 136 * 1024
"""Bytes of shared memory that heads wider than 128 need on chips before Hopper."""


def run_reference(
    query_BQND: Tensor,
    key_BKGD: Tensor,
    value_BKGD: Tensor,
    spans: Spans,
    *,
    scale: float | None = None,
    softcap: float | None = None,
    sinks_N: Tensor | None = None,
    need_lse: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """softmax(scale q k) v over the keys that each query sees, and 0 for a query that sees none.

    Query head n uses key head n // (N / G).

    Args:
        query_BQND: Queries [B, Q, N, D].
        key_BKGD: Keys [B, K, G, D].
        value_BKGD: Values [B, K, G, D].
        spans: Which keys each query sees.
        scale: Factor of the scores, by default D^(-1/2).
        softcap: Scores s become cap tanh(s / cap).
        sinks_N: One extra score per head, whose value is 0.
        need_lse: Whether the log-sum-exp is returned.

    Returns:
        The output [B, Q, N, D] and, if `need_lse`, the log-sum-exp of the scores (sinks included),
        [B, N, Q] in at least fp32, which has no gradient.
    """
    # fp32 at least; fp64 stays fp64, in which layouts are compared.
    wide = torch.promote_types(query_BQND.dtype, torch.float32)
    query, key, value = (x.to(wide).transpose(1, 2) for x in (query_BQND, key_BKGD, value_BKGD))
    repeat = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(repeat, 1), value.repeat_interleave(repeat, 1)
    scores = query @ key.transpose(2, 3) * scale_or_default(query_BQND, scale)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~spans.mask()[:, None], -math.inf)
    if sinks_N is not None:
        # A sink is one more column of scores, so the log-sum-exp below includes it. Its value is 0,
        # so its share is cut off before the product with the values.
        sinks = sinks_N.to(wide)[None, :, None, None].expand(*scores.shape[:3], 1)
        scores = torch.cat((scores, sinks), -1)
    elif not scores.shape[-1]:
        # Without keys, one column of -inf keeps the last dim from being empty.
        scores = scores.new_full((*scores.shape[:3], 1), -math.inf)
    lse = scores.logsumexp(-1)
    # -inf - (-inf) would be NaN. Shifted by 0, all shares of a query that sees nothing are 0.
    sees_nothing = lse == -math.inf
    shift = lse.masked_fill(sees_nothing, 0.0)
    probabilities = (scores - shift[..., None]).exp()[..., : key.shape[2]]
    out = (probabilities @ value).transpose(1, 2).to(query_BQND.dtype)
    return out, lse.detach() if need_lse else None


def _forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    starts: Tensor,
    stops: Tensor,
    first: Tensor,
    last: Tensor,
    sinks: Tensor | None,
    scale: float | None,
    softcap: float | None,
) -> tuple[Tensor, Tensor]:
    # first and last are for the backward pass: they are inputs of the operator so that `_keep` can
    # save them.
    return launch_forward(query, key, value, starts, stops, sinks, scale, softcap)


def _backward(
    d_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    starts: Tensor,
    stops: Tensor,
    first: Tensor,
    last: Tensor,
    sinks: Tensor | None,
    scale: float | None,
    softcap: float | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    saved = (query, key, value, out, lse, starts, stops, first, last, sinks)
    return launch_backward(d_out, *saved, scale, softcap)


_forward_op = torch.library.custom_op("megaframe::attention", _forward, mutates_args=())
_backward_op = torch.library.custom_op("megaframe::attention_backward", _backward, mutates_args=())


@_forward_op.register_fake
def _(query: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    batch, queries, heads, _width = query.shape
    out = torch.empty_like(query, memory_format=torch.contiguous_format)
    return out, query.new_empty(batch, heads, queries, dtype=torch.float32)


@_backward_op.register_fake
def _(d_out: Tensor, query: Tensor, key: Tensor, value: Tensor, *others: Any) -> tuple[Tensor, ...]:
    sinks = others[6]
    gradients = tuple(
        torch.empty_like(x, memory_format=torch.contiguous_format) for x in (query, key, value)
    )
    return *gradients, query.new_empty(0) if sinks is None else torch.empty_like(sinks)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    query, key, value, starts, stops, first, last, sinks, *ctx.numbers = inputs
    ctx.save_for_backward(query, key, value, *output, starts, stops, first, last, sinks)
    ctx.mark_non_differentiable(output[1])
    # None instead of zeros for what has no gradient, such as the log-sum-exp.
    ctx.set_materialize_grads(False)


def _compute_gradients(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
    saved = ctx.saved_tensors
    d_out = torch.zeros_like(saved[0]) if gradients[0] is None else gradients[0]
    *d_inputs, d_sinks = _direct_backward(d_out, *saved, *ctx.numbers)
    # None for the four tensors of the spans, and for scale and softcap.
    return *d_inputs, *(4 * [None]), None if saved[-1] is None else d_sinks, None, None


_forward_op.register_autograd(_compute_gradients, setup_context=_keep)
_direct_forward = bypass_dispatcher(_forward_op, _forward, _keep, _compute_gradients)
_direct_backward = bypass_dispatcher(_backward_op, _backward)


def run_reference_backward(
    d_out_BQND: Tensor,
    query_BQND: Tensor,
    key_BKGD: Tensor,
    value_BKGD: Tensor,
    out_BQND: Tensor,
    lse_BNQ: Tensor,
    spans: Spans,
    *,
    scale: float | None = None,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the contributions of these keys to the gradients of queries, keys and values.

    With shares p = exp(s - lse) of scores s = scale q k and dp = d_out v: dv = p d_out, ds =
    scale p (dp - sum(d_out out)), dq = ds k, dk = ds q. A softcap bounds the scores, and ds has its
    slope 1 - (s / cap)^2 as another factor.

    Args:
        d_out_BQND: Gradient of the output [B, Q, N, D].
        query_BQND: Queries [B, Q, N, D].
        key_BKGD: Keys [B, K, G, D]; maybe only a part of those that the queries see (a tile of a
            ring).
        value_BKGD: Values [B, K, G, D] of these keys.
        out_BQND: Output over all keys that the queries see, [B, Q, N, D].
        lse_BNQ: Log-sum-exp of the scores over all keys that the queries see, [B, N, Q].
        spans: Which of the given keys each query sees.
        scale: Factor of the scores, by default D^(-1/2).
        softcap: Scores s become cap tanh(s / cap).

    Returns:
        The gradients of queries, keys and values, in the shapes and the type of these.
    """
    # Sums over heads and queries are in fp32 at least, and rounded once, at the end.
    wide = torch.promote_types(query_BQND.dtype, torch.float32)
    arguments = (d_out_BQND, query_BQND, key_BKGD, value_BKGD, out_BQND)
    d_out, query, key, value, out = (x.to(wide).transpose(1, 2) for x in arguments)
    groups, scale = key.shape[1], scale_or_default(query_BQND, scale)
    key, value = (x.repeat_interleave(query.shape[1] // groups, 1) for x in (key, value))
    scores, slope = query @ key.mT * scale, torch.ones((), dtype=wide, device=query.device)
    if softcap is not None:
        bounded = torch.tanh(scores / softcap)
        scores, slope = softcap * bounded, 1.0 - bounded.square()
    scores = scores.masked_fill(~spans.mask()[:, None], -math.inf)
    known_lse = lse_BNQ[..., None].to(wide)
    # The log-sum-exp is over all keys, so these are the final shares of the given part of the keys.
    shares = (scores - known_lse.masked_fill(known_lse == -math.inf, 0.0)).exp()
    # sum over all keys of p dp, since out is the sum of p v (Dao et al. 2022). The keys given here
    # need not be all of them.
    mean = (d_out * out).sum(-1, keepdim=True)
    d_scores = shares * (d_out @ value.mT - mean) * slope * scale
    gradients = d_scores @ key, d_scores.mT @ query, shares.mT @ d_out
    d_query, d_key, d_value = (x.transpose(1, 2) for x in gradients)
    # Query heads that share a head of keys add to the same gradient.
    d_key, d_value = (x.unflatten(2, (groups, -1)).sum(3) for x in (d_key, d_value))
    kind = query_BQND.dtype
    return d_query.to(kind), d_key.to(kind), d_value.to(kind)


def run_triton_backward(
    d_out_BQND: Tensor,
    query_BQND: Tensor,
    key_BKGD: Tensor,
    value_BKGD: Tensor,
    out_BQND: Tensor,
    lse_BNQ: Tensor,
    spans: Spans,
    *,
    scale: float | None = None,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute `run_reference_backward` in Triton.

    Args:
        d_out_BQND: As in `run_reference_backward`, and so are all others.
        query_BQND: Queries.
        key_BKGD: Keys.
        value_BKGD: Values.
        out_BQND: Output.
        lse_BNQ: Log-sum-exp.
        spans: Which keys each query sees.
        scale: Factor of the scores.
        softcap: Bound of the scores.
    """
    saved = (query_BQND, key_BKGD, value_BKGD, out_BQND, lse_BNQ.contiguous(), *spans.tensors)
    # None: sinks are added to all tiles together.
    gradients = _direct_backward(d_out_BQND, *saved, None, scale, softcap)
    d_query, d_key, d_value, _ = gradients
    return d_query, d_key, d_value


def run_triton(
    query_BQND: Tensor,
    key_BKGD: Tensor,
    value_BKGD: Tensor,
    spans: Spans,
    *,
    scale: float | None = None,
    softcap: float | None = None,
    sinks_N: Tensor | None = None,
    need_lse: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Compute the reference in Triton.

    Args:
        query_BQND: As in `run_reference`, and so are all others.
        key_BKGD: Keys.
        value_BKGD: Values.
        spans: Which keys each query sees.
        scale: Factor of the scores.
        softcap: Bound of the scores.
        sinks_N: Logits of the sinks.
        need_lse: Return the log-sum-exp too.
    """
    arguments = (query_BQND, key_BKGD, value_BKGD, *spans.tensors, sinks_N)
    out, lse = _direct_forward(*arguments, scale, softcap)
    return out, lse if need_lse else None


def _refuse_inputs(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    spans: Spans,
    *,
    sinks_N: Tensor | None = None,
    **_: Any,
) -> str | None:
    if query.shape[-1] > _WIDEST:
        return f"a head is {query.shape[-1]} wide; at most {_WIDEST} fits in registers"
    if query.is_cuda and query.shape[-1] > 128:
        shared_bytes = read_shared_memory(query.device.index)
        if shared_bytes < _SHARED_OF_WIDEST:
            return f"{shared_bytes} bytes of shared memory are too few for heads wider than 128"
    if value.shape[-1] != query.shape[-1]:
        return f"values are {value.shape[-1]} wide and queries {query.shape[-1]}"
    if query.shape[2] % key.shape[2]:
        return f"{query.shape[2]} query heads cannot share {key.shape[2]} key heads"
    if len({query.dtype, key.dtype, value.dtype}) > 1:
        return "queries, keys and values are of different types"
    return refuse_types(query, key, value, sinks_N)


def _refuse_for_backward(
    d_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    spans: Spans,
    **_: Any,
) -> str | None:
    if out.dtype != query.dtype or d_out.dtype != query.dtype:
        return f"queries are {query.dtype}, outputs {out.dtype} and their gradients {d_out.dtype}"
    return _refuse_inputs(query, key, value, spans) or refuse_types(lse)


_ALL = (Implementation("triton", run_triton, require_nothing, _refuse_inputs), *LIBRARIES)
KERNEL = Kernel(
    "attention",
    run_reference,
    {implementation.name: implementation for implementation in _ALL},
    constant=8.0,
)
BACKWARD = Kernel(
    "attention_backward",
    run_reference_backward,
    {
        "triton": Implementation(
            "triton", run_triton_backward, require_nothing, _refuse_for_backward
        )
    },
    constant=8.0,
)
