"""Attention to a window of keys and to compressed keys, tile by tile: heads share one key, which is
its value, too.

Keys of a window, and compressed keys that the queries of a tile might see, are put side by side for
each tile, and multiplied with the queries of all heads at once. What is kept is what a rank has
itself; what others send it is sent again in the backward pass.

Shape legend: B samples, S tokens of this rank, P its pieces of samples, T tokens of a piece with
those before it, E compressed keys of a sample, N query heads, D width of a head, Q queries and K
keys of a tile.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from megaframe.architecture.compressed_attention import TILE_QUERIES
from megaframe.ops.attention_mask import ChosenKeys
from megaframe.ops.attention_tiles import compute_sinks_gradient
from megaframe.ops.autograd import backward

Extend = Callable[[Tensor, Tensor | None], tuple[Tensor, Tensor | None]]
"""From a rank's own keys [B, S, D] and compressed keys, those of its pieces with the keys before
each, [B, P, T, D], and the compressed keys of samples, [B, E, D]."""


@dataclass(frozen=True)
class CompressedPlaces:
    """Where compressed keys are.

    Attributes:
        ends_BE: Place in the sample of the last token of each; after all tokens where there is
            none.
        per_piece: Of each piece of a sample.
        tokens: Least distance of two ends.
        chosen: Which of them each query may see; None for all.
    """

    ends_BE: Tensor
    per_piece: int
    tokens: int
    chosen: ChosenKeys | None = None


@dataclass(frozen=True)
class _Tile:
    """Some queries of a piece, the keys of their windows among those of the piece, and how many of
    the first compressed keys they may see."""

    piece: int
    first: int
    queries: slice
    keys: slice
    compressed: int


@dataclass(frozen=True)
class WindowSight:
    """Which keys the queries of this rank see.

    Attributes:
        window: So many tokens, with a query's own.
        pieces: Numbers in the sample of this rank's pieces.
        length: Tokens of a piece.
        before: How many tokens before a piece have keys.
        documents_BT: Document numbers of whole samples; None without documents.
        compressed: Where compressed keys are; None if there are none.
        device: Of masks.
    """

    window: int
    pieces: tuple[int, ...]
    length: int
    before: int
    documents_BT: Tensor | None
    compressed: CompressedPlaces | None
    device: torch.device

    @cached_property
    def tiles(self) -> list[_Tile]:
        """All queries, some at a time."""
        return [
            self._make_tile(index, number, start, min(start + TILE_QUERIES, self.length))
            for index, number in enumerate(self.pieces)
            for start in range(0, self.length, TILE_QUERIES)
        ]

    def _make_tile(self, index: int, number: int, start: int, stop: int) -> _Tile:
        first, places, compressed = number * self.length, self.compressed, 0
        if places is not None:
            compressed = number * places.per_piece + (stop - 1) // places.tokens + 1
        keys = slice(max(0, start + self.before - self.window + 1), stop + self.before)
        own = slice(index * self.length + start, index * self.length + stop)
        return _Tile(index, first + start, own, keys, compressed)

    def make_mask(self, tile: _Tile) -> Tensor:
        """Return which keys of its window and which compressed keys each query of a tile sees, bool
        [Q, K] or [B, Q, K]."""
        start = self.pieces[tile.piece] * self.length - self.before
        places_Q = self._count(tile.queries) + (tile.first - tile.queries.start)
        places_K = self._count(tile.keys) + start
        distance = places_Q[:, None] - places_K
        seen = (distance >= 0) & (distance < self.window) & (places_K >= 0)
        if self.documents_BT is not None:
            own, others = (
                self.documents_BT[:, places_Q],
                self.documents_BT[:, places_K.clamp_min(0)],
            )
            seen = seen & (own[:, :, None] == others[:, None])
        if self.compressed is not None:
            more_BQE = self.find_compressed(places_Q, tile.compressed)
            if self.compressed.chosen is not None:
                places_E = torch.arange(tile.compressed, device=self.device)
                more_BQE = more_BQE & self.compressed.chosen.mark(tile.queries, places_E)
            seen = torch.cat((seen.expand(*more_BQE.shape[:2], -1), more_BQE), -1)
        return seen

    def find_compressed(self, places_Q: Tensor, count: int, sample: slice = slice(None)) -> Tensor:
        """Return which of the first compressed keys of samples, so many, are of tokens before
        queries at these places, bool [B, Q, count]."""
        assert self.compressed is not None, "there are none"
        ends_BE = self.compressed.ends_BE[sample, :count]
        seen = ends_BE[:, None] <= places_Q[:, None]
        if self.documents_BT is None:
            return seen
        documents = self.documents_BT[sample]
        last = documents.shape[1] - 1
        of_keys = documents.gather(1, ends_BE.clamp_max(last).expand(len(documents), -1))
        return seen & (documents[:, places_Q, None] == of_keys[:, None])

    def _count(self, numbers: slice) -> Tensor:
        return torch.arange(numbers.start, numbers.stop, device=self.device)


def attend_in_windows(
    query_BSND: Tensor,
    key_BSD: Tensor,
    compressed: Tensor | None,
    sinks_N: Tensor,
    sight: WindowSight,
    extend: Extend,
    scale: float,
) -> Tensor:
    """Compute the outputs of heads, [B, S, N, D].

    Args:
        query_BSND: Queries.
        key_BSD: Keys of this rank's tokens.
        compressed: Compressed keys of its pieces; None if there are none.
        sinks_N: A logit without a value in the softmax of each head.
        sight: What queries see.
        extend: Brings what is seen of other ranks.
        scale: Factor of the scores.
    """
    places = sight.compressed
    # Whoever counts what is kept sees the chosen keys as an argument.
    chosen = None if places is None or places.chosen is None else places.chosen.places_BSC
    tensors = query_BSND, key_BSD, compressed, sinks_N, chosen
    out: Tensor = _AttendInWindows.apply(*tensors, sight, extend, scale)
    return out


class _AttendInWindows(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        compressed: Tensor | None,
        sinks: Tensor,
        chosen: Tensor | None,
        sight: WindowSight,
        extend: Extend,
        scale: float,
    ) -> Tensor:
        extended = extend(key, compressed)
        parts = [
            _attend(
                query[:, tile.queries],
                _select_keys(tile, *extended),
                sight.make_mask(tile),
                sinks,
                scale,
            )
            for tile in sight.tiles
        ]
        out, lse = (torch.cat(of_tiles, 1) for of_tiles in zip(*parts, strict=True))
        ctx.save_for_backward(query, key, compressed, out, lse, sinks, chosen)
        ctx.sight, ctx.extend, ctx.scale = sight, extend, scale
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        query, key, compressed, out, lse, sinks, _ = ctx.saved_tensors
        sight, d_out = ctx.sight, gradients[0]
        d_sinks = compute_sinks_gradient(d_out, out, lse.transpose(1, 2), sinks)
        own = [x if x is None else x.detach().requires_grad_() for x in (key, compressed)]
        with torch.enable_grad():
            extended = ctx.extend(*own)
        keys = extended[0].detach()
        more_keys = None if extended[1] is None else extended[1].detach()
        # Tiles share keys. Their gradients are summed in the type of the log-sum-exp, which is at
        # least fp32, and rounded once.
        d_query = torch.empty_like(query, memory_format=torch.contiguous_format)
        d_key = torch.zeros_like(keys, dtype=lse.dtype)
        d_more = None if more_keys is None else torch.zeros_like(more_keys, dtype=lse.dtype)
        for tile in sight.tiles:
            rows = tile.queries
            results = out[:, rows], lse[:, rows]
            of_tile, mask = _select_keys(tile, keys, more_keys), sight.make_mask(tile)
            d_query[:, rows], d_keys = _attend_backward(
                d_out[:, rows], query[:, rows], of_tile, mask, results, ctx.scale
            )
            count = tile.keys.stop - tile.keys.start
            d_key[:, tile.piece, tile.keys] += d_keys[:, :count]
            if d_more is not None:
                d_more[:, : tile.compressed] += d_keys[:, count:]
        more = [] if extended[1] is None else [get_gradient_edge(extended[1])]
        of_more = [] if d_more is None else [d_more.to(key.dtype)]
        backward(extended[0], d_key.to(key.dtype), more, of_more)
        d_own = (x if x is None else x.grad for x in own)
        return d_query, *d_own, d_sinks, None, None, None, None


def _attend(
    query_BQND: Tensor, keys_BKD: Tensor, mask: Tensor, sinks_N: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """Return the outputs of a tile [B, Q, N, D], and the log-sum-exp of each softmax with its logit
    without a value, in at least fp32 [B, Q, N].

    All heads have one key, so those of all queries are rows of one product.
    """
    scores_BQNK = _compute_scores(query_BQND, keys_BKD, mask, scale)
    lse_BQN = torch.logaddexp(scores_BQNK.logsumexp(-1), sinks_N.to(scores_BQNK.dtype))
    shares_BQNK = (scores_BQNK - lse_BQN[..., None]).exp_().to(query_BQND.dtype)
    out = (shares_BQNK.flatten(1, 2) @ keys_BKD).view(query_BQND.shape)
    return out, lse_BQN


def _attend_backward(
    d_out: Tensor,
    query_BQND: Tensor,
    keys_BKD: Tensor,
    mask: Tensor,
    results: tuple[Tensor, Tensor],
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Return the gradients of queries, and of keys as keys and as values.

    With weights p and dp = d_out k^T: ds = scale p (dp - sum(d_out out)), dq = ds k, and dk = ds^T
    q + p^T d_out.
    """
    (out, lse_BQN), dtype = results, query_BQND.dtype
    shares = (_compute_scores(query_BQND, keys_BKD, mask, scale) - lse_BQN[..., None]).exp_()
    d_out, wide = d_out.contiguous().flatten(1, 2), lse_BQN.dtype
    d_shares = (d_out @ keys_BKD.mT).view(shares.shape).to(wide)
    mean = torch.linalg.vecdot(d_out.to(wide), out.flatten(1, 2).to(wide)).view(lse_BQN.shape)
    d_scores = ((d_shares - mean[..., None]) * shares).mul_(scale).to(dtype).flatten(1, 2)
    d_query = (d_scores @ keys_BKD).view(query_BQND.shape)
    shares = shares.to(dtype).flatten(1, 2)
    d_keys = d_scores.mT @ query_BQND.flatten(1, 2) + shares.mT @ d_out
    return d_query, d_keys


def _compute_scores(query_BQND: Tensor, keys_BKD: Tensor, mask: Tensor, scale: float) -> Tensor:
    """Return the scores of heads for keys, -inf where a query does not see one, [B, Q, N, K]."""
    wide = torch.promote_types(query_BQND.dtype, torch.float32)
    products = query_BQND.flatten(1, 2) @ keys_BKD.mT
    scores = products.view(*query_BQND.shape[:3], -1).to(wide) * scale
    return scores.masked_fill_(~mask[..., None, :], -torch.inf)


def _select_keys(tile: _Tile, key_BPTD: Tensor, compressed_BED: Tensor | None) -> Tensor:
    """Return the keys of a tile, [B, K, D]."""
    keys = key_BPTD[:, tile.piece, tile.keys]
    if compressed_BED is None:
        return keys
    return torch.cat((keys, compressed_BED[:, : tile.compressed]), 1)
