"""The loss of an indexer, which compares its scores with what attention sees.

The softmax of the scores is compared with the mean of the softmaxes of attention's heads, which is
a constant to it, over the keys that a query sees. Gradients are computed in the forward pass, some
queries at a time, so that scores are never kept.

Shape legend: B samples, S positions of this rank, T tokens of whole samples, R rows of this rank, H
heads of the indexer, D their width, Q some of the queries of one sample, N heads of attention, E
their width, C chosen keys of a query, L width of a latent; K the keys that are compared: all T of a
sample, or C.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from megaframe.distributed.collectives import all_reduce
from megaframe.model.index_scores import (
    IndexedHeads,
    SomeQueries,
    compute_scores,
    iterate_queries,
    make_mask,
)
from megaframe.model.layer_inputs import LayerSetup, MicrobatchInputs
from megaframe.model.pass_state import LayerStatistics
from megaframe.ops.attention_mask import AttentionMask, ChosenKeys
from megaframe.ops.autograd import get_direct_apply
from megaframe.ops.latent_attention import sum_shares


@dataclass(frozen=True)
class Shares:
    """What scores of some queries are compared with.

    Attributes:
        shares_QK: Mean over all heads of attention of their softmaxes.
        seen_QK: The keys over which they are taken.
        rows_QC: Which keys these are, among those of all samples; None for all of the sample.
    """

    shares_QK: Tensor
    seen_QK: Tensor
    rows_QC: Tensor | None = None

    def select(self, rows: slice) -> Shares:
        """Return those of some of the queries."""
        of_keys = None if self.rows_QC is None else self.rows_QC[rows]
        return Shares(self.shares_QK[rows], self.seen_QK[rows], of_keys)


class AttendedKeys(Protocol):
    """What attention has seen."""

    def count_elements(self, indexed: IndexedHeads) -> int:
        """Return how many numbers are made of a query."""
        ...

    def compute_shares(self, queries: SomeQueries) -> Shares:
        """Return the shares of some queries. All tensor ranks ask for the same ones in turn."""
        ...


class KeysOfHeads:
    """Attention by keys of all heads, most of which may be hidden."""

    def __init__(
        self,
        scored: tuple[Tensor, Tensor],
        rule: tuple[AttentionMask, ChosenKeys | None],
        inputs: MicrobatchInputs,
        setup: LayerSetup,
    ) -> None:
        """Keep what shares are computed from.

        Args:
            scored: Queries of attention times the scale of scores, and keys, [B, S, N, E].
            rule: What tokens see, and the keys that are chosen.
            inputs: Of the microbatch.
            setup: What the run fixes.
        """
        (self._query_BSNE, self._key_BSNE), self._rule = scored, rule
        self._inputs, self._group = inputs, setup.tensor.group
        self._length = inputs.length * inputs.context.size
        self._keys_TNE: Tensor | None = None

    def count_elements(self, indexed: IndexedHeads) -> int:
        """Return those of the scores of the indexer's heads."""
        return indexed.queries_RHD.shape[1] * self._length

    def compute_shares(self, queries: SomeQueries) -> Shares:
        """Return the shares of all keys of a sample, which are gathered with its first queries."""
        sample, own = queries.sample, queries.own
        if self._keys_TNE is None or own.start == 0:
            self._keys_TNE = self._gather_keys(self._key_BSNE[sample])
        seen_QT = make_mask(queries, *self._rule, self._inputs, self._length)
        query_QNE, keys_TNE = self._query_BSNE[sample, own], self._keys_TNE
        wide = torch.promote_types(query_QNE.dtype, torch.float32)
        scores_NQT = query_QNE.to(wide).movedim(1, 0) @ keys_TNE.to(wide).movedim(0, 2)
        shares_NQT = scores_NQT.masked_fill_(~seen_QT, -torch.inf).softmax(-1)
        heads = shares_NQT.shape[0] * self._group.size
        return Shares(all_reduce(shares_NQT.sum(0) / heads, self._group).wait(), seen_QT)

    def _gather_keys(self, keys_SNE: Tensor) -> Tensor:
        """Return the keys of attention of a whole sample, [T, N, E]."""
        context = self._inputs.context
        pieces = keys_SNE[None].unflatten(1, (len(context.own_pieces), -1))
        return context.gather_pieces(pieces).flatten(1, 2)[0]


@dataclass(frozen=True)
class ChosenLatents:
    """Attention by the latents of chosen keys.

    Attributes:
        query_QNL: Queries of all tokens of this rank.
        latents_TL: Latents of all samples.
        rows_QC: Those that each query sees; -1 for none.
        lse_QN: Log-sum-exps of its scores.
        value_width: Columns that attention sums.
        scale: Factor of the scores.
        setup: What the run fixes.
    """

    query_QNL: Tensor
    latents_TL: Tensor
    rows_QC: Tensor
    lse_QN: Tensor
    value_width: int
    scale: float
    setup: LayerSetup

    def count_elements(self, indexed: IndexedHeads) -> int:
        """Return those of the latents of chosen keys, or of what is made of each of them."""
        made = *self.query_QNL.shape[1:], *indexed.queries_RHD.shape[1:]
        return self.rows_QC.shape[1] * max(made)

    def compute_shares(self, queries: SomeQueries) -> Shares:
        """Return the shares of chosen keys alone."""
        kernels, group, some = self.setup.kernels, self.setup.tensor.group, queries.rows
        rows_QC = self.rows_QC[some]
        tensors = self.query_QNL[some], self.latents_TL, rows_QC, self.lse_QN[some]
        sums_QC = sum_shares(kernels, *tensors, self.value_width, self.scale)
        heads = self.query_QNL.shape[1] * group.size
        return Shares(all_reduce(sums_QC / heads, group).wait(), rows_QC >= 0, rows_QC)


