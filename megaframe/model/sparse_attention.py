"""Sparse attention (DeepSeek-V3.2, 2025): latent attention to the keys that an indexer chooses, its
own or that of an earlier layer.

Plain code computes the scores of all keys that a query might see, tile by tile, and hides those of
keys that were not chosen. Around a ring of context ranks the choice is that of whole samples: the
keys of the indexer, one narrow head, are gathered; those of attention travel as without it.

Shape legend: B samples, S positions of this rank, R rows of this rank, C chosen keys, N heads, D
width of a query or key head, V width of a value head.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from megaframe.architecture.cross_layer_tensors import name_choice
from megaframe.architecture.sparse_attention import (
    SharedIndexerDescription,
    SparseAttentionDescription,
)
from megaframe.context_parallel.ring_mask import RingMask
from megaframe.model.attention import attend_heads, attend_to_past
from megaframe.model.indexer import IndexedHeads, Indexer, gather_choice, mark_past
from megaframe.model.key_value_cache import LayerCache
from megaframe.model.layer_inputs import LayerSetup, MicrobatchInputs
from megaframe.model.mla import LatentAttention
from megaframe.model.pass_state import PassState
from megaframe.ops.attention_mask import ChosenKeys, SequenceMask
from megaframe.tensor_parallel.linear import Elementwise


class SparseAttention(LatentAttention):
    """Latent attention with an indexer, which starts from the same rows and latents of queries, and
    sends no gradient back into them.

    Attributes:
        choice: Name of the choice of keys; None if no other layer uses it.
    """

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
        self.choice: str | None = None
        if description.hands_choice:
            self.choice = name_choice(name.rpartition(".")[0])

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
            heads_TV = self._attend_to_past(heads[0], indexed, cache, inputs, state)
        else:
            heads_TV = self._attend_to_chosen(heads, indexed, inputs, state)
        return self.output(inputs.rows.pad(heads_TV), deferred)

    def _attend_to_chosen(
        self,
        heads: tuple[Tensor, Tensor, Tensor],
        indexed: IndexedHeads,
        inputs: MicrobatchInputs,
        state: PassState,
    ) -> Tensor:
        """Return the outputs of the heads, [B * S, N * V], with the loss of the indexer in their
        graph."""
        mask, factor = inputs.masks[self.window], inputs.find_query_scale(self.query_scale)
        places_RC = self.indexer.choose_keys(indexed, mask.attention_mask, inputs)
        self._hand_on(places_RC, indexed, state)
        chosen = None if places_RC is None else gather_choice(places_RC, inputs, self.setup)
        rule, narrowed = (mask.attention_mask, chosen), _narrow(mask, chosen, inputs)
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
        state: PassState,
    ) -> Tensor:
        """Return the outputs of one token of each sample for those of the tokens so far that are
        chosen, [B, N * V]."""
        factor = inputs.find_query_scale(self.query_scale)
        query_B1ND = query_B1ND if factor is None else query_B1ND * factor
        (keys, values, index_keys), seen = cache.see()
        places_BC = self.indexer.choose_past(indexed, index_keys, seen)
        self._hand_on(places_BC, indexed, state)
        seen = seen if places_BC is None else mark_past(places_BC, seen, keys.shape[1])
        return attend_to_past(query_B1ND, keys, values, seen, self.scale)

    def _hand_on(self, places_RC: Tensor | None, indexed: IndexedHeads, state: PassState) -> None:
        """Let later layers attend to the same keys. If these are all keys, no layer reads what
        stands for the choice."""
        if self.choice is not None:
            if places_RC is None:
                places_RC = self.indexer.make_empty_choice(indexed)
            state.handed.hand_on(self.choice, places_RC)


class SharedIndexerAttention(LatentAttention):
    """Latent attention to the keys that the indexer of an earlier layer has chosen."""

    def __init__(self, name: str, description: SharedIndexerDescription, setup: LayerSetup) -> None:
        """Make the layers. The arguments are those of `SparseAttention`."""
        super().__init__(name, description, setup)
        self.indexer = description.indexer
        self.choice = name_choice(f"blocks.{description.source}")

    def attend(
        self, heads: tuple[Tensor, Tensor, Tensor], inputs: MicrobatchInputs, state: PassState
    ) -> Tensor:
        """Attend to chosen keys within samples."""
        factor, cache = (
            inputs.find_query_scale(self.query_scale),
            state.find_cache(self, self.window),
        )
        if cache is not None:
            cache.extend(*heads[1:])
        if cache is not None and cache.length > inputs.length:
            query = heads[0] if factor is None else heads[0] * factor
            (keys, values), seen = cache.see()
            if self.indexer.chooses(keys.shape[1]):
                seen = mark_past(state.handed.take(self.choice), seen, keys.shape[1])
            return attend_to_past(query, keys, values, seen, self.scale)
        chosen = None
        if self.indexer.chooses(inputs.length * inputs.context.size):
            chosen = gather_choice(state.handed.take(self.choice), inputs, self.setup)
        mask = _narrow(inputs.masks[self.window], chosen, inputs)
        return attend_heads(*heads, mask, self.scale, self.setup, query_scale=factor)


def _narrow(
    mask: SequenceMask | RingMask, chosen: ChosenKeys | None, inputs: MicrobatchInputs
) -> SequenceMask | RingMask:
    """Return what the tokens of this rank see of what is chosen; all if nothing is."""
    if chosen is None:
        return mask
    # After the exchange of heads a rank has the tokens of all its neighbours.
    of_neighbours = inputs.context.gather_neighbours(chosen.places_BSC)
    return mask.choose(replace(chosen, places_BSC=of_neighbours))
