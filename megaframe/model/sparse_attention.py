"""Sparse attention (DeepSeek-V3.2, 2025): latent attention to the keys that an indexer chooses.

Plain code computes the scores of all keys that a query might see, tile by tile, and hides those of
keys that were not chosen. Around a ring of context ranks the choice is that of whole samples: the
keys of the indexer, one narrow head, are gathered; those of attention travel as without it.

Shape legend: B samples, S positions of this rank, N heads, D width of a query or key head, V width
of a value head.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from megaframe.architecture.sparse_attention import SparseAttentionDescription
from megaframe.model.attention import attend_heads, attend_to_past
from megaframe.model.indexer import IndexedHeads, Indexer
from megaframe.model.key_value_cache import LayerCache
from megaframe.model.layer_inputs import LayerSetup, MicrobatchInputs
from megaframe.model.mla import LatentAttention
from megaframe.model.pass_state import PassState
from megaframe.tensor_parallel.linear import Elementwise


class SparseAttention(LatentAttention):
    """Latent attention with an indexer, which starts from the same rows and latents of queries, and
    sends no gradient back into them."""

    def __init__(
        self, name: str, description: SparseAttentionDescription, setup: LayerSetup
    ) -> None:
        """Make the layers.

        Args:
            name: Of the layer in the model.
            description: What it declares.
            setup: What the run fixes.
        """
        super().__init__(name, description, setup)
        self.indexer = Indexer(f"{name}.indexer", description.indexer, self.rotary, setup)

    def __call__(
        self, x: Tensor, norm: Elementwise | None, inputs: MicrobatchInputs, state: PassState
    ) -> Tensor:
        """Attend to chosen keys within samples, as latent attention does to all."""
        deferred, kernels = state.deferred, self.setup.kernels
        # Rows and latents are normalised once, for attention and for the indexer.
        x = x if norm is None else norm(x, kernels)
        query_latent, kv_latent, key_shared = self.down(x, deferred).split(self.latents, 1)
        assert self.query_norm is not None, "an indexer needs a latent of queries"
        query_latent = self.query_norm(query_latent, kernels)
        query = self.query(query_latent, deferred)
        heads = self.make_heads(query, kv_latent, key_shared, inputs, deferred)
        indexed = self.indexer(x, query_latent, inputs, deferred)
        cache = state.find_cache(self, self.window)
        if cache is not None:
            cache.extend(*heads[1:], indexed.keys_BTD)
        if cache is not None and cache.length > inputs.length:
            heads_TV = self._attend_to_past(heads[0], indexed, cache, inputs)
        else:
            heads_TV = self._attend(heads, indexed, inputs, state)
        return self.output(inputs.rows.pad(heads_TV), deferred)

    def _attend(
        self,
        heads: tuple[Tensor, Tensor, Tensor],
        indexed: IndexedHeads,
        inputs: MicrobatchInputs,
        state: PassState,
    ) -> Tensor:
        """Return the outputs of the heads, [B * S, N * V], with the loss of the indexer in their
        graph."""
        mask, factor = inputs.masks[self.window], inputs.find_query_scale(self.query_scale)
        chosen = self.indexer.choose_keys(indexed, mask.attention_mask, inputs)
        rule, narrowed = (mask.attention_mask, chosen), mask
        if chosen is not None:
            # After the exchange of heads a rank has the tokens of all its neighbours.
            of_neighbours = inputs.context.gather_neighbours(chosen.places_BSC)
            narrowed = mask.choose(replace(chosen, places_BSC=of_neighbours))
        heads_TV = attend_heads(*heads, narrowed, self.scale, self.setup, query_scale=factor)
        if not (self.indexer.is_trained and torch.is_grad_enabled()):
            return heads_TV
        query = heads[0].detach() if factor is None else heads[0].detach() * factor
        scored = query * self.scale, heads[1].detach()
        return self.indexer.add_loss(heads_TV, indexed, scored, rule, inputs, state.statistics)

    def _attend_to_past(
        self,
        query_B1ND: Tensor,
        indexed: IndexedHeads,
        cache: LayerCache,
        inputs: MicrobatchInputs,
    ) -> Tensor:
        """Return the outputs of one token of each sample for those of the tokens so far that are
        chosen, [B, N * V]."""
        factor = inputs.find_query_scale(self.query_scale)
        query_B1ND = query_B1ND if factor is None else query_B1ND * factor
        (keys, values, index_keys), seen = cache.see()
        seen = self.indexer.choose_past(indexed, index_keys, seen)
        return attend_to_past(query_B1ND, keys, values, seen, self.scale)
