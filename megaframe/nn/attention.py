"""Causal self-attention with grouped key and value heads.

Shape legend: B samples, S positions, G key/value heads (groups), R query heads per group, N = G * R
query heads, D width of a head.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from megaframe.config import Model
from megaframe.nn.frame import Frame
from megaframe.nn.linear import Elementwise, Linear
from megaframe.nn.norm import Norm
from megaframe.nn.ring import ring_attention
from megaframe.parameter import Module


class Attention(Module):
    """Queries, keys and values come from one weight [G, R + 2, D, hidden]: each group's R query
    heads, then its key and its value head, so that a tensor shard is whole groups."""

    def __init__(self, name: str, model: Model, output_std: float) -> None:
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
        """[rows, hidden], normalised by `norm`, to the same shape. On a tensor axis each rank has
        some of the groups, and all tokens."""
        batch, length = frame.batch, frame.length
        qkv = self.qkv(x, norm, frame)[: frame.tokens].view(
            batch, length, -1, self.per_group + 2, self.width
        )
        query, key_BSG1D, value_BSG1D = qkv.split((self.per_group, 1, 1), dim=3)
        if self.groups < frame.tensor.size:
            # Neighbours share a group; each attends with some of its query heads.
            sharing = frame.tensor.size // self.groups
            query = query.chunk(sharing, 3)[frame.tensor.index % sharing]
        query_BSND = query.reshape(batch, length, -1, self.width)
        key_BSGD, value_BSGD = key_BSG1D.squeeze(3), value_BSG1D.squeeze(3)
        if self.query_norm is not None and self.key_norm is not None:
            query_BSND, key_BSGD = self.query_norm(query_BSND), self.key_norm(key_BSGD)
        if frame.rotary is not None:
            query_BSND, key_BSGD = frame.rotary(query_BSND), frame.rotary(key_BSGD)
            # A copy, because a view would keep the unrotated queries and keys alive beside it.
            value_BSGD = value_BSGD.contiguous()
        shared = frame.context.share_heads(query_BSND, key_BSGD, value_BSGD)
        if frame.circle is not None:
            out_BSND = ring_attention(*shared, frame.circle)
        else:
            out_BSND = _attention(*shared, frame.mask)
        out = frame.context.return_heads(out_BSND).reshape(frame.tokens, -1)
        return self.output.plain(frame.fill(out), frame)


def _attention(
    query_BSND: Tensor, key_BSGD: Tensor, value_BSGD: Tensor, mask: Tensor | None
) -> Tensor:
    """Attention among tokens that are all here, [B, S, N, D]."""
    out_BNSD = F.scaled_dot_product_attention(
        query_BSND.transpose(1, 2),
        key_BSGD.transpose(1, 2),
        value_BSGD.transpose(1, 2),
        attn_mask=mask,
        is_causal=mask is None,
        enable_gqa=query_BSND.shape[2] > key_BSGD.shape[2],
    )
    return out_BNSD.transpose(1, 2)
