"""The indexer of sparse attention: which keys a query sees.

Every tensor rank scores for the queries of its own rows, by all heads, so that no sum depends on
the number of ranks; of equal scores the first in the sample is the larger one. Scores are in
`index_scores.py`, and the loss that teaches the indexer is in `indexer_loss.py`.

Shape legend: B samples, S positions of this rank, T tokens of whole samples, R rows of this rank, H
heads of the indexer, D their width, Q some of the queries of one sample.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megaframe.architecture.rotary import RotaryDescription
from megaframe.architecture.sparse_attention import IndexerDescription
from megaframe.distributed.collectives import all_gather
from megaframe.distributed.differentiable import gather_differentiably
from megaframe.model.index_scores import (
    IndexedHeads,
    compute_scores,
    find_largest,
    iterate_queries,
    make_mask,
    rotate_rows,
)
from megaframe.model.layer_inputs import LayerSetup, MicrobatchInputs
from megaframe.model.norm import Norm
from megaframe.ops.attention_mask import AttentionMask, ChosenKeys
from megaframe.parameters.parameter import Module
from megaframe.tensor_parallel.deferred_gradients import DeferredGradients
from megaframe.tensor_parallel.linear import Linear


class Indexer(Module):
    """Scores keys and chooses those that attention sees.

    Attributes:
        is_trained: Whether it has a loss.
    """

    def __init__(
        self,
        name: str,
        description: IndexerDescription,
        rotary: RotaryDescription | None,
        setup: LayerSetup,
    ) -> None:
        """Make the layers.

        Args:
            name: Of the indexer in the model.
            description: What it declares.
            rotary: How attention rotates, and the indexer as well.
            setup: What the run fixes.
        """
        self.description, self.rotary, self.setup = description, rotary, setup
        self.is_trained = description.is_trained
        # Not divided: every tensor rank scores for its own rows.
        self.query = Linear(f"{name}.query", description.query, setup.tensor)
        self.key = Linear(f"{name}.key", description.key, setup.tensor)
        self.key_norm = Norm(f"{name}.key_norm", description.key_norm)

    def __call__(
        self, x: Tensor, latent: Tensor, inputs: MicrobatchInputs, deferred: DeferredGradients
    ) -> IndexedHeads:
        """Return the heads of this rank's rows, and the keys of their samples.

        Args:
            x: This rank's normalised rows of the stream.
            latent: Their normalised latents of queries.
            inputs: Of the microbatch.
            deferred: Computes or keeps the weight gradients.
        """
        described, rows = self.description, inputs.rows
        sizes, trains = described.key.fused[0], self.is_trained and torch.is_grad_enabled()
        with torch.set_grad_enabled(trains):
            # Leaves, which end the graph: no gradient reaches attention or the stream.
            x, latent = (part.detach().requires_grad_(trains) for part in (x, latent))
            query = self.query(latent, deferred).view(-1, described.heads, described.head_dim)
            key, weights = self.key(x, deferred).split(sizes, 1)
            key = self.key_norm(key, self.setup.kernels)
            key = rows.remove_padding(gather_differentiably(key, self.setup.tensor.group))
            key = key.view(inputs.batch, inputs.length, 1, -1)
            if self.rotary is not None:
                rotate = inputs.rotary[self.rotary]
                key, query = rotate(key), rotate_rows(rotate, query, inputs)
            pieces = len(inputs.context.own_pieces)
            key = inputs.context.gather_pieces(key.squeeze(2).unflatten(1, (pieces, -1)))
            scale = (described.heads * described.head_dim) ** -0.5
            return IndexedHeads(query, key.flatten(1, 2), weights * scale)

    @torch.no_grad()
    def choose_keys(
        self, indexed: IndexedHeads, mask: AttentionMask, inputs: MicrobatchInputs
    ) -> Tensor | None:
        """Return the places in their samples of the keys that each of this rank's rows may see,
        int32 [R, top_k]; None if all.

        Args:
            indexed: What scores are computed from.
            mask: What tokens see otherwise.
            inputs: Of the microbatch.
        """
        described, keys_BTD = self.description, indexed.keys_BTD
        length = keys_BTD.shape[1]
        if not described.chooses(length):
            return None
        places_RC = self.make_empty_choice(indexed)
        for queries in iterate_queries(indexed, inputs, described.heads * length):
            own = queries.find_own_rows(inputs)
            if own is None:
                continue
            part, part_rows = own
            scores_QT = compute_scores(indexed, part_rows, keys_BTD[part.sample])[-1]
            scores_QT.masked_fill_(~make_mask(part, mask, None, inputs, length), -torch.inf)
            places_RC[part_rows] = find_largest(scores_QT, described.top_k).to(torch.int32)
        return places_RC

    def make_empty_choice(self, indexed: IndexedHeads) -> Tensor:
        """Return zeros as many as the keys that this rank's rows may see, int32 [R, top_k]."""
        keys_BTD, rows = indexed.keys_BTD, len(indexed.queries_RHD)
        return keys_BTD.new_zeros((rows, self.description.top_k), dtype=torch.int32)

    @torch.no_grad()
    def choose_past(
        self, indexed: IndexedHeads, keys_BTD: Tensor, seen_B11T: Tensor | None
    ) -> Tensor | None:
        """Return the places of the tokens so far that one token of each sample may see, int32 [B,
        top_k]; None if all.

        Args:
            indexed: Of these tokens.
            keys_BTD: The keys so far.
            seen_B11T: Which of them a token may see; None for all.
        """
        described = self.description
        if not described.chooses(keys_BTD.shape[1]):
            return None
        scores_BT = torch.cat(
            [
                compute_scores(indexed, slice(sample, sample + 1), keys_TD)[-1]
                for sample, keys_TD in enumerate(keys_BTD)
            ]
        )
        if seen_B11T is not None:
            scores_BT.masked_fill_(~seen_B11T[:, 0, 0], -torch.inf)
        return find_largest(scores_BT, described.top_k).to(torch.int32)


def gather_choice(places_RC: Tensor, inputs: MicrobatchInputs, setup: LayerSetup) -> ChosenKeys:
    """Return the keys that all tokens of this context rank may see, from those of each tensor
    rank's rows."""
    places_TC = inputs.rows.remove_padding(all_gather(places_RC, setup.tensor.group).wait())
    places_BSC = places_TC.view(inputs.batch, inputs.length, -1)
    return ChosenKeys(places_BSC, inputs.length * inputs.context.size)


def mark_past(places_BC: Tensor, seen_B11T: Tensor | None, length: int) -> Tensor:
    """Return which of the tokens so far one token of each sample sees, bool [B, 1, 1, T].

    Args:
        places_BC: Those that are chosen.
        seen_B11T: Which of them it may see; None for all.
        length: How many there are.
    """
    marked_BT = places_BC.new_zeros((len(places_BC), length), dtype=torch.bool)
    marked_B11T = marked_BT.scatter_(1, places_BC.long(), True)[:, None, None]
    return marked_B11T if seen_B11T is None else marked_B11T & seen_B11T
