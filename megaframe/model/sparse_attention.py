"""Sparse attention (DeepSeek-V3.2, 2025): latent attention to the keys that an indexer chooses, its
own or that of an earlier layer.

Without absorption, plain code computes the scores of all keys that a query might see, tile by tile,
and hides those of keys that were not chosen. With it, queries are multiplied by the keys' part of
`kv` and outputs by the values' part, so that attention reads latents, and only the chosen ones.
Under context ranks the choice is that of whole samples: the keys of the indexer, one narrow head,
are gathered, and so are latents; keys and values of all heads travel as without an indexer. Tokens
that come one by one after a prompt, whose keys and values are kept, attend to these.

Shape legend: B samples, S positions of this rank, T tokens of whole samples, R rows of this rank, C
chosen keys, N heads, D width of a query or key head, V width of a value head, L width of a latent
with the shared part of a key before it; Q all B * S queries.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from megaframe.architecture.cross_layer_tensors import name_choice
from megaframe.architecture.sparse_attention import (
    ChosenKeysDescription,
    IndexerDescription,
    SharedIndexerDescription,
    SparseAttentionDescription,
)
from megaframe.context_parallel.ring_mask import RingMask
from megaframe.distributed.differentiable import gather_differentiably
from megaframe.model.attention import attend_heads, attend_to_past
from megaframe.model.index_scores import IndexedHeads
from megaframe.model.indexer import Indexer, gather_choice, mark_past
from megaframe.model.indexer_loss import ChosenLatents, KeysOfHeads, add_indexer_loss
from megaframe.model.key_value_cache import LayerCache
from megaframe.model.layer_inputs import LayerSetup, MicrobatchInputs
from megaframe.model.mla import LatentAttention
from megaframe.model.pass_state import PassState
from megaframe.ops.attention_mask import ChosenKeys, SequenceMask
from megaframe.ops.latent_attention import attend_to_latents
from megaframe.tensor_parallel.deferred_gradients import DeferredGradients
from megaframe.tensor_parallel.head_products import multiply_by_results, multiply_inputs
from megaframe.tensor_parallel.linear import Elementwise


class ChosenKeysAttention(LatentAttention):
    """Latent attention to keys that an indexer chooses."""

    def __init__(self, name: str, description: ChosenKeysDescription, setup: LayerSetup) -> None:
        """Make the layers.

        Args:
            name: Of the layer in the model.
            description: What it declares.
            setup: What the run fixes.
        """
        super().__init__(name, description, setup)
        self._absorbs, self._chooser = description.absorbs, description.indexer
        self._kv_rank = description.kv_rank
        self._keys = slice(0, description.head_dim)
        self._values = slice(description.head_dim, None)

    def absorbs_in(self, inputs: MicrobatchInputs, state: PassState) -> bool:
        """Return whether the layer absorbs in a pass: where it chooses among keys, unless it keeps
        keys and values of heads for later tokens."""
        chooses = self._chooser.chooses(inputs.length * inputs.context.size)
        return self._absorbs and chooses and state.cache is None

    def absorb(
        self,
        query: Tensor,
        kv_latent: Tensor,
        key_shared: Tensor,
        inputs: MicrobatchInputs,
        deferred: DeferredGradients,
    ) -> tuple[Tensor, Tensor]:
        """Return what attention computes with in place of queries and keys: this rank's queries of
        all tokens [Q, N, L], and latents of whole samples [B * T, L]. The arguments are those of
        `make_heads`."""
        rows, context, tokens = inputs.rows, inputs.context, (inputs.batch, inputs.length)
        latents = torch.cat((key_shared, self.kv_norm(kv_latent, self.setup.kernels)), 1)
        latents = rows.remove_padding(gather_differentiably(latents, self.setup.tensor.group))
        latents, query = latents.view(*tokens, 1, -1), rows.remove_padding(query)
        query = query.view(*tokens, -1, self.width)
        if self.rotary is not None:
            # The shared part comes first, and is all that is rotated.
            rotate = inputs.rotary[self.rotary]
            latents, query = rotate(latents), rotate(query)
        if (factor := inputs.find_query_scale(self.query_scale)) is not None:
            query = query * factor
        pieces = latents.squeeze(2).unflatten(1, (len(context.own_pieces), -1))
        latents_BTL = context.gather_pieces(pieces).flatten(1, 2)
        shared, plain = query.flatten(0, 1).split(
            (self.shared_dim, self.width - self.shared_dim), 2
        )
        absorbed = multiply_by_results(plain, self.kv, self._keys, deferred)
        return torch.cat((shared, absorbed), 2), latents_BTL.flatten(0, 1)

    def number_rows(self, places_RC: Tensor, inputs: MicrobatchInputs) -> Tensor:
        """Return which latents each query sees, int32 [Q, C]; -1 for none.

        Args:
            places_RC: Places of the keys that are chosen for this rank's rows.
            inputs: Of the microbatch.
        """
        chosen = gather_choice(places_RC, inputs, self.setup)
        places_S = inputs.context.compute_positions(inputs.length, places_RC.device)
        return chosen.number_rows(inputs.masks[self.window].attention_mask, places_S)

    def attend_absorbed(
        self,
        query_QNL: Tensor,
        latents_TL: Tensor,
        rows_QC: Tensor,
        deferred: DeferredGradients,
    ) -> tuple[Tensor, Tensor]:
        """Return the outputs of the heads [Q, N * V], and the log-sum-exps of their scores [Q, N].

        Args:
            query_QNL: From `absorb`, as are latents.
            latents_TL: Of whole samples.
            rows_QC: From `number_rows`.
            deferred: Computes or keeps the weight gradients.
        """
        operands = query_QNL, latents_TL, rows_QC
        kernels, kv_rank = self.setup.kernels, self._kv_rank
        out_QNL, lse_QN = attend_to_latents(kernels, *operands, kv_rank, self.scale)
        out_QNV = multiply_inputs(out_QNL, self.kv, self._values, deferred)
        return out_QNV.flatten(1), lse_QN


class SparseAttention(ChosenKeysAttention):
    """Latent attention with an indexer, which starts from the same rows and latents of queries, and
    sends no gradient back into them.

    Attributes:
        choice: Name of the choice of keys; None if no other layer uses it.
    """

    def __init__(
        self, name: str, description: SparseAttentionDescription, setup: LayerSetup
    ) -> None:
        """Make the layers. The arguments are those of `ChosenKeysAttention`."""
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
        parts = self.query(query_latent, deferred), kv_latent, key_shared
        if self.absorbs_in(inputs, state):
            absorbed = self.absorb(*parts, inputs, deferred)
            indexed = self.indexer(x, query_latent, inputs, deferred)
            heads_TV = self._attend_to_latents(absorbed, indexed, inputs, state)
            return self.output(inputs.rows.pad(heads_TV), deferred)
        heads = self.make_heads(*parts, inputs, deferred)
        indexed = self.indexer(x, query_latent, inputs, deferred)
        cache = state.find_cache(self, self.window)
        if cache is not None:
            cache.extend(*heads[1:], indexed.keys_BTD)
        if cache is not None and cache.length > inputs.length:
            heads_TV = self._attend_to_past(heads[0], indexed, cache, inputs, state)
        else:
            heads_TV = self._attend_to_chosen(heads, indexed, inputs, state)
        return self.output(inputs.rows.pad(heads_TV), deferred)

    @property
    def _learns(self) -> bool:
        return self.indexer.is_trained and torch.is_grad_enabled()

    def _attend_to_latents(
        self,
        absorbed: tuple[Tensor, Tensor],
        indexed: IndexedHeads,
        inputs: MicrobatchInputs,
        state: PassState,
    ) -> Tensor:
        """Return what `_attend_to_chosen` does, from what `absorb` returns."""
        mask = inputs.masks[self.window].attention_mask
        places_RC = self.indexer.choose_keys(indexed, mask, inputs)
        assert places_RC is not None, "otherwise nothing is absorbed"
        self._hand_on(places_RC, indexed, state)
        rows_QC = self.number_rows(places_RC, inputs)
        heads_TV, lse_QN = self.attend_absorbed(*absorbed, rows_QC, state.deferred)
        if not self._learns:
            return heads_TV
        query_QNL, latents_TL = (part.detach() for part in absorbed)
        attended = ChosenLatents(
            query_QNL, latents_TL, rows_QC, lse_QN, self._kv_rank, self.scale, self.setup
        )
        weight = self.indexer.description.loss
        return add_indexer_loss(heads_TV, indexed, attended, weight, inputs, state.statistics)

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
        if not self._learns:
            return heads_TV
        query = heads[0].detach() if factor is None else heads[0].detach() * factor
        attended = KeysOfHeads((query * self.scale, heads[1].detach()), rule, inputs, self.setup)
        weight = self.indexer.description.loss
        return add_indexer_loss(heads_TV, indexed, attended, weight, inputs, state.statistics)

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


class SharedIndexerAttention(ChosenKeysAttention):
    """Latent attention to the keys that the indexer of an earlier layer has chosen."""

    def __init__(self, name: str, description: SharedIndexerDescription, setup: LayerSetup) -> None:
        """Make the layers. The arguments are those of `ChosenKeysAttention`."""
        super().__init__(name, description, setup)
        self.indexer: IndexerDescription = description.indexer
        self.choice = name_choice(f"blocks.{description.source}")

    def attend(
        self,
        query: Tensor,
        kv_latent: Tensor,
        key_shared: Tensor,
        inputs: MicrobatchInputs,
        state: PassState,
    ) -> Tensor:
        """Attend to chosen keys within samples."""
        parts, deferred = (query, kv_latent, key_shared), state.deferred
        if self.absorbs_in(inputs, state):
            rows_QC = self.number_rows(state.handed.take(self.choice), inputs)
            absorbed = self.absorb(*parts, inputs, deferred)
            return self.attend_absorbed(*absorbed, rows_QC, deferred)[0]
        heads, cache = (
            self.make_heads(*parts, inputs, deferred),
            state.find_cache(self, self.window),
        )
        factor = inputs.find_query_scale(self.query_scale)
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
