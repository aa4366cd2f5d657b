"""Causal self-attention with grouped key and value heads.

Shape legend: B samples, S positions, G key/value heads (groups), R query heads per group, N = G * R
query heads, D width of a head, V width of a value head where that may differ.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megaframe.architecture.attention import AttentionDescription
from megaframe.context_parallel.ring import ring_attention
from megaframe.context_parallel.ring_mask import RingMask
from megaframe.model.forward_context import MicrobatchContext, RunContext
from megaframe.model.key_value_cache import LayerCache
from megaframe.model.pass_state import PassState
from megaframe.model.query_key_norm import make_query_key_norms
from megaframe.ops.attention_kernel import attend_by_kernel
from megaframe.ops.attention_mask import AttentionMask, SequenceMask
from megaframe.ops.attention_tiles import (
    add_sinks,
    attend,
    attend_backward,
    compute_sinks_gradient,
    should_compute_in_blocks,
)
from megaframe.parameters.parameter import Module, Parameter
from megaframe.tensor_parallel.linear import Elementwise, Linear


class Attention(Module):
    """Self-attention of one layer, with grouped key and value heads."""

    def __init__(self, name: str, description: AttentionDescription, run: RunContext) -> None:
        """Make the layers.

        Args:
            name: Of the layer in the model.
            description: What it declares.
            run: What the run fixes.
        """
        self.window, self.scale, self.run = description.window, description.score_scale, run
        self.softcap, self.rotary = description.softcap, description.rotary
        self.groups, self.width = description.kv_heads, description.head_dim
        self.per_group = description.heads_per_group
        self.qkv = Linear(f"{name}.qkv", description.qkv, run.tensor)
        self.qk_norms = make_query_key_norms(name, description, run)
        self.sinks: Parameter | None = None
        if description.sinks is not None:
            (spec,) = description.sinks.declare_parameters(f"{name}.sinks")
            self.sinks = Parameter(spec)
        gate = description.gate
        self.gate = None if gate is None else Linear(f"{name}.gate", gate, run.tensor)
        self.output = Linear(f"{name}.output", description.output, run.tensor)

    def __call__(
        self, x: Tensor, norm: Elementwise | None, context: MicrobatchContext, state: PassState
    ) -> Tensor:
        """Attend within samples. On a tensor axis each rank computes some of the groups, for all
        tokens.

        Args:
            x: This rank's rows, [rows, hidden].
            norm: Applied to x first, and again in the backward pass of each product of x; None if
                it already was, as without recomputation.
            context: Of the microbatch.
            state: Of its pass.

        Returns:
            A tensor like x.
        """
        batch, length = context.batch, context.length
        qkv = context.rows.remove_padding(self.qkv(x, state.deferred, norm)).view(
            batch, length, -1, self.per_group + 2, self.width
        )
        # Views of one product: B, S, then this rank's groups, each with R queries, a key and a
        # value.
        query, key_BSG1D, value_BSG1D = qkv.split((self.per_group, 1, 1), dim=3)
        tensor = self.run.tensor.group
        if self.groups < tensor.size:
            # Neighbouring ranks share a group; each has some of its query heads.
            sharing = tensor.size // self.groups
            query = query.chunk(sharing, 3)[tensor.index % sharing]
        key_BSGD, value_BSGD = key_BSG1D.squeeze(3), value_BSG1D.squeeze(3)
        # Before the rotation: the gains of two dims that are rotated against each other differ.
        if self.qk_norms is not None:
            query, key_BSGD = self.qk_norms(query.flatten(2, 3), key_BSGD)
        if self.rotary is not None:
            rotate = context.rotary[self.rotary]
            # The rotation is the only copy of the queries: it reads them between keys and values.
            query, key_BSGD = rotate(query), rotate(key_BSGD)
            # A copy, because a view would keep the unrotated queries and keys alive beside it.
            value_BSGD = value_BSGD.contiguous()
        # Query heads of one group stay adjacent, as grouped-query attention expects them.
        query_BSND = query.reshape(batch, length, -1, self.width)
        mask = context.masks[self.window]
        heads_TV = attend_heads(
            query_BSND,
            key_BSGD,
            value_BSGD,
            mask,
            self.scale,
            self.run,
            softcap=self.softcap,
            sinks_N=None if self.sinks is None else self.sinks.use(),
            cache=state.find_cache(self, self.window),
        )
        if self.gate is not None:
            gates_TN1 = context.rows.remove_padding(self.gate(x, state.deferred, norm)).sigmoid()
            gates_TN1 = gates_TN1.view(len(heads_TV), query_BSND.shape[2], -1)
            heads_TV = (heads_TV.view(*gates_TN1.shape[:2], -1) * gates_TN1).flatten(1)
        # The product of a row linear is reduce-scattered in equal parts, so the padding comes back.
        return self.output(context.rows.pad(heads_TV), state.deferred)


def attend_heads(
    query_BSND: Tensor,
    key_BSGD: Tensor,
    value_BSGV: Tensor,
    mask: SequenceMask | RingMask,
    scale: float,
    run: RunContext,
    *,
    softcap: float | None = None,
    sinks_N: Tensor | None = None,
    cache: LayerCache | None = None,
) -> Tensor:
    """Compute this tensor rank's heads for this context rank's tokens, which attend to those of the
    same sample on other context ranks too.

    Args:
        query_BSND: Queries.
        key_BSGD: Keys.
        value_BSGV: Values.
        mask: What tokens attend to.
        scale: Factor of the scores.
        run: Its context ranks exchange heads or pass keys and values around.
        softcap: Bound of the scores; None for no bound.
        sinks_N: A logit without a value in the softmax of each of this tensor rank's query heads;
            None for none.
        cache: Gets the keys and values. If it has others already, the queries are of the token
            after them; None where all tokens of a sample are here.

    Returns:
        The outputs of the heads, [B * S, N * V].
    """
    if cache is not None:
        is_first = cache.length == 0
        keys, values = cache.extend(key_BSGD, value_BSGV)
        if not is_first:
            return _attend_to_past(query_BSND, keys, values, scale, softcap, sinks_N)
    # The two ways of context parallelism nest: heads are exchanged within a group of neighbours,
    # and the ring passes keys around between groups.
    shared = run.context.scatter_heads(query_BSND, key_BSGD, value_BSGV)
    if sinks_N is not None and run.context.heads.size > 1:
        # Those of the heads that the exchange brings to this rank.
        sinks_N = sinks_N.chunk(run.context.heads.size)[run.context.heads.index]
    if isinstance(mask, RingMask):
        out_BSNV = ring_attention(*shared, mask, scale, softcap, sinks_N)
    else:
        by_kernel = attend_by_kernel(run.kernels, *shared, mask, scale, softcap, sinks_N)
        if by_kernel is None:
            out_BSNV = attend_locally(*shared, mask, scale, softcap, sinks_N)
        else:
            out_BSNV = by_kernel
    out_BSNV = run.context.gather_heads(out_BSNV)
    return out_BSNV.reshape(out_BSNV.shape[0] * out_BSNV.shape[1], -1)


def _attend_to_past(
    query_B1ND: Tensor,
    key_BTGD: Tensor,
    value_BTGV: Tensor,
    scale: float,
    softcap: float | None,
    sinks_N: Tensor | None,
) -> Tensor:
    """Compute the outputs of one token for all that it sees, [B, N * V]."""
    assert query_B1ND.shape[1] == 1, "after the first pass tokens come one by one"
    out_B1NV, lse_BN1 = attend(
        query_B1ND, key_BTGD, value_BTGV, None, causal=False, scale=scale, softcap=softcap
    )
    if sinks_N is not None:
        out_B1NV = out_B1NV.contiguous()
        add_sinks(out_B1NV, lse_BN1, sinks_N)
    return out_B1NV.reshape(len(out_B1NV), -1)


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
    if query_BSND.is_meta:  # shapes do not depend on what is seen
        mask = replace(mask, attention_mask=AttentionMask(None, None))
    uneven = query_BSND.shape[3] != value_BSGV.shape[3]
    on_host = query_BSND.device.type == "cpu" and (uneven or mask.attention_mask.narrow)
    # For meta tensors torch's own attention would make all scores. It has no bound of scores, and
    # does not return the log-sum-exp that sinks need.
    on_tiles = on_host or query_BSND.is_meta or softcap is not None or sinks_N is not None
    if on_tiles or should_compute_in_blocks(query_BSND, key_BSGD, mask.dense):
        return _Tiles.apply(query_BSND, key_BSGD, value_BSGV, sinks_N, mask, scale, softcap)
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
        ctx.save_for_backward(query, key, value, out, lse, sinks)
        ctx.mask, ctx.scale, ctx.softcap = mask, scale, softcap
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, lse, sinks = ctx.saved_tensors
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
            return *next(by_tile), d_sinks, None, None, None
        # Several tiles share keys. Their gradients are summed in the type of the log-sum-exp, which
        # is at least fp32, and rounded once.
        sums = [torch.zeros_like(x, dtype=lse.dtype) for x in (query, key, value)]
        for tile, parts in zip(tiles, by_tile, strict=True):
            for total, part, rows in zip(
                sums, parts, (tile.queries, tile.keys, tile.keys), strict=True
            ):
                total[:, rows] += part
        d_query, d_key, d_value = (total.to(query.dtype) for total in sums)
        return d_query, d_key, d_value, d_sinks, None, None, None
