"""Attention one tile at a time: some queries against some keys, with results that can be merged.

Every function also returns, or takes, the logarithm of the sum of exponentials of each query's
scores. With it the outputs of two tiles are merged exactly (Milakov and Gimelshein 2018; the
algebra of FlashAttention, Dao et al. 2022). Which implementation computes a tile is decided only
here. Shape legend: B samples, Q queries, K keys, N query heads, G key/value heads, D width of a
query or key head, V width of a value head.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.backends.cuda import SDPAParams, can_use_flash_attention

from megaframe.ops import cpu_attention

_HOSTS = ("cpu", "meta")
"""Devices with the fused attention for CPUs. Meta tensors use it for their shapes only."""
_QUERIES_PER_STEP = 128
"""Queries whose scores exist at once where they are bounded, which no fused attention does."""


def should_compute_in_blocks(query_BQND: Tensor, key_BKGD: Tensor, mask: Tensor | None) -> bool:
    """Return whether a tile is faster as products of blocks than in torch's fused attention."""
    on_host = query_BQND.device.type == "cpu" and mask is None
    return on_host and cpu_attention.is_faster(query_BQND.transpose(1, 2), key_BKGD.transpose(1, 2))


def attend(
    query_BQND: Tensor,
    key_BKGD: Tensor,
    value_BKGV: Tensor,
    mask: Tensor | None,
    *,
    causal: bool,
    scale: float,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute attention of a tile.

    Args:
        query_BQND: The queries, [B, Q, N, D].
        key_BKGD: The keys, [B, K, G, D].
        value_BKGV: The values, [B, K, G, V].
        mask: As from `AttentionMask.make_dense`; None if nothing is hidden by a mask.
        causal: With as many queries as keys, each query sees itself and what is before it.
        scale: Factor on the scores.
        softcap: Bound c of the scores, which become c tanh(score / c); None for no bound.

    Returns:
        The output [B, Q, N, V] and the log-sum-exp [B, N, Q]. The latter is in at least fp32, and
        -inf where a query sees no key.
    """
    query, key, value = _move_heads_first(query_BQND, key_BKGD, value_BKGV)
    if softcap is not None and not query.is_meta:
        out, lse = _attend_in_rows(query, key, value, mask, causal, (scale, softcap))
        return out.transpose(1, 2), lse
    if should_compute_in_blocks(query_BQND, key_BKGD, mask):
        out, lse = cpu_attention.attend(query, key, value, causal=causal, scale=scale)
        return out.transpose(1, 2), lse
    alike = _pad_to_one_width(query, key, value)
    if query.device.type in _HOSTS:
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            *alike, 0.0, causal, attn_mask=_to_bias(mask, query.dtype), scale=scale
        )
    elif _can_use_flash(*alike, mask, causal):
        out, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(
            *alike, 0.0, causal, scale=scale
        )
    else:
        # In torch's default type; `_scores` converts it to that of the scores.
        bias = _to_bias(_make_causal(mask, query, causal), None)
        out, lse = _attend_plain(query, key, value, bias, (scale, None))
    # A query that sees no key gets -inf, so its output has weight 0 when tiles are merged.
    if mask is not None:
        lse = lse.masked_fill(~mask.any(-1), -math.inf)
    return out[..., : value.shape[-1]].transpose(1, 2), lse


def attend_backward(
    d_out: Tensor,
    query_BQND: Tensor,
    key_BKGD: Tensor,
    value_BKGV: Tensor,
    out_BQNV: Tensor,
    lse_BNQ: Tensor,
    mask: Tensor | None,
    *,
    causal: bool,
    scale: float,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute what a tile adds to gradients.

    Args:
        d_out: Gradient of the output, [B, Q, N, V].
        query_BQND: The queries, [B, Q, N, D].
        key_BKGD: The keys, [B, K, G, D].
        value_BKGV: The values, [B, K, G, V].
        out_BQNV: The output merged over all tiles, [B, Q, N, V].
        lse_BNQ: The log-sum-exp merged over all tiles, [B, N, Q], so that exp(score - lse) is the
            weight of a key among all keys that the query sees, in whichever tile.
        mask: As for `attend`.
        causal: As for `attend`.
        scale: Factor on the scores.
        softcap: As for `attend`.

    Returns:
        What it adds to the gradients of queries [B, Q, N, D], keys [B, K, G, D] and values
        [B, K, G, V].
    """
    heads = query, _, _ = _move_heads_first(query_BQND, key_BKGD, value_BKGV)
    d_out, out = d_out.transpose(1, 2), out_BQNV.transpose(1, 2)
    gradients: tuple[Tensor, ...]
    if softcap is not None and not query.is_meta:
        gradients = _attend_in_rows_backward(
            d_out, *heads, out, lse_BNQ, mask, causal, (scale, softcap)
        )
        return _move_heads_back(gradients, heads)
    if should_compute_in_blocks(query_BQND, key_BKGD, mask):
        gradients = cpu_attention.attend_backward(
            d_out, *heads, out, lse_BNQ, causal=causal, scale=scale
        )
        return _move_heads_back(gradients, heads)
    alike = _pad_to_one_width(*heads)
    # Padded outputs are zero and padded values get no weight, so sums over the width are unchanged.
    d_alike, out_alike = (_pad_head(end, alike[0].shape[-1]) for end in (d_out, out))
    if query.device.type in _HOSTS:
        gradients = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            d_alike,
            *alike,
            out_alike,
            lse_BNQ,
            0.0,
            causal,
            attn_mask=_to_bias(mask, query.dtype),
            scale=scale,
        )
    elif _can_use_flash(*alike, mask, causal):
        gradients = _attend_flash_backward(d_alike, *alike, out_alike, lse_BNQ, causal, scale)
    else:
        bias = _to_bias(_make_causal(mask, query, causal), None)
        gradients = _attend_plain_backward(d_out, *heads, out, lse_BNQ, bias, (scale, None))
    return _move_heads_back(gradients, heads)


