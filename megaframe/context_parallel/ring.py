"""Ring attention: ranks that divide a sequence pass keys and values around (Liu et al. 2023).

Each rank keeps its queries. While it works on the keys and values of one rank, those of the next
one are already in transit. The backward pass sends them around again together with their gradients,
to which each rank adds its part before they return to their owner. A rank keeps only its own
queries, keys and values, the output, and one log-sum-exp per query. The tiles follow from the
zigzag division (`microbatch.zigzag`): rank r of R has pieces r and 2R - 1 - r of 2R. Under a causal
mask all ranks therefore compute the same amount, and all tiles except those of a rank's own keys
are rectangles that need no mask.

Ranks after r see nothing of r's second piece. Keys therefore travel backwards, first to the ranks
before r, and after these only their first half travels on. Gradients of keys travel forwards, and
begin with the first half.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from megaframe.distributed.collectives import Ring, shift_ring
from megaframe.ops.attention_tiles import AttentionMask, Tile, attend, attend_backward, merge
from megaframe.ops.kernel_dispatch import NO_KERNELS, Kernels
from megaframe.ops.local_attention import spans_of, tile_backward_by_kernel, tile_by_kernel

if TYPE_CHECKING:
    from megaframe_kernels.attention.spans import Spans

_HALVES = {(0,): (0, 1), (1,): (1, 2), (0, 1): (0, 2)}
"""{adjacent pieces of a rank: where they start and end, in pieces}."""


DocumentEnds = list[list[list[int]]]
"""Least and greatest document number, by sample and piece."""


def document_ends(documents_BS: Tensor | None, length: int) -> DocumentEnds | None:
    """Return the document numbers at which the pieces of samples begin and end, or None without
    documents. length: tokens of two pieces. This waits for the device, so it is called once for the
    circles of all windows."""
    if documents_BS is None:
        return None
    pieces = documents_BS.unflatten(1, (-1, length // 2))
    return torch.stack((pieces.amin(-1), pieces.amax(-1)), -1).tolist()


class RingMask:
    """What this rank computes of samples that are divided over a ring.

    length: tokens of a sample on each rank, two pieces. ends: `document_ends` of the mask's
    documents.
    """

    def __init__(
        self,
        ring: Ring,
        length: int,
        mask: AttentionMask,
        ends: DocumentEnds | None,
        kernels: Kernels = NO_KERNELS,
    ) -> None:
        self.ring, self.attention_mask, self.kernels = ring, mask, kernels
        self._found: dict[tuple[Tile, int], Spans] = {}
        self.length, self.piece = length, length // 2
        self._ends = ends
        self._window = mask.window or length * ring.size
        self._tiles = [self._find_tiles(there) for there in range(ring.size)]

    def tiles(self, there: int) -> Sequence[Tile]:
        """Return the tiles of this rank's queries against the keys of ring rank `there`. A tile's
        keys are indices into that rank's tokens. Pairs of pieces that are hidden completely are
        left out."""
        return self._tiles[there]

    def seen_by(self, there: int, ranks: Iterable[int]) -> int:
        """Return how many tokens of ring rank `there`, counted from its first, any of these ranks
        may see."""
        return self.length if any(rank < there for rank in ranks) else self.piece

    def dense_tile(self, tile: Tile, there: int, device: torch.device) -> Tensor | None:
        """Return the mask of a tile, or None if the tile is not masked. It is made anew on each
        call, because keeping the masks would take memory quadratic in the length."""
        if tile.kind != "masked":
            return None
        queries = self._places(self.ring.index, device)[tile.queries]
        return self.attention_mask.dense(queries, self._places(there, device)[tile.keys])

    def spans(self, tile: Tile, there: int, batch: int, device: torch.device) -> Spans:
        """Return what the queries of a tile see, as spans. They are linear in the length, and kept
        for all blocks."""
        if (tile, there) not in self._found:
            queries = self._places(self.ring.index, device)[tile.queries]
            keys = self._places(there, device)[tile.keys]
            mask = self.attention_mask if tile.kind == "masked" else AttentionMask(None, None)
            causal = tile.kind != "all"
            self._found[tile, there] = spans_of(mask, batch, queries, keys, causal=causal)
        return self._found[tile, there]

    def attend(
        self, tile: Tile, there: int, query: Tensor, key: Tensor, value: Tensor, scale: float
    ) -> tuple[Tensor, Tensor]:
        """Compute a tile like `tiles.attend`, by a kernel if one takes it."""

        def spans() -> Spans:
            return self.spans(tile, there, query.shape[0], query.device)

        made = tile_by_kernel(self.kernels, query, key, value, spans, scale)
        if made is not None:
            return made
        mask, causal = self.dense_tile(tile, there, query.device), tile.kind == "causal"
        return attend(query, key, value, mask, causal=causal, scale=scale)

    def attend_backward(
        self, tile: Tile, there: int, d_out: Tensor, *rest: Tensor, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Compute the gradients of a tile like `tiles.attend_backward`, by a kernel if one takes
        it. rest: query, key, value, out and log-sum-exp."""
        device = d_out.device

        def spans() -> Spans:
            return self.spans(tile, there, d_out.shape[0], device)

        query, key, value, out, lse = rest
        given = (d_out, query, key, value, out, lse)
        made = tile_backward_by_kernel(self.kernels, *given, spans, scale)
        if made is not None:
            return made
        mask, causal = self.dense_tile(tile, there, device), tile.kind == "causal"
        return attend_backward(*given, mask, causal=causal, scale=scale)

    def _places(self, rank: int, device: torch.device) -> Tensor:
        """Return where in the sample the tokens of a ring rank are."""
        within = torch.arange(self.piece, device=device)
        return torch.cat([number * self.piece + within for number in self._pieces(rank)])

    def _pieces(self, rank: int) -> tuple[int, int]:
        return rank, 2 * self.ring.size - 1 - rank

    def _find_tiles(self, there: int) -> list[Tile]:
        here = self.ring.index
        if here == there and not self.attention_mask.narrow:
            return [Tile(self._slice((0, 1)), self._slice((0, 1)), "causal")]
        seen = [
            [self._seen(query, key) for key in self._pieces(there)] for query in self._pieces(here)
        ]
        keys = [tuple(k for k in (0, 1) if row[k] != "nothing") for row in seen]
        rows: list[tuple[int, ...]] = [(0, 1)] if keys[0] == keys[1] else [(0,), (1,)]
        return [
            Tile(
                self._slice(row),
                self._slice(keys[row[0]]),
                "all" if all(seen[q][k] == "all" for q in row for k in keys[q]) else "masked",
            )
            for row in rows
            if keys[row[0]]
        ]

    def _slice(self, pieces: tuple[int, ...]) -> slice:
        start, stop = _HALVES[pieces]
        return slice(start * self.piece, stop * self.piece)

    def _seen(self, query: int, key: int) -> Literal["all", "some", "nothing"]:
        """Return how much of piece `key` piece `query` sees. Both are numbers of pieces in the
        sample."""
        apart, most = (query - key) * self.piece, self.piece - 1
        if apart < 0 or apart - most >= self._window:
            return "nothing"
        everything = apart > 0 and apart + most < self._window
        if self._ends is not None:
            pairs = [(sample[query], sample[key]) for sample in self._ends]
            if all(q[1] < k[0] or k[1] < q[0] for q, k in pairs):
                return "nothing"
            everything &= all(q == k and k[0] == k[1] for q, k in pairs)
        return "all" if everything else "some"


