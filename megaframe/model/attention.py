"""Causal self-attention with grouped key and value heads.

Shape legend: B samples, S positions, G key/value heads (groups), R query heads per group, N = G * R
query heads, D width of a head, V width of a value head where that may differ.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megaframe.config import ModelConfig
from megaframe.context_parallel.ring import RingMask, ring_attention
from megaframe.model.forward_context import Frame
from megaframe.model.norm import Norm
from megaframe.ops.attention_tiles import AttentionMask, attend, attend_backward, in_products
from megaframe.ops.local_attention import SequenceMask, attend_by_kernel
from megaframe.parameters.parameter import Module
from megaframe.tensor_parallel.linear import Elementwise, Linear


class Attention(Module):
    """Self-attention of one layer. Queries, keys and values come from one weight [G, R + 2, D,
    hidden], in which each group has its R query heads, its key head and its value head, so that a
    tensor shard has whole groups. window: how many tokens this layer sees, None for all before."""

    def __init__(
        self, name: str, model: ModelConfig, output_std: float, window: int | None
    ) -> None:
        self.window = window
        self.groups, self.width = model.kv_heads, model.head_dim
        self.per_group = model.heads // model.kv_heads
        self.qkv = Linear(
            f"{name}.qkv",
            (model.hidden,),
            (self.groups, self.per_group + 2, self.width),
            std=model.init_std,
            split=0,
            bias=model.qkv_bias,
            fused={1: (self.per_group, 1, 1)},
        )
        self.query_norm: Norm | None = None
        self.key_norm: Norm | None = None
        if model.qk_norm:
            kind, eps = "rmsnorm", model.norm_eps
            self.query_norm = Norm(f"{name}.query_norm", self.width, kind=kind, eps=eps, bias=False)
            self.key_norm = Norm(f"{name}.key_norm", self.width, kind=kind, eps=eps, bias=False)
        self.output = Linear(
            f"{name}.output",
            (model.heads, model.head_dim),
            (model.hidden,),
            std=output_std,
            split=1,
            bias=model.bias,
        )

    def __call__(self, x: Tensor, norm: Elementwise, frame: Frame) -> Tensor:
        """Map [rows, hidden], normalised by `norm`, to the same shape. On a tensor axis each rank
        has some of the groups, and all tokens."""
        batch, length = frame.batch, frame.length
        qkv = frame.without_padding(self.qkv(x, norm, frame)).view(
            batch, length, -1, self.per_group + 2, self.width
        )
        query, key_BSG1D, value_BSG1D = qkv.split((self.per_group, 1, 1), dim=3)
        if self.groups < frame.tensor.size:
            # Neighbouring ranks share a group; each has some of its query heads.
            sharing = frame.tensor.size // self.groups
            query = query.chunk(sharing, 3)[frame.tensor.index % sharing]
        query_BSND = query.reshape(batch, length, -1, self.width)
        key_BSGD, value_BSGD = key_BSG1D.squeeze(3), value_BSG1D.squeeze(3)
        if self.query_norm is not None and self.key_norm is not None:
            query_BSND, key_BSGD = (
                self.query_norm(query_BSND, frame.kernels),
                self.key_norm(key_BSGD, frame.kernels),
            )
        if frame.rotary is not None:
            query_BSND, key_BSGD = frame.rotary(query_BSND), frame.rotary(key_BSGD)
            # A copy, because a view would keep the unrotated queries and keys alive beside it.
            value_BSGD = value_BSGD.contiguous()
        scale = 1.0 / math.sqrt(self.width)
        out = attention(query_BSND, key_BSGD, value_BSGD, frame, self.window, scale)
        return self.output.plain(out, frame)


def attention(
    query_BSND: Tensor,
    key_BSGD: Tensor,
    value_BSGV: Tensor,
    frame: Frame,
    window: int | None,
    scale: float,
) -> Tensor:
    """Return the outputs of this tensor rank's heads for this context rank's tokens, [filled, N *
    V]. The tokens see those of the same sample on other context ranks too. window: of the layer.
    scale: of the scores."""
    shared, seen = frame.context.share_heads(query_BSND, key_BSGD, value_BSGV), frame.seen[window]
    if isinstance(seen, RingMask):
        out_BSNV = ring_attention(*shared, seen, scale)
    elif (made := attend_by_kernel(frame.kernels, *shared, seen, scale)) is not None:
        out_BSNV = made
    else:
        out_BSNV = _among_here(*shared, seen, scale)
    return frame.fill(frame.context.return_heads(out_BSNV).reshape(frame.tokens, -1))


def _among_here(
    query_BSND: Tensor, key_BSGD: Tensor, value_BSGV: Tensor, seen: SequenceMask, scale: float
) -> Tensor:
    """Compute attention among tokens that are all on this rank, [B, S, N, V]."""
    if query_BSND.is_meta:  # shapes do not depend on what is seen
        seen = replace(seen, sight=AttentionMask(None, None))
    uneven = query_BSND.shape[3] != value_BSGV.shape[3]
    on_host = query_BSND.device.type == "cpu" and (uneven or seen.sight.narrow)
    # For meta tensors torch's own attention would make all scores.
    if on_host or query_BSND.is_meta or in_products(query_BSND, key_BSGD, seen.mask):
        return _Tiles.apply(query_BSND, key_BSGD, value_BSGV, seen, scale)
    out_BNSV = F.scaled_dot_product_attention(
        query_BSND.transpose(1, 2),
        key_BSGD.transpose(1, 2),
        value_BSGV.transpose(1, 2),
        attn_mask=seen.mask,
        is_causal=seen.mask is None,
        scale=scale,
        enable_gqa=query_BSND.shape[2] > key_BSGD.shape[2],
    )
    return out_BNSV.transpose(1, 2)


class _Tiles(torch.autograd.Function):
    """Attention on a CPU, tile by tile. If values are not as wide as queries and keys, torch's own
    attention makes all scores at once and keeps them. With a mask it also computes scores that no
    query sees, and every block keeps a copy of the mask as a bias."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, seen: SequenceMask, scale: float
    ) -> Tensor:
        parts = [
            attend(
                query[:, tile.queries],
                key[:, tile.keys],
                value[:, tile.keys],
                seen.mask_of(tile),
                causal=tile.kind == "causal",
                scale=scale,
            )
            for tile in seen.tiles
        ]
        out, lse = parts[0]
        if len(parts) > 1:
            out = torch.cat([part for part, _ in parts], 1)
            lse = torch.cat([part for _, part in parts], 2)
        out = out.contiguous()  # do not keep the padding that `attend` cut off
        ctx.save_for_backward(query, key, value, out, lse)
        ctx.seen, ctx.scale = seen, scale
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, lse = ctx.saved_tensors
        tiles = ctx.seen.tiles
        made = (
            attend_backward(
                gradients[0][:, tile.queries],
                query[:, tile.queries],
                key[:, tile.keys],
                value[:, tile.keys],
                out[:, tile.queries],
                lse[:, :, tile.queries],
                ctx.seen.mask_of(tile),
                causal=tile.kind == "causal",
                scale=ctx.scale,
            )
            for tile in tiles
        )
        if len(tiles) == 1:
            return *next(made), None, None
        into = [torch.zeros_like(x, dtype=lse.dtype) for x in (query, key, value)]
        for tile, parts in zip(tiles, made, strict=True):
            for whole, part, rows in zip(
                into, parts, (tile.queries, tile.keys, tile.keys), strict=True
            ):
                whole[:, rows] += part
        d_query, d_key, d_value = (whole.to(query.dtype) for whole in into)
        return d_query, d_key, d_value, None, None
