"""Ring attention: ranks that divide a sequence pass keys and values around (Liu et al. 2023).

Each rank keeps its queries. While it works on the keys and values of one rank, those of the next
one are already in transit. The backward pass sends them around again together with their gradients,
to which each rank adds its part before they return to their owner. `ring_mask.py` has the tiles.

Shape legend: B samples, S tokens of this rank, N query heads, G key/value heads, D width of a query
or key head, V width of a value head.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from megaframe.context_parallel.ring_mask import RingMask
from megaframe.distributed.collectives import shift_ring
from megaframe.ops.attention_tiles import add_sinks, compute_sinks_gradient, merge


def ring_attention(
    query_BSND: Tensor,
    key_BSGD: Tensor,
    value_BSGV: Tensor,
    mask: RingMask,
    scale: float | None = None,
    softcap: float | None = None,
    sinks_N: Tensor | None = None,
) -> Tensor:
    """Attend from this rank's queries to the keys of all ranks of the ring.

    Args:
        query_BSND: This rank's queries.
        key_BSGD: Its keys.
        value_BSGV: Its values.
        mask: What this rank computes.
        scale: Of the scores, by default 1 / sqrt(D).
        softcap: Bound of the scores; None for no bound.
        sinks_N: A logit without a value in the softmax of each head; None for none.

    Returns:
        The outputs for this rank's queries, [B, S, N, V].
    """
    if scale is None:
        scale = 1.0 / math.sqrt(query_BSND.shape[3])
    # One tensor, so one message per step. Autograd splits its gradient again.
    kv = torch.cat((key_BSGD, value_BSGV), -1)
    return _RingAttention.apply(query_BSND, kv, sinks_N, mask, scale, softcap)


class _RingAttention(torch.autograd.Function):
    """Ring attention. Keys and values travel as one tensor [B, S, G, D + V]."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        kv: Tensor,
        sinks: Tensor | None,
        mask: RingMask,
        scale: float,
        softcap: float | None,
    ) -> Tensor:
        batch, length, heads, width = query.shape
        wide = torch.promote_types(query.dtype, torch.float32)
        # Accumulated in at least fp32 and rounded once, after the last tile.
        out = query.new_zeros((batch, length, heads, kv.shape[3] - width), dtype=wide)
        # The log-sum-exp of no scores; see `attention_tiles.merge`.
        lse = out.new_full((batch, heads, length), -math.inf)
        # Keys travel backwards, first to the ranks before their own, and after these only their
        # first half travels on, because the ranks after see nothing of the second one.
        for source, _, source_kv in _iterate_ring(kv, mask, reverse=True):
            for tile in mask.get_tiles(source):
                rows = tile.queries
                key, value = _split_kv(source_kv[:, tile.keys], width)
                part = mask.attend(tile, source, query[:, rows], key, value, scale, softcap)
                # In place, through views: out = (e^lse out + e^lse' out') / (e^lse + e^lse').
                merge(out[:, rows], lse[:, :, rows], *part)
        if sinks is not None:  # once, after the keys of all ranks
            add_sinks(out, lse, sinks)
        out = out.to(query.dtype)
        # Only this rank's own queries, keys and values, the output, and one log-sum-exp per query.
        # The mask has the chosen keys, too. Here whoever counts what is kept sees them.
        places = None if mask.chosen is None else mask.chosen.places_BSC
        ctx.save_for_backward(query, kv, out, lse, sinks, places)
        ctx.mask, ctx.scale, ctx.softcap = mask, scale, softcap
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        query, kv, out, lse, sinks, _ = ctx.saved_tensors
        mask, d_out, width = ctx.mask, gradients[0], query.shape[3]
        d_sinks = None if sinks is None else compute_sinks_gradient(d_out, out, lse, sinks)
        # Gradients are summed over tiles and ranks in at least fp32, and travel in it.
        d_query = torch.zeros_like(query, dtype=lse.dtype, memory_format=torch.contiguous_format)
        d_own_kv, arriving = kv.new_empty(0), None
        # Keys travel forwards here, as their gradients do: ranks after r add to the first half of
        # r's gradient before ranks before r add to all of it.
        for source, step, source_kv in _iterate_ring(kv, mask, reverse=False):
            d_kv = _allocate_kv(
                kv,
                _count_tokens_with_gradient(mask, source, step) if step else mask.length,
                lse.dtype,
            )
            d_kv.zero_()
            for tile in mask.get_tiles(source):
                rows = tile.queries
                # `out` and `lse` are those over all tiles, so each tile's probabilities are final.
                d_rows, d_key, d_value = mask.attend_backward(
                    tile,
                    source,
                    d_out[:, rows],
                    query[:, rows],
                    *_split_kv(source_kv[:, tile.keys], width),
                    out[:, rows],
                    lse[:, :, rows],
                    scale=ctx.scale,
                    softcap=ctx.softcap,
                )
                d_query[:, rows] += d_rows
                # Views: adding to them adds to `d_kv`.
                into_key, into_value = _split_kv(d_kv[:, tile.keys], width)
                into_key += d_key
                into_value += d_value
            if arriving is not None:
                # What the ranks before added has travelled while this rank computed its own part.
                # It may be shorter, if they see only the first piece.
                _add_to_start(arriving.wait(), d_kv)
            if step:
                # The rank before this one holds the gradient of the next source, which arrives at
                # the next step.
                before = (source - 1) % mask.ring.size
                into = _allocate_kv(kv, _count_tokens_with_gradient(mask, before, step), lse.dtype)
                arriving = shift_ring(d_kv, into, mask.ring)
            else:
                d_own_kv = d_kv
        assert arriving is not None
        # The gradient of this rank's own keys comes home last, from all other ranks.
        _add_to_start(arriving.wait(), d_own_kv)
        return d_query.to(query.dtype), d_own_kv.to(kv.dtype), d_sinks, None, None, None


