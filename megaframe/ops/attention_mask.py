"""Which tokens attend to which: as a rule, as tiles of queries and keys, as bool masks and as spans
of keys.

A kernel is told what queries see as spans of keys, which take two numbers per token. Plain code
uses a mask, which is quadratic in the length. Both are made on first use and then kept for all
layers, except the masks of single tiles.

Shape legend: B samples, S tokens, Q queries, K keys.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

if TYPE_CHECKING:
    from megaframe_kernels.attention.spans import Spans

_QUERIES_PER_TILE = 128
"""Queries per masked tile on a CPU. Fewer queries waste less work on hidden keys; more queries make
faster products."""


@dataclass(frozen=True)
class AttentionMask:
    """Which keys of its sample a query sees: itself and the tokens before it.

    Attributes:
        window: At most so many tokens, with the query's own; None for all.
        documents_BS: If given, only tokens with the same document number.
    """

    window: int | None
    documents_BS: Tensor | None

    @property
    def narrow(self) -> bool:
        """Whether a query may not see everything before it."""
        return self.window is not None or self.documents_BS is not None

    def make_dense(
        self, queries_Q: Tensor, keys_K: Tensor, chosen_BQK: Tensor | None = None
    ) -> Tensor:
        """Return the bool mask of queries and keys at these places in the sample: [Q, K], or with
        documents or chosen keys [B, 1, Q, K].

        Args:
            queries_Q: Places of the queries.
            keys_K: Places of the keys.
            chosen_BQK: Which of the keys each query may see; None for all.
        """
        distance = queries_Q[:, None] - keys_K[None, :]
        # Causal: a query sees itself and what is before it.
        mask = distance >= 0
        if self.window is not None:
            mask &= distance < self.window
        if self.documents_BS is not None:
            documents = self.documents_BS
            mask = mask & (documents[:, queries_Q, None] == documents[:, None, keys_K])
        if chosen_BQK is not None:
            mask = mask & chosen_BQK
        # The dim of size 1 broadcasts over heads.
        return mask if mask.dim() == 2 else mask[:, None]


@dataclass(frozen=True, eq=False)
class ChosenKeys:
    """The only keys that each query of a rank may see, if it sees them at all.

    Attributes:
        places_BSC: Their places in the sample, int32; in any order.
        length: Tokens of a sample.
    """

    places_BSC: Tensor
    length: int

    def mark(self, queries: slice, keys_K: Tensor) -> Tensor:
        """Return which of the keys at these places some of the queries may see, bool [B, Q, K]. It
        is made anew on each call, because keeping it would take memory quadratic in the length."""
        places_BQC = self.places_BSC[:, queries].long()
        marked = places_BQC.new_zeros((*places_BQC.shape[:2], self.length), dtype=torch.bool)
        return marked.scatter_(2, places_BQC, True)[..., keys_K]

    def number_rows(self, mask: AttentionMask, queries_S: Tensor) -> Tensor:
        """Return the places among the tokens of all samples, one after the other, int32 [B * S, C];
        -1 for what a query does not see.

        Args:
            mask: What queries see otherwise.
            queries_S: Places of the queries in their samples.
        """
        places_BSC, documents_BS = self.places_BSC, mask.documents_BS
        distance = queries_S[:, None] - places_BSC
        seen = distance >= 0
        if mask.window is not None:
            seen &= distance < mask.window
        if documents_BS is not None:
            of_keys = documents_BS.gather(1, places_BSC.flatten(1).long()).view_as(places_BSC)
            seen &= of_keys == documents_BS[:, queries_S, None]
        first_B = torch.arange(len(places_BSC), device=seen.device, dtype=torch.int32) * self.length
        return torch.where(seen, places_BSC + first_B[:, None, None], -1).flatten(0, 1)


def number_chunks(
    size: int, documents_BS: Tensor | None, batch: int, length: int, device: torch.device
) -> Tensor:
    """Return which chunk each token of whole samples is in, ascending along each, int64 [B, S].

    Args:
        size: Tokens of a chunk; the last one of a sample or document may have fewer.
        documents_BS: Document numbers, at whose beginnings chunks begin; None without documents.
        batch: Number of samples.
        length: Their tokens.
        device: Where the numbers are made.
    """
    places_S = torch.arange(length, device=device)
    if documents_BS is None:
        return (places_S // size).expand(batch, length)
    # The first of a document is unlike the token before it; the places of these, filled forwards.
    begins_BS = F.pad(documents_BS[:, 1:] != documents_BS[:, :-1], (1, 0), value=True)
    first_BS = (places_S * begins_BS).cummax(1).values
    return ((places_S - first_BS) % size == 0).cumsum(1)


@dataclass(frozen=True, eq=False)
class Tile:
    """Some queries against some keys.

    Attributes:
        queries: Slice of the query tensor.
        keys: Slice of the key tensor.
        kind: Whether queries see all of these keys, only those up to themselves, or what a mask
            says.
    """

    queries: slice
    keys: slice
    kind: Literal["all", "causal", "masked"]


@dataclass(frozen=True)
class SequenceMask:
    """Which tokens of `batch` whole samples of `length` tokens each other token attends to.

    Attributes:
        chosen: The keys that each token may see at most; None for all.
    """

    attention_mask: AttentionMask
    batch: int
    length: int
    device: torch.device
    chosen: ChosenKeys | None = None

    @property
    def narrow(self) -> bool:
        """Whether a token may not see everything before it."""
        return self.attention_mask.narrow or self.chosen is not None

    def choose(self, chosen: ChosenKeys) -> SequenceMask:
        """Return the mask of tokens that see no other keys than these."""
        return replace(self, chosen=chosen)

    @cached_property
    def dense(self) -> Tensor | None:
        """Bool mask [S, S] or [B, 1, S, S], true where a query (row) may see a key; None if plainly
        causal."""
        if not self.narrow:
            return None
        everything = slice(0, self.length)
        return self.make_dense_tile(Tile(everything, everything, "masked"))

    @cached_property
    def tiles(self) -> list[Tile]:
        """Tiles that cover all visible query-key pairs. If queries see everything before them,
        there is one causal tile; otherwise there is one masked tile per `_QUERIES_PER_TILE`
        queries, limited to the keys that any of them may see."""
        if not self.narrow:
            return [Tile(slice(0, self.length), slice(0, self.length), "causal")]
        reach = self.attention_mask.window or self.length
        # Without a window the keys of a tile still end at its last query, which about halves the
        # work.
        starts = range(0, self.length, _QUERIES_PER_TILE)
        ends = ((start, min(start + _QUERIES_PER_TILE, self.length)) for start in starts)
        return [
            # The first query sees the furthest back, `reach` tokens with its own.
            Tile(slice(start, end), slice(max(0, start - reach + 1), end), "masked")
            for start, end in ends
        ]

    def make_dense_tile(self, tile: Tile) -> Tensor | None:
        """Return the mask of a tile, or None if the tile is not masked. It is made anew on each
        call, because keeping the masks would take memory quadratic in the length."""
        if tile.kind != "masked":
            return None
        queries, keys = (
            torch.arange(s.start, s.stop, device=self.device) for s in (tile.queries, tile.keys)
        )
        chosen = None if self.chosen is None else self.chosen.mark(tile.queries, keys)
        return self.attention_mask.make_dense(queries, keys, chosen)

    @cached_property
    def spans(self) -> Spans:
        """What every query sees, as spans of keys for the kernels."""
        places = torch.arange(self.length, device=self.device)
        if self.attention_mask.documents_BS is None:
            return make_spans(self.attention_mask, self.batch, places, None)
        return make_spans(self.attention_mask, self.batch, places, places)


def make_spans(
    mask: AttentionMask, batch: int, queries: Tensor, keys: Tensor | None, *, causal: bool = True
) -> Spans:
    """Return the keys that queries see, as spans.

    Args:
        mask: The rule.
        batch: Number of samples.
        queries: Ascending places of the queries in their samples, [Q].
        keys: The same of the keys, [K]. With None, queries and keys are both whole samples, and
            documents are ignored.
        causal: A query sees no key after it.
    """
    # Imported here, since plain code runs without the library of kernels.
    from megaframe_kernels.attention.spans import find_spans

    documents, device = mask.documents_BS, queries.device
    if keys is None:
        size = len(queries)
        return find_spans(batch, size, size, device, causal=causal, window=mask.window)
    return find_spans(
        batch,
        len(queries),
        len(keys),
        device,
        causal=causal,
        window=mask.window,
        query_places=queries,
        key_places=keys,
        query_documents=None if documents is None else documents[:, queries],
        key_documents=None if documents is None else documents[:, keys],
    )
