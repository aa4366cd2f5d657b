"""Ring attention: ranks that divide a sequence pass keys and values round (Liu et al. 2023).

Each rank keeps its queries. While it works on the keys and values of one rank, those of the next
are already on their way to it. Backward sends them round once more, and with them their gradients,
to which each rank adds before they come home; nothing is kept but what a rank had to begin with,
the output, and one log-sum-exp a query. Which tiles there are follows from the division in zigzag
(`microbatch.zigzag`): rank r of R has pieces r and 2R - 1 - r of 2R, so under a causal mask all
ranks compute equally much, and all but a rank's own tile are rectangles that need no mask.

Ranks behind r see nothing of its second piece. So keys go backwards, to the ranks before r first,
and then only half of them go on; gradients of keys go forwards, and begin with half.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from megaframe.comm import Ring, pass_on
from megaframe.kernels import NO_KERNELS, Kernels
from megaframe.nn.among import spans_of, tile_backward_by_kernel, tile_by_kernel
from megaframe.nn.tiles import Sight, Tile, attend, attend_backward, merge

if TYPE_CHECKING:
    from megaframe_kernels.spans import Spans

_HALVES = {(0,): (0, 1), (1,): (1, 2), (0, 1): (0, 2)}
"""First and last end of the pieces of a rank that follow one another, in pieces."""


DocumentEnds = list[list[list[int]]]
"""Least and greatest document number of each piece of each sample."""


def document_ends(documents_BS: Tensor | None, length: int) -> DocumentEnds | None:
    """Of samples whose pieces are half of `length` tokens; None where there are no documents. Waits
    for the device, so it is asked once for circles of all windows."""
    if documents_BS is None:
        return None
    pieces = documents_BS.unflatten(1, (-1, length // 2))
    return torch.stack((pieces.amin(-1), pieces.amax(-1)), -1).tolist()


class Circle:
    """What this rank computes of samples that a ring divides. length: tokens of a sample that each
    rank has, two pieces. ends: those of the sight's documents."""

    def __init__(
        self,
        ring: Ring,
        length: int,
        sight: Sight,
        ends: DocumentEnds | None,
        kernels: Kernels = NO_KERNELS,
    ) -> None:
        self.ring, self.sight, self.kernels = ring, sight, kernels
        self._found: dict[tuple[Tile, int], Spans] = {}
        self.length, self.piece = length, length // 2
        self._ends = ends
        self._window = sight.window or length * ring.size
        self._tiles = [self._find_tiles(there) for there in range(ring.size)]

    def tiles(self, there: int) -> Sequence[Tile]:
        """What there is to compute with the keys of ring rank `there`, of whose tokens those are;
        nothing that nobody sees."""
        return self._tiles[there]

    def seen_by(self, there: int, ranks: Iterable[int]) -> int:
        """How many of the tokens of ring rank `there`, from the first on, these ranks may see."""
        return self.length if any(rank < there for rank in ranks) else self.piece

    def mask(self, tile: Tile, there: int, device: torch.device) -> Tensor | None:
        """The mask of a tile, made anew each time: kept ones would be quadratic in the length."""
        if tile.kind != "masked":
            return None
        queries = self._places(self.ring.index, device)[tile.queries]
        return self.sight.mask(queries, self._places(there, device)[tile.keys])

    def spans(self, tile: Tile, there: int, batch: int, device: torch.device) -> Spans:
        """The mask of a tile as runs of keys, linear in the length; kept for all blocks."""
        if (tile, there) not in self._found:
            queries = self._places(self.ring.index, device)[tile.queries]
            keys = self._places(there, device)[tile.keys]
            sight = self.sight if tile.kind == "masked" else Sight(None, None)
            causal = tile.kind != "all"
            self._found[tile, there] = spans_of(sight, batch, queries, keys, causal=causal)
        return self._found[tile, there]

    def attend(
        self, tile: Tile, there: int, query: Tensor, key: Tensor, value: Tensor, scale: float
    ) -> tuple[Tensor, Tensor]:
        """A tile, as `tiles.attend` has it."""

        def spans() -> Spans:
            return self.spans(tile, there, query.shape[0], query.device)

        made = tile_by_kernel(self.kernels, query, key, value, spans, scale)
        if made is not None:
            return made
        mask, causal = self.mask(tile, there, query.device), tile.kind == "causal"
        return attend(query, key, value, mask, causal=causal, scale=scale)

    def attend_backward(
        self, tile: Tile, there: int, d_out: Tensor, *rest: Tensor, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """What it adds to gradients, as `tiles.attend_backward` has it."""
        device = d_out.device

        def spans() -> Spans:
            return self.spans(tile, there, d_out.shape[0], device)

        query, key, value, out, lse = rest
        given = (d_out, query, key, value, out, lse)
        made = tile_backward_by_kernel(self.kernels, *given, spans, scale)
        if made is not None:
            return made
        mask, causal = self.mask(tile, there, device), tile.kind == "causal"
        return attend_backward(*given, mask, causal=causal, scale=scale)

    def _places(self, rank: int, device: torch.device) -> Tensor:
        """Where in the sample the tokens of a ring rank are."""
        within = torch.arange(self.piece, device=device)
        return torch.cat([number * self.piece + within for number in self._pieces(rank)])

    def _pieces(self, rank: int) -> tuple[int, int]:
        return rank, 2 * self.ring.size - 1 - rank

    def _find_tiles(self, there: int) -> list[Tile]:
        here = self.ring.index
        if here == there and not self.sight.narrow:
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
        """How much of a piece of keys a piece of queries sees, by their numbers in the sample."""
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
    circle: Circle,
    scale: float | None = None,
) -> Tensor:
    """Attention of this rank's queries to the keys of all ranks of the ring, [B, S, N, V]. scale:
    of the scores, by default 1 / sqrt(D)."""
    if scale is None:
        scale = 1.0 / math.sqrt(query_BSND.shape[3])
    kv = torch.cat((key_BSGD, value_BSGV), -1)
    return _RingAttention.apply(query_BSND, kv, circle, scale)