def _split_kv(kv: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Return views of the keys (the first `width` dims) and of the values (the rest)."""
    return kv[..., :width], kv[..., width:]


def _iterate_ring(
    kv: Tensor, mask: RingMask, *, reverse: bool
) -> Iterator[tuple[int, int, Tensor]]:
    """Yield (ring rank, step, its keys and values) for every rank of the ring, starting with this
    one. The ranks before this one follow, nearest first, or with `reverse` the ranks after it."""
    ring, direction = mask.ring, -1 if reverse else 1
    size = ring.size

    # Only as many tokens as a rank that they still travel to may see.
    def count_tokens_to_send(source: int, step: int) -> int:
        ahead = ((source + direction * i) % size for i in range(step, size))
        return mask.count_tokens_seen(source, ahead)

    for step in range(size):
        # A rank's own keys come first: every query sees itself, so no sum of exponentials is 0.
        source, following = ((ring.index - direction * i) % size for i in (step, step + 1))
        arriving = None
        # The transfer starts before the caller computes with the keys at hand.
        if step + 1 < size:
            into = _allocate_kv(kv, count_tokens_to_send(following, step + 1), kv.dtype)
            arriving = shift_ring(
                kv[:, : count_tokens_to_send(source, step + 1)], into, ring, reverse=reverse
            )
        yield source, step, kv
        if arriving is not None:
            kv = arriving.wait()


def _count_tokens_with_gradient(mask: RingMask, source: int, step: int) -> int:
    """Return how many tokens of ring rank `source` have gradients from the `step` ranks after
    it."""
    size = mask.ring.size
    return mask.count_tokens_seen(source, ((source + i) % size for i in range(1, step + 1)))


def _allocate_kv(kv: Tensor, tokens: int, dtype: torch.dtype) -> Tensor:
    """Allocate the keys and values, or their gradients, of this many tokens."""
    return kv.new_empty((kv.shape[0], tokens, *kv.shape[2:]), dtype=dtype)


def _add_to_start(part: Tensor, total: Tensor) -> None:
    """Add `part` to the first tokens of `total`."""
    total[:, : part.shape[1]] += part
