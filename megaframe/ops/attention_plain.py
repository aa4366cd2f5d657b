"""Attention by plain matrix products, where no fused kernel computes it: all scores of a tile at
once, or those of some queries at a time.

Heads come before tokens. Shape legend: B samples, Q queries, K keys, N query heads, G key/value
heads.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

_QUERIES_PER_STEP = 128
"""Queries whose scores exist at once where they are bounded, which no fused attention does."""
ScoreRule = tuple[float, float | None]
"""How scores follow from products: their factor, and their bound if they have one."""


def _iterate_rows(
    queries: int, keys: int, mask: Tensor | None, causal: bool, query: Tensor
) -> Iterator[tuple[slice, slice, Tensor | None]]:
    """Yield some queries of a tile, the keys that they may see, and a bias for these; so few that
    their scores take little memory."""
    for start in range(0, queries, _QUERIES_PER_STEP):
        rows = slice(start, min(start + _QUERIES_PER_STEP, queries))
        visible = slice(0, rows.stop if causal else keys)
        part = None if mask is None else mask[..., rows, visible]
        if causal:
            ones = torch.ones(rows.stop - start, rows.stop, dtype=torch.bool, device=query.device)
            part = ones.tril(start)
        yield rows, visible, to_bias(part, query.dtype)


def attend_in_rows(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    causal: bool,
    rule: ScoreRule,
) -> tuple[Tensor, Tensor]:
    """Compute a tile like `attend_plain`, some queries at a time.

    Args:
        query: The queries, [B, N, Q, D].
        key: The keys, [B, G, K, D].
        value: The values, [B, G, K, V].
        mask: True where a query sees a key; None if nothing is hidden by a mask.
        causal: With as many queries as keys, each query sees itself and what is before it.
        rule: Factor of the scores, and their bound if they have one.

    Returns:
        The output [B, N, Q, V] and the log-sum-exp [B, N, Q].
    """
    parts = [
        attend_plain(query[:, :, rows], key[:, :, keys], value[:, :, keys], bias, rule)
        for rows, keys, bias in _iterate_rows(query.shape[2], key.shape[2], mask, causal, query)
    ]
    outs, lses = zip(*parts, strict=True)
    # Tokens first in memory, so that the caller's transpose back gives a contiguous tensor.
    out = torch.cat([out.transpose(1, 2) for out in outs], 1).transpose(1, 2)
    return out, torch.cat(lses, 2)


def attend_in_rows_backward(
    d_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    mask: Tensor | None,
    causal: bool,
    rule: ScoreRule,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the gradients of a tile like `attend_plain_backward`, some queries at a time.

    Args:
        d_out: Gradient of the output, [B, N, Q, V].
        query: The queries, [B, N, Q, D].
        key: The keys, [B, G, K, D].
        value: The values, [B, G, K, V].
        out: The output merged over all tiles, [B, N, Q, V].
        lse: The log-sum-exp merged over all tiles, [B, N, Q].
        mask: True where a query sees a key; None if nothing is hidden by a mask.
        causal: With as many queries as keys, each query sees itself and what is before it.
        rule: Factor of the scores, and their bound if they have one.

    Returns:
        The gradients of queries, keys and values.
    """
    d_query = torch.empty_like(query)
    # Summed in at least fp32, and rounded once.
    d_key, d_value = (torch.zeros_like(x, dtype=lse.dtype) for x in (key, value))
    for rows, keys, bias in _iterate_rows(query.shape[2], key.shape[2], mask, causal, query):
        d_query[:, :, rows], d_some_keys, d_some_values = attend_plain_backward(
            d_out[:, :, rows],
            query[:, :, rows],
            key[:, :, keys],
            value[:, :, keys],
            out[:, :, rows],
            lse[:, :, rows],
            bias,
            rule,
        )
        d_key[:, :, keys] += d_some_keys
        d_value[:, :, keys] += d_some_values
    return d_query, d_key.to(key.dtype), d_value.to(value.dtype)