@torch.no_grad()
def add_indexer_loss(
    out: Tensor,
    indexed: IndexedHeads,
    attended: AttendedKeys,
    weight: float,
    inputs: MicrobatchInputs,
    statistics: LayerStatistics,
) -> Tensor:
    """Return `out` with the loss in its graph, sum over tokens with a label of KL(p || q): p is the
    mean of the softmaxes of attention's heads over the keys that a token sees, and q the softmax of
    the indexer's scores over the same keys (DeepSeek-V3.2, equations 3 and 4).

    Args:
        out: Output of attention.
        indexed: What scores are computed from.
        attended: What attention has seen.
        weight: Of the loss.
        inputs: Of the microbatch.
        statistics: Get the loss.
    """
    factor = inputs.gradient_scale
    assert factor is not None, "only what is trained has losses of its own"
    gradients = tuple(
        x.new_zeros(x.shape, dtype=torch.promote_types(x.dtype, torch.float32))
        for x in (indexed.queries_RHD, indexed.keys_BTD, indexed.weights_RH)
    )
    counted_R = inputs.label_weights_R.to(gradients[0].dtype) * weight
    total = torch.zeros((), dtype=torch.float64, device=out.device)
    for queries in iterate_queries(indexed, inputs, attended.count_elements(indexed)):
        shares, own = attended.compute_shares(queries), queries.find_own_rows(inputs)
        if own is None:
            continue
        part, rows = own
        kept = slice(part.own.start - queries.own.start, part.own.stop - queries.own.start)
        of_rows = shares.select(kept)
        total += _add_gradients(indexed, part.sample, rows, of_rows, counted_R[rows], gradients)
    statistics.add_loss("indexer", total)
    parts = (indexed.queries_RHD, indexed.keys_BTD, indexed.weights_RH)
    scaled = [
        (gradient * factor.to(gradient.dtype)).to(part.dtype)
        for gradient, part in zip(gradients, parts, strict=True)
    ]
    with torch.enable_grad():
        return _attach_gradients(out, *parts, *scaled)


def _add_gradients(
    indexed: IndexedHeads,
    sample: int,
    rows: slice,
    shares: Shares,
    counted_Q: Tensor,
    gradients: tuple[Tensor, ...],
) -> Tensor:
    """Return the loss of some rows of a sample, and add its gradients to those of queries, keys and
    weights.

    Args:
        indexed: What scores are computed from.
        sample: The sample.
        rows: Its queries among this rank's rows.
        shares: What the softmax of the scores is compared with.
        counted_Q: How much each query counts.
        gradients: Of queries [R, H, D], keys [B, T, D] and weights [R, H]; changed.
    """
    keys_KD = indexed.keys_BTD[sample]
    if shares.rows_QC is not None:
        # What is not seen is any key, whose gradient is 0.
        chosen = shares.rows_QC.clamp_min(0).long()
        keys_KD = indexed.keys_BTD.flatten(0, 1)[chosen]
    query_QHD, keys_KD, weights_Q1H, active_QHK, scores_QK = compute_scores(indexed, rows, keys_KD)
    shares_QK, hidden_QK = shares.shares_QK, ~shares.seen_QK
    logs_QK = scores_QK.masked_fill_(hidden_QK, -torch.inf).log_softmax(-1)
    # Where a key is not seen, both shares are 0, and so is what it adds.
    seen_logs = logs_QK.masked_fill(hidden_QK, 0.0)
    differences_QK = torch.special.xlogy(shares_QK, shares_QK) - shares_QK * seen_logs
    d_scores_Q1K = ((logs_QK.exp() - shares_QK) * counted_Q[:, None])[:, None]
    d_queries, d_keys, d_weights = gradients
    d_weights[rows] += (d_scores_Q1K @ active_QHK.mT)[:, 0]
    d_products = (weights_Q1H.mT * d_scores_Q1K).mul_(active_QHK > 0)
    if shares.rows_QC is None:
        d_products = d_products.flatten(0, 1)
        d_queries[rows] += (d_products @ keys_KD).view_as(query_QHD)
        d_keys[sample] += d_products.mT @ query_QHD.flatten(0, 1)
    else:
        d_queries[rows] += d_products @ keys_KD
        d_chosen = (d_products.mT @ query_QHD).flatten(0, 1)
        d_keys.view(-1, d_keys.shape[-1]).index_add_(0, chosen.flatten(), d_chosen)
    return (differences_QK.sum(-1) * counted_Q).sum()


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