class _RingAttention(torch.autograd.Function):
    """Keys and values go round side by side, [B, S, G, D + V]."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, kv: Tensor, circle: Circle, scale: float) -> Tensor:
        batch, length, heads, width = query.shape
        wide = torch.promote_types(query.dtype, torch.float32)
        out = query.new_zeros((batch, length, heads, kv.shape[3] - width), dtype=wide)
        lse = out.new_full((batch, heads, length), -math.inf)
        for there, _, visiting in _around(kv, circle, back=True):
            for tile in circle.tiles(there):
                rows = tile.queries
                key, value = _halves(visiting[:, tile.keys], width)
                part = circle.attend(tile, there, query[:, rows], key, value, scale)
                merge(out[:, rows], lse[:, :, rows], *part)
        out = out.to(query.dtype)
        ctx.save_for_backward(query, kv, out, lse)
        ctx.circle, ctx.scale = circle, scale
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None, None]:
        query, kv, out, lse = ctx.saved_tensors
        circle, d_out, width = ctx.circle, gradients[0], query.shape[3]
        d_query = torch.zeros_like(query, dtype=lse.dtype, memory_format=torch.contiguous_format)
        own, coming = kv.new_empty(0), None
        for there, step, visiting in _around(kv, circle, back=False):
            d_kv = _room(kv, _added(circle, there, step) if step else circle.length, lse.dtype)
            d_kv.zero_()
            for tile in circle.tiles(there):
                rows = tile.queries
                d_rows, d_key, d_value = circle.attend_backward(
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
                before = (there - 1) % circle.ring.size
                into = _room(kv, _added(circle, before, step), lse.dtype)
                coming = pass_on(d_kv, into, circle.ring)
            else:
                own = d_kv
        assert coming is not None
        _add(coming.wait(), own)
        return d_query.to(query.dtype), own.to(kv.dtype), None, None


def _halves(kv: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Views of the keys, of so many dims, and of the values behind them."""
    return kv[..., :width], kv[..., width:]


def _around(kv: Tensor, circle: Circle, *, back: bool) -> Iterator[tuple[int, int, Tensor]]:
    """Each rank of the ring with the step and its keys and values, as far as this rank or any that
    they still go to may see them: this one, then those before it one by one, or with `back` those
    behind it. Its own come first, with which every query sees itself, so that no sum of
    exponentials is 0."""
    ring, way = circle.ring, -1 if back else 1
    size = ring.size

    def left(there: int, step: int) -> int:
        ahead = ((there + way * i) % size for i in range(step, size))
        return circle.seen_by(there, ahead)

    for step in range(size):
        there, after = ((ring.index - way * i) % size for i in (step, step + 1))
        coming = None
        if step + 1 < size:
            into = _room(kv, left(after, step + 1), kv.dtype)
            coming = pass_on(kv[:, : left(there, step + 1)], into, ring, back=back)
        yield there, step, kv
        if coming is not None:
            kv = coming.wait()


def _added(circle: Circle, there: int, step: int) -> int:
    """Of how many tokens of ring rank `there` the ranks behind it, as far as `step` of them, have
    gradients."""
    size = circle.ring.size
    return circle.seen_by(there, ((there + i) % size for i in range(1, step + 1)))


def _room(kv: Tensor, tokens: int, dtype: torch.dtype) -> Tensor:
    """For the keys and values of so many tokens, or their gradients."""
    return kv.new_empty((kv.shape[0], tokens, *kv.shape[2:]), dtype=dtype)


def _add(part: Tensor, whole: Tensor) -> None:
    """To the first tokens."""
    whole[:, : part.shape[1]] += part