def attend_plain(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, rule: ScoreRule
) -> tuple[Tensor, Tensor]:
    """Return softmax(scores + bias) v and the log-sum-exp, by matrix products; heads come first.

    Args:
        query: The queries, [B, N, Q, D].
        key: The keys, [B, G, K, D].
        value: The values, [B, G, K, V].
        bias: As from `to_bias`; None if nothing is hidden.
        rule: Factor of the scores, and their bound if they have one.

    Returns:
        The output [B, N, Q, V] and the log-sum-exp [B, N, Q]. The latter is in at least fp32, and
        -inf where a query sees no key.
    """
    wide = torch.promote_types(query.dtype, torch.float32)
    scores, _ = _compute_scores(query, key, bias, rule, wide)
    lse = scores.logsumexp(-1)
    # A query that sees no key has lse = -inf, and -inf - -inf would be NaN.
    shares = (scores - lse.masked_fill(lse.isinf(), 0.0)[..., None]).exp()
    # Weights are rounded to the type of the values, as in the fused attention.
    out = _group_heads(shares.to(query.dtype), key.shape[1]) @ value[:, :, None]
    return out.flatten(1, 2), lse


def attend_plain_backward(
    d_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    bias: Tensor | None,
    rule: ScoreRule,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the gradients of a tile by matrix products.

    With weights p and dp = d_out v^T: dv = p^T d_out, ds = scale p (dp - sum(d_out out)), dq =
    ds k, dk = ds^T q. With a bound c, ds is times 1 - (score / c)^2. Gradients of keys and values
    are summed over the query heads that share them.

    Args:
        d_out: Gradient of the output, [B, N, Q, V].
        query: The queries, [B, N, Q, D].
        key: The keys, [B, G, K, D].
        value: The values, [B, G, K, V].
        out: The output merged over all tiles, [B, N, Q, V].
        lse: The log-sum-exp merged over all tiles, [B, N, Q].
        bias: As from `to_bias`; None if nothing is hidden.
        rule: Factor of the scores, and their bound if they have one.

    Returns:
        The gradients of queries, keys and values.
    """
    wide, groups = lse.dtype, key.shape[1]
    # Weights among all keys of all tiles, because lse is merged over them.
    scores, slope = _compute_scores(query, key, bias, rule, wide)
    # A query that sees no key has lse = -inf, and -inf - -inf would be NaN.
    shares = (scores - lse.masked_fill(lse.isinf(), 0.0)[..., None]).exp()
    d_shares = (_group_heads(d_out, groups) @ value[:, :, None].mT).flatten(1, 2).to(wide)
    # Equals sum(p dp) over all keys, also those of other tiles, because out is merged too.
    mean = (d_out.to(wide) * out.to(wide)).sum(-1, keepdim=True)
    d_scores = shares * (d_shares - mean) * rule[0]
    if slope is not None:
        d_scores *= slope
    d_scores_grouped = _group_heads(d_scores.to(query.dtype), groups)
    shares_grouped = _group_heads(shares.to(query.dtype), groups)
    d_query = (d_scores_grouped @ key[:, :, None]).flatten(1, 2)
    # Query heads that share a key head each contribute to its gradient.
    d_key = (d_scores_grouped.mT @ _group_heads(query, groups)).sum(2)
    d_value = (shares_grouped.mT @ _group_heads(d_out, groups)).sum(2)
    return d_query, d_key, d_value


def _compute_scores(
    query: Tensor, key: Tensor, bias: Tensor | None, rule: ScoreRule, wide: torch.dtype
) -> tuple[Tensor, Tensor | None]:
    """Return the scores [B, N, Q, K], scaled, bounded and with the bias; and the derivative of the
    bounded scores, None without a bound."""
    scale, softcap = rule
    product = _group_heads(query, key.shape[1]) @ key[:, :, None].mT
    scores, slope = product.flatten(1, 2).to(wide) * scale, None
    if softcap is not None:
        bounded = (scores / softcap).tanh_()
        scores, slope = bounded * softcap, 1.0 - bounded.square()
    return (scores if bias is None else scores + bias.to(wide)), slope


def _group_heads(x: Tensor, groups: int) -> Tensor:
    """View [B, N, ...] as [B, G, N / G, ...]."""
    return x.unflatten(1, (groups, -1))


def to_bias(mask: Tensor | None, dtype: torch.dtype | None) -> Tensor | None:
    """Return a bias that is 0 where the mask is true and -inf elsewhere.

    Args:
        mask: True where a query sees a key, [Q, K] or [B, 1, Q, K]; None if nothing is hidden.
        dtype: Type of the bias; None for `torch.get_default_dtype()`.

    Returns:
        The bias with the batch and head dims that torch expects, or None without a mask.
    """
    if mask is None:
        return None
    mask = mask if mask.dim() == 4 else mask[None, None]
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, -math.inf)