def ring_attention(
    query_BSND: Tensor,
    key_BSGD: Tensor,
    value_BSGV: Tensor,
    mask: RingMask,
    scale: float | None = None,
) -> Tensor:
    """Attend from this rank's queries to the keys of all ranks of the ring; returns [B, S, N, V].
    scale: of the scores, by default 1 / sqrt(D)."""
    if scale is None:
        scale = 1.0 / math.sqrt(query_BSND.shape[3])
    kv = torch.cat((key_BSGD, value_BSGV), -1)
    return _RingAttention.apply(query_BSND, kv, mask, scale)


class _RingAttention(torch.autograd.Function):
    """Ring attention. Keys and values travel as one tensor [B, S, G, D + V]."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, kv: Tensor, mask: RingMask, scale: float) -> Tensor:
        batch, length, heads, width = query.shape
        wide = torch.promote_types(query.dtype, torch.float32)
        out = query.new_zeros((batch, length, heads, kv.shape[3] - width), dtype=wide)
        lse = out.new_full((batch, heads, length), -math.inf)
        for there, _, visiting in _around(kv, mask, back=True):
            for tile in mask.tiles(there):
                rows = tile.queries
                key, value = _halves(visiting[:, tile.keys], width)
                part = mask.attend(tile, there, query[:, rows], key, value, scale)
                merge(out[:, rows], lse[:, :, rows], *part)
        out = out.to(query.dtype)
        ctx.save_for_backward(query, kv, out, lse)
        ctx.mask, ctx.scale = mask, scale
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None, None]:
        query, kv, out, lse = ctx.saved_tensors
        mask, d_out, width = ctx.mask, gradients[0], query.shape[3]
        d_query = torch.zeros_like(query, dtype=lse.dtype, memory_format=torch.contiguous_format)
        own, coming = kv.new_empty(0), None
        for there, step, visiting in _around(kv, mask, back=False):
            d_kv = _room(kv, _added(mask, there, step) if step else mask.length, lse.dtype)
            d_kv.zero_()
            for tile in mask.tiles(there):
                rows = tile.queries
                d_rows, d_key, d_value = mask.attend_backward(
                    tile,
                    there,
                    d_out[:, rows],
                    query[:, rows],
                    *_halves(visiting[:, tile.keys], width),
                    out[:, rows],
                    lse[:, :, rows],
                    scale=ctx.scale,
                )
                d_query[:, rows] += d_rows
                into_key, into_value = _halves(d_kv[:, tile.keys], width)
                into_key += d_key
                into_value += d_value
            if coming is not None:
                _add(coming.wait(), d_kv)
            if step:
                before = (there - 1) % mask.ring.size
                into = _room(kv, _added(mask, before, step), lse.dtype)
                coming = shift_ring(d_kv, into, mask.ring)
            else:
                own = d_kv
        assert coming is not None
        _add(coming.wait(), own)
        return d_query.to(query.dtype), own.to(kv.dtype), None, None


def _halves(kv: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Return views of the keys (the first `width` dims) and of the values (the rest)."""
    return kv[..., :width], kv[..., width:]


