"""Attention one tile at a time: some queries against some keys, with results that can be merged.

Every function also returns, or takes, the logarithm of the sum of exponentials of each query's
scores. With it the outputs of two tiles are merged exactly (Milakov and Gimelshein 2018; the
algebra of FlashAttention, Dao et al. 2022). Which implementation computes a tile is decided only
here. Shape legend: B samples, Q queries, K keys, N query heads, G key/value heads, D width of a
query or key head, V width of a value head.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.backends.cuda import SDPAParams, can_use_flash_attention

from megaframe.ops import cpu_attention

_HOSTS = ("cpu", "meta")
"""Devices with the fused attention for CPUs. Meta tensors use it for their shapes only."""


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
) -> tuple[Tensor, Tensor]:
    """Compute attention of a tile.

    Args:
        query_BQND: The queries, [B, Q, N, D].
        key_BKGD: The keys, [B, K, G, D].
        value_BKGV: The values, [B, K, G, V].
        mask: As from `AttentionMask.make_dense`; None if nothing is hidden by a mask.
        causal: With as many queries as keys, each query sees itself and what is before it.
        scale: Factor on the scores.

    Returns:
        The output [B, Q, N, V] and the log-sum-exp [B, N, Q]. The latter is in at least fp32, and
        -inf where a query sees no key.
    """
    query, key, value = _move_heads_first(query_BQND, key_BKGD, value_BKGV)
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
        out, lse = _attend_plain(query, key, value, bias, scale)
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

    Returns:
        What it adds to the gradients of queries [B, Q, N, D], keys [B, K, G, D] and values
        [B, K, G, V].
    """
    heads = query, _, _ = _move_heads_first(query_BQND, key_BKGD, value_BKGV)
    d_out, out = d_out.transpose(1, 2), out_BQNV.transpose(1, 2)
    gradients: tuple[Tensor, ...]
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
        gradients = _attend_plain_backward(d_out, *heads, out, lse_BNQ, bias, scale)
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


def _attend_plain(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    """Return softmax(scale q k^T + bias) v and the log-sum-exp, by matrix products; heads come
    first."""
    wide = torch.promote_types(query.dtype, torch.float32)
    scores = _compute_scores(query, key, bias, scale, wide)
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
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """With weights p and dp = d_out v^T: dv = p^T d_out, ds = scale p (dp - sum(d_out out)), dq =
    ds k, dk = ds^T q. Gradients of keys and values are summed over the query heads that share
    them."""
    wide, groups = lse.dtype, key.shape[1]
    # Weights among all keys of all tiles, because lse is merged over them.
    shares = (_compute_scores(query, key, bias, scale, wide) - lse[..., None]).exp()
    d_shares = (_group_heads(d_out, groups) @ value[:, :, None].mT).flatten(1, 2).to(wide)
    # Equals sum(p dp) over all keys, also those of other tiles, because out is merged too.
    mean = (d_out.to(wide) * out.to(wide)).sum(-1, keepdim=True)
    d_scores = shares * (d_shares - mean) * scale
    d_scores_grouped = _group_heads(d_scores.to(query.dtype), groups)
    shares_grouped = _group_heads(shares.to(query.dtype), groups)
    d_query = (d_scores_grouped @ key[:, :, None]).flatten(1, 2)
    # Query heads that share a key head each contribute to its gradient.
    d_key = (d_scores_grouped.mT @ _group_heads(query, groups)).sum(2)
    d_value = (shares_grouped.mT @ _group_heads(d_out, groups)).sum(2)
    return d_query, d_key, d_value


def _compute_scores(
    query: Tensor, key: Tensor, bias: Tensor | None, scale: float, wide: torch.dtype
) -> Tensor:
    """Return the scores [B, N, Q, K], scaled and with the bias."""
    product = _group_heads(query, key.shape[1]) @ key[:, :, None].mT
    scores = product.flatten(1, 2).to(wide) * scale
    return scores if bias is None else scores + bias.to(wide)


def _group_heads(x: Tensor, groups: int) -> Tensor:
    """View [B, N, ...] as [B, G, N / G, ...]."""
    return x.unflatten(1, (groups, -1))
