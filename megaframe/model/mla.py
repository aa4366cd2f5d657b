"""Multi-head latent attention (DeepSeek-V2, 2024, section 2.1): queries, keys and values of many
heads are computed from narrow latents.

Every tensor rank has the whole matrices that make the latents and multiplies its own rows by them.
What is gathered for a rank's heads is therefore the latents, which are many times narrower than the
stream. The rotated part of a head comes first, as in the other attention here; released weights
have it last, with the two dims of each pair adjacent.

Shape legend: B samples, S positions, N heads, D width of a whole query or key head, V width of a
value head.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megaframe.architecture.mla import LatentAttentionDescription
from megaframe.distributed.differentiable import gather_differentiably
from megaframe.model.attention import attend_heads
from megaframe.model.layer_inputs import LayerSetup, MicrobatchInputs
from megaframe.model.norm import Norm
from megaframe.model.pass_state import PassState
from megaframe.parameters.parameter import Module
from megaframe.tensor_parallel.deferred_gradients import DeferredGradients
from megaframe.tensor_parallel.linear import Elementwise, Linear


class LatentAttention(Module):
    """Latent attention: both latents are RMS-normalised and become heads."""

    def __init__(
        self, name: str, description: LatentAttentionDescription, setup: LayerSetup
    ) -> None:
        """Make the layers.

        Args:
            name: Of the layer in the model.
            description: What it declares.
            setup: What the run fixes.
        """
        self.window, self.setup = description.window, setup
        self.scale, self.latents = description.score_scale, description.latents
        self.width, self.shared_dim = description.query_width, description.shared_dim
        self.rotary, self.query_scale = description.rotary, description.query_scale
        self.kv_parts = (description.head_dim, description.value_dim)
        # Not divided: every tensor rank makes the latents of its own rows, without communication.
        self.down = Linear(f"{name}.down", description.down, setup.tensor)
        norm = description.query_norm
        self.query_norm = None if norm is None else Norm(f"{name}.query_norm", norm)
        self.kv_norm = Norm(f"{name}.kv_norm", description.kv_norm)
        self.query = Linear(f"{name}.query", description.query, setup.tensor)
        self.kv = Linear(f"{name}.kv", description.kv, setup.tensor)
        self.output = Linear(f"{name}.output", description.output, setup.tensor)

    def __call__(
        self, x: Tensor, norm: Elementwise | None, inputs: MicrobatchInputs, state: PassState
    ) -> Tensor:
        """Attend within samples, as `Attention` does. On a tensor axis each rank has some of the
        heads and all tokens."""
        # Views of one product, [rows, sum of parts].
        *latent, kv_latent, key_shared = self.down(x, state.deferred, norm).split(self.latents, 1)
        # Column linears gather what they multiply: the narrow latents, normalised by the rank that
        # made them. Queries without a latent come from the stream itself.
        if self.query_norm is None:
            query = self.query(x, state.deferred, norm)
        else:
            query = self.query(latent[0], state.deferred, self.query_norm)
        heads_TV = self.attend(query, kv_latent, key_shared, inputs, state)
        return self.output(inputs.rows.pad(heads_TV), state.deferred)

    def attend(
        self,
        query: Tensor,
        kv_latent: Tensor,
        key_shared: Tensor,
        inputs: MicrobatchInputs,
        state: PassState,
    ) -> Tensor:
        """Return the outputs of the heads, [B * S, N * V]. The arguments are those of
        `make_heads`."""
        heads = self.make_heads(query, kv_latent, key_shared, inputs, state.deferred)
        return attend_heads(
            *heads,
            inputs.masks[self.window],
            self.scale,
            self.setup,
            cache=state.find_cache(self, self.window),
            query_scale=inputs.find_query_scale(self.query_scale),
        )

    def make_heads(
        self,
        query: Tensor,
        kv_latent: Tensor,
        key_shared: Tensor,
        inputs: MicrobatchInputs,
        deferred: DeferredGradients,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return this rank's rotated queries and keys [B, S, N, D], and values [B, S, N, V].

        Args:
            query: The queries of all tokens, not rotated yet, [tokens, N * D].
            kv_latent: Latents of keys and values, of this rank's rows.
            key_shared: The part of keys that all heads share, of this rank's rows.
            inputs: Of the microbatch.
            deferred: Computes or keeps the weight gradients.
        """
        kv = self.kv(kv_latent, deferred, self.kv_norm)
        # Not followed by a product, so no linear gathers it. Each rank uses it for its own heads.
        key_shared = gather_differentiably(key_shared, self.setup.tensor.group)
        widths = (query, self.width), (kv, sum(self.kv_parts)), (key_shared, self.shared_dim)
        query, kv, key_shared = (
            inputs.rows.remove_padding(part).view(inputs.batch, inputs.length, -1, width)
            for part, width in widths
        )
        if self.rotary is not None:
            rotate = inputs.rotary[self.rotary]
            query, key_shared = rotate(query), rotate(key_shared)
        key_plain, value = kv.split(self.kv_parts, 3)
        # One key for all heads: a view without copies, until `cat` gives each head its own.
        key = torch.cat((key_shared.expand(-1, -1, kv.shape[2], -1), key_plain), 3)
        # A copy, because a view would keep the unrotated keys alive beside it.
        return query, key, value.contiguous()
