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
from megaframe.ops.attention_plain import (
    attend_in_rows,
    attend_in_rows_backward,
    attend_plain,
    attend_plain_backward,
    to_bias,
)

_HOSTS = ("cpu", "meta")
"""Devices with the fused attention for CPUs. Meta tensors use it for their shapes only."""


def should_compute_in_blocks(query_BQND: Tensor, key_BKGD: Tensor, mask: Tensor | None) -> bool:
    """Return whether a tile is faster as products of blocks than in torch's fused attention.

    Args:
        query_BQND: Queries of the tile.
        key_BKGD: Its keys.
        mask: Which of them see each other; None for no mask.
    """
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
        out, lse = attend_in_rows(query, key, value, mask, causal, (scale, softcap))
        return out.transpose(1, 2), lse
    if should_compute_in_blocks(query_BQND, key_BKGD, mask):
        out, lse = cpu_attention.attend(query, key, value, causal=causal, scale=scale)
        return out.transpose(1, 2), lse
    alike = _pad_to_one_width(query, key, value)
    if query.device.type in _HOSTS:
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            *alike, 0.0, causal, attn_mask=to_bias(mask, query.dtype), scale=scale
        )
    elif _can_use_flash(*alike, mask, causal):
        out, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(
            *alike, 0.0, causal, scale=scale
        )
    else:
        # In torch's default type; `attend_plain` converts it to that of the scores.
        bias = to_bias(_make_causal(mask, query, causal), None)
        out, lse = attend_plain(query, key, value, bias, (scale, None))
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
        gradients = attend_in_rows_backward(
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
            attn_mask=to_bias(mask, query.dtype),
            scale=scale,
        )
    elif _can_use_flash(*alike, mask, causal):
        gradients = _attend_flash_backward(d_alike, *alike, out_alike, lse_BNQ, causal, scale)
    else:
        bias = to_bias(_make_causal(mask, query, causal), None)
        gradients = attend_plain_backward(d_out, *heads, out, lse_BNQ, bias, (scale, None))
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
    # No exponential of a log-sum-exp is computed, so nothing overflows. Where a query has seen no
    # key so far, and none in this tile either, both are -inf, and the weight is 0.
    lse = lse_BNQ.clamp_min(torch.finfo(lse_BNQ.dtype).min)
    weight_BQN1 = torch.sigmoid(tile_lse - lse).transpose(1, 2)[..., None]
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
    padding = width - head.shape[-1]
    return F.pad(head, (0, padding)) if padding else head


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
    no_state = torch.empty(0, dtype=torch.int64, device=query.device)  # no dropout: no random state
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
        no_state,
        no_state,
        scale=scale,
    )