def merge(out_BQND: Tensor, lse_BNQ: Tensor, tile_out: Tensor, tile_lse: Tensor) -> None:
    """Merge one more tile of keys into `out` and `lse`, in place. Before the first tile, out is 0
    and lse is -inf.

    out = (e^lse out + e^lse' out') / (e^lse + e^lse'), so the weight of the new tile is a sigmoid.

    Args:
        out_BQND: The output so far, [B, Q, N, V]; changed.
        lse_BNQ: Its log-sum-exp, [B, N, Q]; changed.
        tile_out: The output of the tile, [B, Q, N, V].
        tile_lse: Its log-sum-exp, [B, N, Q].
    """
    # No exponential of a log-sum-exp is computed, so nothing overflows.
    weight_BQN1 = torch.sigmoid(tile_lse - lse_BNQ).transpose(1, 2)[..., None]
    # Uses the weight before `lse` is overwritten with the sum of both.
    out_BQND.lerp_(tile_out.to(out_BQND.dtype), weight_BQN1.to(out_BQND.dtype))
    torch.logaddexp(lse_BNQ, tile_lse, out=lse_BNQ)


def add_sinks(out_BQNV: Tensor, lse_BNQ: Tensor, sinks_N: Tensor) -> None:
    """Add one more logit without a value to each query's softmax, in place.

    Args:
        out_BQNV: The output over all keys, [B, Q, N, V]; changed.
        lse_BNQ: Its log-sum-exp, [B, N, Q]; changed.
        sinks_N: The logit of each head.
    """
    logits_N1 = sinks_N.to(lse_BNQ.dtype)[:, None]
    # The share that is left to the keys, e^lse / (e^lse + e^sink), is a sigmoid.
    out_BQNV.mul_(torch.sigmoid(lse_BNQ - logits_N1).transpose(1, 2)[..., None].to(out_BQNV.dtype))
    torch.logaddexp(lse_BNQ, logits_N1, out=lse_BNQ)


def compute_sinks_gradient(
    d_out: Tensor, out_BQNV: Tensor, lse_BNQ: Tensor, sinks_N: Tensor
) -> Tensor:
    """Return the gradient of the logits without values, [N].

    Args:
        d_out: Gradient of the output, [B, Q, N, V].
        out_BQNV: The output, over all keys and the logits.
        lse_BNQ: Its log-sum-exp, [B, N, Q].
        sinks_N: The logit of each head.
    """
    wide = lse_BNQ.dtype
    # As for the other scores, ds = p (dp - sum(p dp)), but without a value dp is 0.
    mean_BQN = torch.linalg.vecdot(d_out.to(wide), out_BQNV.to(wide))
    shares_BNQ = (sinks_N.to(wide)[:, None] - lse_BNQ).exp()
    return (shares_BNQ.transpose(1, 2) * mean_BQN).sum((0, 1)).neg_().to(sinks_N.dtype)


def _move_heads_first(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)