def _around(kv: Tensor, mask: RingMask, *, back: bool) -> Iterator[tuple[int, int, Tensor]]:
    """Yield (ring rank, step, its keys and values) for every rank of the ring, starting with this
    one.

    The ranks before this one follow, nearest first, or with `back` the ranks after it. Only as many
    tokens arrive as this rank, or a rank that they still travel to, may see. A rank's own keys come
    first because every query sees itself, so no sum of exponentials is 0.
    """
    ring, way = mask.ring, -1 if back else 1
    size = ring.size

    def left(there: int, step: int) -> int:
        ahead = ((there + way * i) % size for i in range(step, size))
        return mask.seen_by(there, ahead)

    for step in range(size):
        there, after = ((ring.index - way * i) % size for i in (step, step + 1))
        coming = None
        if step + 1 < size:
            into = _room(kv, left(after, step + 1), kv.dtype)
            coming = shift_ring(kv[:, : left(there, step + 1)], into, ring, back=back)
        yield there, step, kv
        if coming is not None:
            kv = coming.wait()


def _added(mask: RingMask, there: int, step: int) -> int:
    """Return how many tokens of ring rank `there` have gradients from the `step` ranks after it."""
    size = mask.ring.size
    return mask.seen_by(there, ((there + i) % size for i in range(1, step + 1)))


def _room(kv: Tensor, tokens: int, dtype: torch.dtype) -> Tensor:
    """Allocate the keys and values, or their gradients, of this many tokens."""
    return kv.new_empty((kv.shape[0], tokens, *kv.shape[2:]), dtype=dtype)


def _add(part: Tensor, whole: Tensor) -> None:
    """Add `part` to the first tokens of `whole`."""
    whole[:, : part.shape[1]] += part
