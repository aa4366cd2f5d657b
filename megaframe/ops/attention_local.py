"""Attention among tokens that are all on this rank, by torch's own or tile by tile.

Shape legend: B samples, S positions, G key/value heads, N query heads, D width of a query or key
head, V width of a value head.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megaframe.ops.attention_mask import AttentionMask, SequenceMask
from megaframe.ops.attention_tiles import (
    add_sinks,
    attend,
    attend_backward,
    compute_sinks_gradient,
    should_compute_in_blocks,
)


def attend_locally(
    query_BSND: Tensor,
    key_BSGD: Tensor,
    value_BSGV: Tensor,
    mask: SequenceMask,
    scale: float,
    softcap: float | None = None,
    sinks_N: Tensor | None = None,
) -> Tensor:
    """Compute attention among tokens that are all on this rank, [B, S, N, V]."""
    # The mask has the chosen keys, too. As an argument, whoever counts what is kept sees them.
    places = None if mask.chosen is None else mask.chosen.places_BSC
    if query_BSND.is_meta:  # shapes do not depend on what is seen
        mask = replace(mask, attention_mask=AttentionMask(None, None), chosen=None)
    uneven = query_BSND.shape[3] != value_BSGV.shape[3]
    on_host = query_BSND.device.type == "cpu" and (uneven or mask.narrow)
    # For meta tensors torch's own attention would make all scores. It has no bound of scores, and
    # does not return the log-sum-exp that sinks need. Masks of chosen keys differ from layer to
    # layer, and it would keep them whole.
    on_tiles = on_host or query_BSND.is_meta or softcap is not None or sinks_N is not None
    on_tiles |= mask.chosen is not None
    if on_tiles or should_compute_in_blocks(query_BSND, key_BSGD, mask.dense):
        heads = query_BSND, key_BSGD, value_BSGV
        return _Tiles.apply(*heads, sinks_N, places, mask, scale, softcap)
    out_BNSV = F.scaled_dot_product_attention(
        query_BSND.transpose(1, 2),
        key_BSGD.transpose(1, 2),
        value_BSGV.transpose(1, 2),
        attn_mask=mask.dense,
        # A dense mask already hides what is after a query.
        is_causal=mask.dense is None,
        scale=scale,
        enable_gqa=query_BSND.shape[2] > key_BSGD.shape[2],
    )
    return out_BNSV.transpose(1, 2)


class _Tiles(torch.autograd.Function):
    """Attention tile by tile: on a CPU, and wherever scores are bounded or heads have sinks. If
    values are not as wide as queries and keys, torch's own attention makes all scores at once and
    keeps them. With a mask it also computes scores that no query sees, and every block keeps a copy
    of the mask as a bias."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sinks: Tensor | None,
        places: Tensor | None,
        mask: SequenceMask,
        scale: float,
        softcap: float | None,
    ) -> Tensor:
        parts = [
            attend(
                query[:, tile.queries],
                key[:, tile.keys],
                value[:, tile.keys],
                mask.make_dense_tile(tile),
                causal=tile.kind == "causal",
                scale=scale,
                softcap=softcap,
            )
            for tile in mask.tiles
        ]
        # Tiles of a sequence have disjoint queries, so their outputs are concatenated, not merged.
        out, lse = parts[0]
        if len(parts) > 1:
            out = torch.cat([part for part, _ in parts], 1)
            lse = torch.cat([part for _, part in parts], 2)
        out = out.contiguous()  # do not keep the padding that `attend` cut off
        if sinks is not None:
            add_sinks(out, lse, sinks)
        ctx.save_for_backward(query, key, value, out, lse, sinks, places)
        ctx.mask, ctx.scale, ctx.softcap = mask, scale, softcap
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, lse, sinks, _ = ctx.saved_tensors
        d_sinks = None if sinks is None else compute_sinks_gradient(gradients[0], out, lse, sinks)
        tiles = ctx.mask.tiles
        # One at a time: the gradients of a tile are added before those of the next are computed.
        by_tile = (
            attend_backward(
                gradients[0][:, tile.queries],
                query[:, tile.queries],
                key[:, tile.keys],
                value[:, tile.keys],
                out[:, tile.queries],
                lse[:, :, tile.queries],
                ctx.mask.make_dense_tile(tile),
                causal=tile.kind == "causal",
                scale=ctx.scale,
                softcap=ctx.softcap,
            )
            for tile in tiles
        )
        if len(tiles) == 1:
            return *next(by_tile), d_sinks, None, None, None, None
        # Several tiles share keys. Their gradients are summed in the type of the log-sum-exp, which
        # is at least fp32, and rounded once.
        sums = [torch.zeros_like(x, dtype=lse.dtype) for x in (query, key, value)]
        for tile, parts in zip(tiles, by_tile, strict=True):
            for total, part, rows in zip(
                sums, parts, (tile.queries, tile.keys, tile.keys), strict=True
            ):
                total[:, rows] += part
        d_query, d_key, d_value = (total.to(query.dtype) for total in sums)
        return d_query, d_key, d_value, d_sinks, None, None, None, None