def _move_heads_back(
    gradients: tuple[Tensor, ...], heads: tuple[Tensor, Tensor, Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """Move heads back behind tokens, and cut off padding."""
    d_query, d_key, d_value = (
        gradient[..., : head.shape[-1]].transpose(1, 2)
        for gradient, head in zip(gradients, heads, strict=True)
    )
    return d_query, d_key, d_value


def _pad_to_one_width(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Pad all heads to one width, as torch's fused attention requires. The zeros change no score,
    and padded values only add outputs that are zero."""
    width = max(query.shape[-1], value.shape[-1])
    return _pad_head(query, width), _pad_head(key, width), _pad_head(value, width)


def _pad_head(head: Tensor, width: int) -> Tensor:
    missing = width - head.shape[-1]
    return F.pad(head, (0, missing)) if missing else head


def _to_bias(mask: Tensor | None, dtype: torch.dtype | None) -> Tensor | None:
    """Return a bias that is 0 where the mask is true and -inf elsewhere, with the batch and head
    dims that torch expects. dtype: None for `torch.get_default_dtype()`."""
    if mask is None:
        return None
    mask = mask if mask.dim() == 4 else mask[None, None]
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, -math.inf)


def _make_causal(mask: Tensor | None, query: Tensor, causal: bool) -> Tensor | None:
    if not causal:
        return mask
    length = query.shape[2]
    return torch.ones(length, length, dtype=torch.bool, device=query.device).tril()


def _can_use_flash(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool
) -> bool:
    """Return whether torch's fused attention takes these on this GPU. The operator, unlike torch's
    public function, does not pad heads to a multiple of 8 elements."""
    parameters = SDPAParams(query, key, value, mask, 0.0, causal, True)
    return query.shape[3] % 8 == 0 and can_use_flash_attention(parameters)


def _attend_flash_backward(
    d_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    causal: bool,
    scale: float,
) -> tuple[Tensor, ...]:
    nothing = torch.empty(0, dtype=torch.int64, device=query.device)  # no dropout: no random state
    return torch.ops.aten._scaled_dot_product_flash_attention_backward(
        d_out,
        query,
        key,
        value,
        out,
        lse.contiguous(),
        None,
        None,
        query.shape[2],
        key.shape[2],
        0.0,
        causal,
        nothing,
        nothing,
        scale=scale,
    )


_Scores = tuple[float, float | None]
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
        yield rows, visible, _to_bias(part, query.dtype)


def _attend_in_rows(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    causal: bool,
    rule: _Scores,
) -> tuple[Tensor, Tensor]:
    """Compute a tile like `_attend_plain`, some queries at a time."""
    parts = [
        _attend_plain(query[:, :, rows], key[:, :, keys], value[:, :, keys], bias, rule)
        for rows, keys, bias in _iterate_rows(query.shape[2], key.shape[2], mask, causal, query)
    ]
    outs, lses = zip(*parts, strict=True)
    # Tokens first in memory, so that the caller's transpose back gives a contiguous tensor.
    out = torch.cat([out.transpose(1, 2) for out in outs], 1).transpose(1, 2)
    return out, torch.cat(lses, 2)


def _attend_in_rows_backward(
    d_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    mask: Tensor | None,
    causal: bool,
    rule: _Scores,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the gradients of a tile like `_attend_plain_backward`, some queries at a time."""
    d_query = torch.empty_like(query)
    # Summed in at least fp32, and rounded once.
    d_key, d_value = (torch.zeros_like(x, dtype=lse.dtype) for x in (key, value))
    for rows, keys, bias in _iterate_rows(query.shape[2], key.shape[2], mask, causal, query):
        d_query[:, :, rows], d_some_keys, d_some_values = _attend_plain_backward(
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


def _attend_plain(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, rule: _Scores
) -> tuple[Tensor, Tensor]:
    """Return softmax(scores + bias) v and the log-sum-exp, by matrix products; heads come
    first."""
    wide = torch.promote_types(query.dtype, torch.float32)
    scores, _ = _compute_scores(query, key, bias, rule, wide)
    lse = scores.logsumexp(-1)
    # A query that sees no key has lse = -inf, and -inf - -inf would be NaN.
    shares = (scores - lse.masked_fill(lse.isinf(), 0.0)[..., None]).exp()
    # Weights are rounded to the type of the values, as in the fused attention.
    out = _group_heads(shares.to(query.dtype), key.shape[1]) @ value[:, :, None]
    return out.flatten(1, 2), lse


def _attend_plain_backward(
    d_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    bias: Tensor | None,
    rule: _Scores,
) -> tuple[Tensor, Tensor, Tensor]:
    """With weights p and dp = d_out v^T: dv = p^T d_out, ds = scale p (dp - sum(d_out out)), dq =
    ds k, dk = ds^T q. With a bound c, ds is times 1 - (score / c)^2. Gradients of keys and values
    are summed over the query heads that share them."""
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
    query: Tensor, key: Tensor, bias: Tensor | None, rule: _Scores, wide: torch.dtype
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
