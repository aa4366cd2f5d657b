"""Multi-head latent attention (DeepSeek-V2, 2024, section 2.1): queries, keys and values of many
heads are computed from narrow latents.

Every tensor rank has the whole matrices that make the latents and multiplies its own rows by them.
What is gathered for a rank's heads is therefore the latents, which are many times narrower than the
stream. The rotated part of a head comes first, as in the other attention here; released weights
have it last, with the two dims of each pair adjacent.

Shape legend: B samples, S positions, N heads, R width of the rotated part of a head, D width of a
whole query or key head, V width of a value head.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from megaframe.config import LatentAttentionConfig, ModelConfig
from megaframe.distributed.collectives import Group, all_gather, reduce_scatter
from megaframe.model.attention import attend_heads
from megaframe.model.forward_context import MicrobatchContext, RunContext
from megaframe.model.norm import Norm
from megaframe.model.pass_state import PassState
from megaframe.model.rotary import compute_scores_factor
from megaframe.parameters.parameter import Module
from megaframe.tensor_parallel.deferred_gradients import DeferredGradients
from megaframe.tensor_parallel.linear import Elementwise, Linear


class LatentAttention(Module):
    """Latent attention. One weight `down` maps the stream to a latent of the queries (if there is a
    `query_rank`), a latent of the keys and values, and the rotated part of the keys, which all
    heads share. Both latents are RMS-normalised and become heads by `query` [N, D, rank] and `kv`
    [N, D - R + V, rank]."""

    def __init__(
        self,
        name: str,
        model: ModelConfig,
        latent: LatentAttentionConfig,
        output_std: float,
        window: int | None,
        run: RunContext,
    ) -> None:
        """Declare the layers.

        Args:
            name: Of the layer in the model.
            model: The model's config.
            latent: Its widths of latents and heads.
            output_std: Standard deviation of the initial output matrix.
            window: How many tokens a query sees, with itself; None for all before it.
            run: What the run fixes.
        """
        self.window, self.run = window, run
        self.latent, self.width = latent, latent.rotary_dim + latent.head_dim
        self.kv_width = latent.head_dim + latent.value_dim
        # With YaRN, the scores have a factor of their own (DeepSeek-V2, section 3.1.4).
        self.scale = compute_scores_factor(model) / math.sqrt(self.width)
        std, rank = model.init_std, latent.query_rank
        # Latent of the queries (if there is one), latent of keys and values, rotated part of the
        # keys.
        self.parts = (*([rank] if rank else []), latent.kv_rank, latent.rotary_dim)
        # Not divided: every tensor rank makes the latents of its own rows, without communication.
        self.down = Linear(
            f"{name}.down",
            (model.hidden,),
            (sum(self.parts),),
            std=std,
            split=None,
            bias=False,
            tensor=run.tensor,
            fused={0: self.parts},
        )
        self.query_norm = None if rank is None else _make_norm(f"{name}.query_norm", model, rank)
        self.kv_norm = _make_norm(f"{name}.kv_norm", model, latent.kv_rank)
        outputs = (model.heads, self.width)
        inputs = (rank or model.hidden,)
        self.query = Linear(
            f"{name}.query", inputs, outputs, std=std, split=0, bias=False, tensor=run.tensor
        )
        self.kv = Linear(
            f"{name}.kv",
            (latent.kv_rank,),
            (model.heads, self.kv_width),
            std=std,
            split=0,
            bias=False,
            tensor=run.tensor,
            fused={1: (latent.head_dim, latent.value_dim)},
        )
        self.output = Linear(
            f"{name}.output",
            (model.heads, latent.value_dim),
            (model.hidden,),
            std=output_std,
            split=1,
            bias=model.bias,
            tensor=run.tensor,
        )

    def __call__(
        self, x: Tensor, norm: Elementwise | None, context: MicrobatchContext, state: PassState
    ) -> Tensor:
        """Attend within samples, as `Attention` does. On a tensor axis each rank has some of the
        heads and all tokens."""
        if norm is not None and not self.run.recompute:
            x, norm = norm(x, self.run.kernels), None  # one norm for two products
        query, kv, key_rotary = self._project(x, norm, context, state.deferred)
        assert context.rotary is not None, "the config is refused without rotary positions"
        query_BSND = context.rotary(query)
        key_plain, value = kv.split((self.latent.head_dim, self.latent.value_dim), 3)
        # One rotated key for all heads: a view without copies, until `cat` gives each head its own.
        rotated = context.rotary(key_rotary).expand(-1, -1, kv.shape[2], -1)
        key_BSND = torch.cat((rotated, key_plain), 3)
        # A copy, because a view would keep the unrotated keys alive beside it.
        value_BSNV = value.contiguous()
        mask = context.masks[self.window]
        heads_TV = attend_heads(query_BSND, key_BSND, value_BSNV, mask, self.scale, self.run)
        return self.output(context.rows.pad(heads_TV), state.deferred)

    def _project(
        self,
        x: Tensor,
        norm: Elementwise | None,
        context: MicrobatchContext,
        deferred: DeferredGradients,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries [B, S, N, D], the unrotated part of keys together with values [B, S, N, D
        - R + V], and the part of keys that will be rotated [B, S, 1, R]. Nothing has been rotated
        yet."""
        # Views of one product, [rows, sum of parts].
        *query_latent, kv_latent, key_rotary = self.down(x, deferred, norm).split(self.parts, 1)
        # Column linears gather what they multiply: the narrow latents, normalised by the rank that
        # made them. Queries without a latent come from the stream itself.
        if self.query_norm is None:
            query = self.query(x, deferred, norm)
        else:
            query = self.query(query_latent[0], deferred, self.query_norm)
        kv = self.kv(kv_latent, deferred, self.kv_norm)
        tensor = self.run.tensor.group
        if tensor.size > 1:
            # Not followed by a product, so no linear gathers it.
            key_rotary = _GatherRows.apply(key_rotary, tensor)
        widths = (query, self.width), (kv, self.kv_width), (key_rotary, self.latent.rotary_dim)
        query, kv, key_rotary = (
            context.rows.remove_padding(part).view(context.batch, context.length, -1, width)
            for part, width in widths
        )
        return query, kv, key_rotary


class _GatherRows(torch.autograd.Function):
    """Gather the rows of all tensor ranks, each of which uses them for some of the heads."""

    @staticmethod
    def forward(ctx: Any, x_RX: Tensor, tensor: Group) -> Tensor:
        ctx.tensor = tensor
        return all_gather(x_RX, tensor).wait()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        # Each rank has the gradient from its own heads only. They are summed, and each keeps its
        # rows.
        return reduce_scatter(gradients[0], ctx.tensor).wait(), None


def _make_norm(name: str, model: ModelConfig, width: int) -> Norm:
    return Norm(name, width, kind="rmsnorm", eps=model.norm_eps, bias=False)
