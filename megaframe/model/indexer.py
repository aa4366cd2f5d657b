"""The indexer of sparse attention: which keys a query sees, and the loss that teaches it.

A key's score is a sum over a few heads of ReLUs of products with one key, times weights that the
query's token gives the heads. Every tensor rank scores for the queries of its own rows, by all
heads, so that no sum depends on the number of ranks; of equal scores the first in the sample is the
larger one. The loss compares the softmax of the scores with the mean of the softmaxes of
attention's heads, which is a constant to it. Its gradients are computed in the forward pass, some
queries at a time, so that scores are never kept.

Shape legend: B samples, S positions of this rank, T tokens of whole samples, R rows of this rank, H
heads of the indexer, D their width, Q some of the queries of one sample, N heads of attention.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from megaframe.architecture.rotary import RotaryDescription
from megaframe.architecture.sparse_attention import IndexerDescription
from megaframe.distributed.collectives import all_gather, all_reduce
from megaframe.distributed.differentiable import gather_differentiably
from megaframe.model.layer_inputs import LayerSetup, MicrobatchInputs
from megaframe.model.norm import Norm
from megaframe.model.pass_state import LayerStatistics
from megaframe.model.rotary import Rotary
from megaframe.ops.attention_mask import AttentionMask, ChosenKeys
from megaframe.ops.autograd import get_direct_apply
from megaframe.parameters.parameter import Module
from megaframe.tensor_parallel.deferred_gradients import DeferredGradients
from megaframe.tensor_parallel.linear import Linear


@dataclass(frozen=True)
class IndexedHeads:
    """What scores are computed from.

    Attributes:
        queries_RHD: Of this rank's rows.
        keys_BTD: Of whole samples.
        weights_RH: Of the heads, with the scale of the scores.
    """

    queries_RHD: Tensor
    keys_BTD: Tensor
    weights_RH: Tensor


@dataclass(frozen=True)
class SomeQueries:
    """Some queries of one sample.

    Attributes:
        sample: Its number in the microbatch.
        own: Their tokens on this rank within the sample.
        first_row: Number of the first one among all tokens of the microbatch on this rank.
    """

    sample: int
    own: slice
    first_row: int


class Indexer(Module):
    """Scores keys, chooses those that attention sees, and is trained on what attention sees.

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
        for queries in iterate_queries(indexed, inputs):
            own = find_own_rows(queries, inputs)
            if own is None:
                continue
            part, part_rows = own
            scores_QT = compute_scores(indexed, part_rows, part.sample)[-1]
            scores_QT.masked_fill_(~_make_mask(part, mask, None, inputs, length), -torch.inf)
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
        past = replace(indexed, keys_BTD=keys_BTD)
        scores_BT = torch.cat(
            [
                compute_scores(past, slice(sample, sample + 1), sample)[-1]
                for sample in range(len(keys_BTD))
            ]
        )
        if seen_B11T is not None:
            scores_BT.masked_fill_(~seen_B11T[:, 0, 0], -torch.inf)
        return find_largest(scores_BT, described.top_k).to(torch.int32)

    @torch.no_grad()
    def add_loss(
        self,
        out: Tensor,
        indexed: IndexedHeads,
        scored: tuple[Tensor, Tensor],
        rule: tuple[AttentionMask, ChosenKeys | None],
        inputs: MicrobatchInputs,
        statistics: LayerStatistics,
    ) -> Tensor:
        """Return `out` with the loss in its graph, sum over tokens with a label of KL(p || q): p is
        the mean of the softmaxes of attention's heads over the keys that a token sees, and q the
        softmax of the indexer's scores over the same keys (DeepSeek-V3.2, equations 3 and 4).

        Args:
            out: Output of the layer.
            indexed: What scores are computed from.
            scored: Queries of attention times the scale of scores, and keys, [B, S, N, width].
            rule: What tokens see, and the keys that are chosen.
            inputs: Of the microbatch.
            statistics: Get the loss.
        """
        factor = inputs.gradient_scale
        assert factor is not None, "only what is trained has losses of its own"
        gradients = tuple(
            torch.zeros_like(x, dtype=torch.promote_types(x.dtype, torch.float32))
            for x in (indexed.queries_RHD, indexed.keys_BTD, indexed.weights_RH)
        )
        counted_R = inputs.label_weights_R.to(gradients[0].dtype) * self.description.loss
        total = torch.zeros((), dtype=torch.float64, device=out.device)
        length = indexed.keys_BTD.shape[1]
        keys_TNE: Tensor | None = None
        for queries in iterate_queries(indexed, inputs):
            if keys_TNE is None or queries.own.start == 0:
                keys_TNE = self._gather_keys(scored[1][queries.sample], inputs)
            seen_QT = _make_mask(queries, *rule, inputs, length)
            shares_QT = self._average_heads(
                scored[0][queries.sample, queries.own], keys_TNE, seen_QT
            )
            own = find_own_rows(queries, inputs)
            if own is None:
                continue
            part, rows = own
            kept = slice(part.own.start - queries.own.start, part.own.stop - queries.own.start)
            total += _add_gradients(
                indexed,
                part.sample,
                rows,
                shares_QT[kept],
                seen_QT[kept],
                counted_R[rows],
                gradients,
            )
        statistics.add_loss("indexer", total)
        parts = (indexed.queries_RHD, indexed.keys_BTD, indexed.weights_RH)
        scaled = [
            (gradient * factor.to(gradient.dtype)).to(part.dtype)
            for gradient, part in zip(gradients, parts, strict=True)
        ]
        with torch.enable_grad():
            return _attach_gradients(out, *parts, *scaled)

    def _gather_keys(self, keys_SNE: Tensor, inputs: MicrobatchInputs) -> Tensor:
        """Return the keys of attention of a whole sample, [T, N, E]."""
        pieces = len(inputs.context.own_pieces)
        gathered = inputs.context.gather_pieces(keys_SNE[None].unflatten(1, (pieces, -1)))
        return gathered.flatten(1, 2)[0]

    def _average_heads(self, query_QNE: Tensor, keys_TNE: Tensor, seen_QT: Tensor) -> Tensor:
        """Return the mean over all heads of attention of their softmaxes, [Q, T]."""
        wide, group = torch.promote_types(query_QNE.dtype, torch.float32), self.setup.tensor.group
        scores_NQT = query_QNE.to(wide).movedim(1, 0) @ keys_TNE.to(wide).movedim(0, 2)
        shares_NQT = scores_NQT.masked_fill_(~seen_QT, -torch.inf).softmax(-1)
        heads = shares_NQT.shape[0] * group.size
        return all_reduce(shares_NQT.sum(0) / heads, group).wait()


