"""Scores of an indexer: what they are computed from, and of which queries at a time.

A key's score is a sum over a few heads of ReLUs of products with one key, times weights that the
query's token gives the heads. Shape legend: B samples, T tokens of whole samples, R rows of this
rank, H heads of the indexer, D their width, Q some of the queries of one sample, K the keys that
they are scored with: all T of the sample, or C chosen ones of each query.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megaframe.model.layer_inputs import MicrobatchInputs
from megaframe.model.rotary import Rotary
from megaframe.ops.attention_mask import AttentionMask, ChosenKeys


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

    @property
    def rows(self) -> slice:
        """Their tokens among all tokens of the microbatch on this rank."""
        return slice(self.first_row, self.first_row + self.own.stop - self.own.start)

    def find_own_rows(self, inputs: MicrobatchInputs) -> tuple[SomeQueries, slice] | None:
        """Return those that are this tensor rank's rows, and which of its rows they are; None if
        none is."""
        rows = inputs.rows
        per_rank = rows.padded // rows.ranks
        before = rows.index * per_rank
        start = max(self.first_row, before)
        stop = min(self.rows.stop, before + per_rank)
        if start >= stop:
            return None
        shift = self.own.start - self.first_row
        own = slice(start + shift, stop + shift)
        return SomeQueries(self.sample, own, start), slice(start - before, stop - before)


def iterate_queries(
    indexed: IndexedHeads, inputs: MicrobatchInputs, elements: int
) -> Iterator[SomeQueries]:
    """Yield all queries of this rank's tokens, some at a time, the same on all tensor ranks: so
    many that what is made of them is no more numbers than the heads of all rows are.

    Args:
        indexed: What scores are computed from.
        inputs: Of the microbatch.
        elements: Numbers that are made of a query.
    """
    step = max(1, indexed.queries_RHD.numel() // elements)
    for sample in range(inputs.batch):
        for start in range(0, inputs.length, step):
            own = slice(start, min(start + step, inputs.length))
            yield SomeQueries(sample, own, sample * inputs.length + start)


def make_mask(
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
    indexed: IndexedHeads, rows: slice, keys_KD: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Compute scores of some rows, in at least fp32.

    Args:
        indexed: What they are computed from.
        rows: Of this rank.
        keys_KD: The same keys for all rows [T, D], or keys of each [Q, C, D].

    Returns:
        The queries [Q, H, D], keys, and weights [Q, 1, H], the ReLUs of the products of their heads
        [Q, H, K], and their scores [Q, K].
    """
    wide = torch.promote_types(keys_KD.dtype, torch.float32)
    query_QHD, weights_QH = indexed.queries_RHD[rows].to(wide), indexed.weights_RH[rows].to(wide)
    keys_KD, weights_Q1H = keys_KD.to(wide), weights_QH[:, None]
    if keys_KD.dim() == 2:
        # One product of all heads, not one of each query.
        products = (query_QHD.flatten(0, 1) @ keys_KD.mT).view(*query_QHD.shape[:2], -1)
    else:
        products = query_QHD @ keys_KD.mT
    active_QHK = products.relu_()
    scores_QK = (weights_Q1H @ active_QHK)[:, 0]
    return query_QHD, keys_KD, weights_Q1H, active_QHK, scores_QK


def find_largest(scores_QK: Tensor, number: int) -> Tensor:
    """Return the places of the largest scores, [Q, number], of equal ones the first. A stable sort
    depends on nothing else, unlike `torch.topk`, and equal scores are common: they are 0 where all
    heads' ReLUs are."""
    return scores_QK.sort(stable=True, descending=True).indices[:, :number]


def rotate_rows(rotate: Rotary, query_RHD: Tensor, inputs: MicrobatchInputs) -> Tensor:
    """Return the query heads of this rank's rows, rotated by the positions of these."""
    rows = inputs.rows
    if rows.ranks == 1:
        query_BSHD = query_RHD.unflatten(0, (inputs.batch, inputs.length))
        return rotate(query_BSHD).flatten(0, 1)
    return rotate.select(rows, inputs.batch)(query_RHD[:, None])[:, 0]
