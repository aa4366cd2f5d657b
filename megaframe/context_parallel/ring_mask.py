"""What a rank of a ring computes: its tiles, and who sees what in them.

The tiles follow from the zigzag division (`microbatch.divide_zigzag`): rank r of R has pieces r and
2R - 1 - r of 2R. Under a causal mask all ranks therefore compute the same amount, and all tiles
except those of a rank's own keys are rectangles that need no mask.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from copy import copy
from dataclasses import replace
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from megaframe.distributed.collectives import Ring
from megaframe.ops.attention_kernel import attend_tile_backward_by_kernel, attend_tile_by_kernel
from megaframe.ops.attention_mask import AttentionMask, ChosenKeys, Tile, make_spans
from megaframe.ops.attention_tiles import attend, attend_backward
from megaframe.ops.kernel_dispatch import NO_KERNELS, Kernels

if TYPE_CHECKING:
    from megaframe_kernels.attention.spans import Spans

_HALVES = {(0,): (0, 1), (1,): (1, 2), (0, 1): (0, 2)}
"""{adjacent pieces of a rank: where they start and end, in pieces}."""


DocumentEnds = list[list[list[int]]]
"""Least and greatest document number, by sample and piece."""


def find_document_ends(documents_BS: Tensor | None, length: int) -> DocumentEnds | None:
    """Return the document numbers at which the pieces of samples begin and end. This waits for the
    device, so it is called once for the rings of all windows.

    Args:
        documents_BS: Document number of each token of whole samples; None without documents.
        length: Tokens of two pieces.

    Returns:
        Least and greatest number by sample and piece, or None without documents.
    """
    if documents_BS is None:
        return None
    pieces = documents_BS.unflatten(1, (-1, length // 2))
    return torch.stack((pieces.amin(-1), pieces.amax(-1)), -1).tolist()


class RingMask:
    """What this rank computes of samples that are divided over a ring."""

    def __init__(
        self,
        ring: Ring,
        length: int,
        mask: AttentionMask,
        ends: DocumentEnds | None,
        kernels: Kernels = NO_KERNELS,
    ) -> None:
        """Find the tiles of this rank.

        Args:
            ring: The ranks that divide samples.
            length: Tokens of a sample on each rank, two pieces.
            mask: What tokens of whole samples attend to.
            ends: `find_document_ends` of the mask's documents.
            kernels: The kernels of the run.
        """
        self.ring, self.attention_mask, self.kernels = ring, mask, kernels
        self._spans: dict[tuple[Tile, int], Spans] = {}
        self.length, self.piece = length, length // 2
        self._ends = ends
        self._window = mask.window or length * ring.size
        self._tiles = [self._make_tiles(source) for source in range(ring.size)]
        self.chosen: ChosenKeys | None = None

    def choose(self, chosen: ChosenKeys) -> RingMask:
        """Return the mask of tokens that see no other keys than these."""
        other = copy(self)
        other.chosen = chosen
        other._tiles = [[replace(tile, kind="masked") for tile in tiles] for tiles in self._tiles]
        return other

    def get_tiles(self, source: int) -> Sequence[Tile]:
        """Return the tiles of this rank's queries against the keys of ring rank `source`. A tile's
        keys are indices into that rank's tokens. Pairs of pieces that are hidden completely are
        left out."""
        return self._tiles[source]

    def count_tokens_seen(self, source: int, ranks: Iterable[int]) -> int:
        """Return how many tokens of ring rank `source`, counted from its first, any of these ranks
        may see."""
        # Ranks before `source` see both of its pieces. Ranks after it have queries between the two,
        # and see nothing of the second one.
        return self.length if any(rank < source for rank in ranks) else self.piece

    def make_dense_tile(self, tile: Tile, source: int, device: torch.device) -> Tensor | None:
        """Return the mask of a tile, or None if the tile is not masked. It is made anew on each
        call, because keeping the masks would take memory quadratic in the length.

        Args:
            tile: A tile of the ring.
            source: The ring rank that has its keys.
            device: Where the mask is made.
        """
        if tile.kind != "masked":
            return None
        queries = self._compute_positions(self.ring.index, device)[tile.queries]
        keys = self._compute_positions(source, device)[tile.keys]
        chosen = None if self.chosen is None else self.chosen.mark(tile.queries, keys)
        return self.attention_mask.make_dense(queries, keys, chosen)

    def get_spans(self, tile: Tile, source: int, batch: int, device: torch.device) -> Spans:
        """Return what the queries of a tile see, as spans, which are kept for all blocks.

        Args:
            tile: One of `get_tiles(source)`.
            source: Ring rank that has the keys.
            batch: Number of samples.
            device: Device of the spans.
        """
        if (tile, source) not in self._spans:
            queries = self._compute_positions(self.ring.index, device)[tile.queries]
            keys = self._compute_positions(source, device)[tile.keys]
            mask = self.attention_mask if tile.kind == "masked" else AttentionMask(None, None)
            causal = tile.kind != "all"
            self._spans[tile, source] = make_spans(mask, batch, queries, keys, causal=causal)
        return self._spans[tile, source]

    def attend(
        self,
        tile: Tile,
        source: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float,
        softcap: float | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Compute a tile like `attention_tiles.attend`, by a kernel if one takes it.

        Args:
            tile: A tile of the ring.
            source: The ring rank that has its keys.
            query: The tile's queries, [B, Q, N, D].
            key: Its keys, [B, K, G, D].
            value: Its values, [B, K, G, V].
            scale: Of the scores.
            softcap: Bound of the scores; None for no bound.

        Returns:
            The outputs of the tile alone, [B, Q, N, V], and their log-sum-exps, [B, N, Q].
        """

        def make_tile_spans() -> Spans:
            return self.get_spans(tile, source, query.shape[0], query.device)

        operands, kernels = (query, key, value), self._kernels_of_spans
        by_kernel = attend_tile_by_kernel(kernels, *operands, make_tile_spans, scale, softcap)
        if by_kernel is not None:
            return by_kernel
        mask, causal = self.make_dense_tile(tile, source, query.device), tile.kind == "causal"
        return attend(query, key, value, mask, causal=causal, scale=scale, softcap=softcap)

    def attend_backward(
        self,
        tile: Tile,
        source: int,
        d_out: Tensor,
        *operands: Tensor,
        scale: float,
        softcap: float | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Compute the gradients of a tile like `attention_tiles.attend_backward`, by a kernel if
        one takes it.

        Args:
            tile: A tile of the ring.
            source: The ring rank that has its keys.
            d_out: Gradient of its outputs, [B, Q, N, V].
            operands: Query, key, value, out and log-sum-exp.
            scale: Of the scores.
            softcap: Bound of the scores; None for no bound.

        Returns:
            The gradients of query, key and value.
        """
        device = d_out.device

        def make_tile_spans() -> Spans:
            return self.get_spans(tile, source, d_out.shape[0], device)

        query, key, value, out, lse = operands
        operands = (d_out, query, key, value, out, lse)
        by_kernel = attend_tile_backward_by_kernel(
            self._kernels_of_spans, *operands, make_tile_spans, scale, softcap
        )
        if by_kernel is not None:
            return by_kernel
        mask, causal = self.make_dense_tile(tile, source, device), tile.kind == "causal"
        return attend_backward(*operands, mask, causal=causal, scale=scale, softcap=softcap)

    @property
    def _kernels_of_spans(self) -> Kernels:
        """The kernels, none if chosen keys are no spans."""
        return self.kernels if self.chosen is None else NO_KERNELS

    def _compute_positions(self, rank: int, device: torch.device) -> Tensor:
        """Return where in the sample the tokens of a ring rank are."""
        within = torch.arange(self.piece, device=device)
        return torch.cat([number * self.piece + within for number in self._list_pieces(rank)])

    def _list_pieces(self, rank: int) -> tuple[int, int]:
        return rank, 2 * self.ring.size - 1 - rank

    def _make_tiles(self, source: int) -> list[Tile]:
        own_index = self.ring.index
        if own_index == source and not self.attention_mask.narrow:
            # Both pieces at once: the order of its own tokens is the order of the sample.
            return [Tile(self._slice_pieces((0, 1)), self._slice_pieces((0, 1)), "causal")]
        visibility = [
            [self._find_visibility(query, key) for key in self._list_pieces(source)]
            for query in self._list_pieces(own_index)
        ]
        keys = [tuple(k for k in (0, 1) if row[k] != "nothing") for row in visibility]
        # One tile where both pieces of queries see the same keys: a larger product, and one merge.
        rows: list[tuple[int, ...]] = [(0, 1)] if keys[0] == keys[1] else [(0,), (1,)]
        return [
            Tile(
                self._slice_pieces(row),
                self._slice_pieces(keys[row[0]]),
                "all" if all(visibility[q][k] == "all" for q in row for k in keys[q]) else "masked",
            )
            for row in rows
            if keys[row[0]]
        ]

    def _slice_pieces(self, pieces: tuple[int, ...]) -> slice:
        start, stop = _HALVES[pieces]
        return slice(start * self.piece, stop * self.piece)

    def _find_visibility(self, query: int, key: int) -> Literal["all", "some", "nothing"]:
        """Return how much of piece `key` piece `query` sees. Both are numbers of pieces in the
        sample."""
        # Tokens between the starts of the pieces. Distances of single tokens lie within `last` of
        # it.
        distance, last = (query - key) * self.piece, self.piece - 1
        if distance < 0 or distance - last >= self._window:
            return "nothing"
        everything = distance > 0 and distance + last < self._window
        if self._ends is not None:
            pairs = [(sample[query], sample[key]) for sample in self._ends]
            # No document number in common, in any sample of the microbatch.
            if all(q[1] < k[0] or k[1] < q[0] for q, k in pairs):
                return "nothing"
            # Both pieces lie in one and the same document.
            everything &= all(q == k and k[0] == k[1] for q, k in pairs)
        return "all" if everything else "some"