def rotate_rows(rotate: Rotary, query_RHD: Tensor, inputs: MicrobatchInputs) -> Tensor:
    """Return the query heads of this rank's rows, rotated by the positions of these."""
    rows = inputs.rows
    if rows.ranks == 1:
        query_BSHD = query_RHD.unflatten(0, (inputs.batch, inputs.length))
        return rotate(query_BSHD).flatten(0, 1)
    return rotate.select(rows, inputs.batch)(query_RHD[:, None])[:, 0]


def find_own_rows(
    queries: SomeQueries, inputs: MicrobatchInputs
) -> tuple[SomeQueries, slice] | None:
    """Return those of some queries that are this tensor rank's rows, and which of its rows they
    are; None if none is."""
    rows = inputs.rows
    per_rank = rows.padded // rows.ranks
    before = rows.index * per_rank
    start = max(queries.first_row, before)
    size = queries.own.stop - queries.own.start
    stop = min(queries.first_row + size, before + per_rank)
    if start >= stop:
        return None
    shift = queries.own.start - queries.first_row
    own = slice(start + shift, stop + shift)
    return SomeQueries(queries.sample, own, start), slice(start - before, stop - before)


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


def iterate_queries(indexed: IndexedHeads, inputs: MicrobatchInputs) -> Iterator[SomeQueries]:
    """Yield all queries of this rank's tokens, some at a time, the same on all tensor ranks: so
    many that the scores of their heads are no more numbers than the heads of all rows are."""
    rows, _, width = indexed.queries_RHD.shape
    step = max(1, rows * width // indexed.keys_BTD.shape[1])
    for sample in range(inputs.batch):
        for start in range(0, inputs.length, step):
            own = slice(start, min(start + step, inputs.length))
            yield SomeQueries(sample, own, sample * inputs.length + start)


def _make_mask(
    queries: SomeQueries,
    mask: AttentionMask,
    chosen: ChosenKeys | None,
    inputs: MicrobatchInputs,
    length: int,
) -> Tensor:
    """Return which keys of their sample some queries see, bool [Q, T]."""
    device, sample = inputs.labels_T.device, slice(queries.sample, queries.sample + 1)
    if mask.documents_BS is not None:
        mask = replace(mask, documents_BS=mask.documents_BS[sample])
    places_Q = inputs.context.compute_positions(inputs.length, device)[queries.own]
    places_T = torch.arange(length, device=device)
    marked = None
    if chosen is not None:
        of_sample = replace(chosen, places_BSC=chosen.places_BSC[sample])
        marked = of_sample.mark(queries.own, places_T)
    seen = mask.make_dense(places_Q, places_T, marked)
    return seen if seen.dim() == 2 else seen[0, 0]


def compute_scores(
    indexed: IndexedHeads, rows: slice, sample: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the queries [Q, H, D], keys [T, D] and weights [Q, 1, H] of some rows of a sample, the
    ReLUs of the products of their heads [Q, H, T], and their scores [Q, T], all in at least
    fp32."""
    wide = torch.promote_types(indexed.keys_BTD.dtype, torch.float32)
    query_QHD, weights_QH = indexed.queries_RHD[rows].to(wide), indexed.weights_RH[rows].to(wide)
    key_TD, weights_Q1H = indexed.keys_BTD[sample].to(wide), weights_QH[:, None]
    active_QHT = (query_QHD.flatten(0, 1) @ key_TD.mT).relu_().view(*query_QHD.shape[:2], -1)
    scores_QT = (weights_Q1H @ active_QHT)[:, 0]
    return query_QHD, key_TD, weights_Q1H, active_QHT, scores_QT


def find_largest(scores_QT: Tensor, number: int) -> Tensor:
    """Return the places of the largest scores, [Q, number], of equal ones the first. A stable sort
    depends on nothing else, unlike `torch.topk`, and equal scores are common: they are 0 where all
    heads' ReLUs are."""
    return scores_QT.sort(stable=True, descending=True).indices[:, :number]


def _add_gradients(
    indexed: IndexedHeads,
    sample: int,
    rows: slice,
    shares_QT: Tensor,
    seen_QT: Tensor,
    counted_Q: Tensor,
    gradients: tuple[Tensor, ...],
) -> Tensor:
    """Return the loss of some rows of a sample, and add its gradients to those of queries, keys and
    weights.

    Args:
        indexed: What scores are computed from.
        sample: The sample.
        rows: Its queries among this rank's rows.
        shares_QT: What the softmax of the scores is compared with.
        seen_QT: The keys over which it is taken.
        counted_Q: How much each query counts.
        gradients: Of queries [R, H, D], keys [B, T, D] and weights [R, H]; changed.
    """
    query_QHD, key_TD, weights_Q1H, active_QHT, scores_QT = compute_scores(indexed, rows, sample)
    logs_QT = scores_QT.masked_fill_(~seen_QT, -torch.inf).log_softmax(-1)
    # Where a key is not seen, both shares are 0, and so is what it adds.
    differences_QT = torch.special.xlogy(shares_QT, shares_QT) - shares_QT * logs_QT.masked_fill(
        ~seen_QT, 0.0
    )
    d_scores_Q1T = ((logs_QT.exp() - shares_QT) * counted_Q[:, None])[:, None]
    d_queries, d_keys, d_weights = gradients
    d_weights[rows] += (d_scores_Q1T @ active_QHT.mT)[:, 0]
    d_products = (weights_Q1H.mT * d_scores_Q1T).mul_(active_QHT > 0).flatten(0, 1)
    d_queries[rows] += (d_products @ key_TD).view_as(query_QHD)
    d_keys[sample] += d_products.mT @ query_QHD.flatten(0, 1)
    return (differences_QT.sum(-1) * counted_Q).sum()


class _AttachGradients(torch.autograd.Function):
    """Return the first tensor. The backward pass gives the next three their gradients, which are
    known already."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, *parts: Tensor) -> Tensor:
        ctx.save_for_backward(*parts[3:])
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return gradients[0], *ctx.saved_tensors, None, None, None


_attach_gradients = get_direct_apply(_AttachGradients)
