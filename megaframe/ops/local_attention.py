"""Attention by a kernel of the library, for tokens that are all on this rank or for one tile of a
ring.

A kernel is told what queries see as spans of keys, which take two numbers per token. Plain code
uses a mask, which is quadratic in the length. Both are made on first use and then kept for all
layers, except the masks of single tiles.

Shape legend: B samples, S tokens, Q queries, K keys, N query heads, G key/value heads, D width of a
query or key head, V width of a value head.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from megaframe.ops.attention_tiles import AttentionMask, Tile
from megaframe.ops.kernel_dispatch import Kernels

if TYPE_CHECKING:
    from megaframe_kernels.attention.spans import Spans

_QUERIES = 128
"""Queries per masked tile on a CPU. Fewer queries waste less work on hidden keys; more queries make
faster products."""


@dataclass(frozen=True)
class SequenceMask:
    """Which tokens of `batch` whole samples of `length` tokens each other token attends to."""

    attention_mask: AttentionMask
    batch: int
    length: int
    device: torch.device

    @cached_property
    def dense(self) -> Tensor | None:
        """Bool mask [S, S] or [B, 1, S, S], true where a query (row) may see a key; None if plainly
        causal."""
        if not self.attention_mask.narrow:
            return None
        everything = torch.arange(self.length, device=self.device)
        return self.attention_mask.dense(everything, everything)

    @cached_property
    def tiles(self) -> list[Tile]:
        """Tiles that cover all visible query-key pairs. If queries see everything before them,
        there is one causal tile; otherwise there is one masked tile per `_QUERIES` queries, limited
        to the keys that any of them may see."""
        if not self.attention_mask.narrow:
            return [Tile(slice(0, self.length), slice(0, self.length), "causal")]
        reach = self.attention_mask.window or self.length
        starts = range(0, self.length, _QUERIES)
        ends = ((start, min(start + _QUERIES, self.length)) for start in starts)
        return [
            Tile(slice(start, end), slice(max(0, start - reach + 1), end), "masked")
            for start, end in ends
        ]

    def dense_tile(self, tile: Tile) -> Tensor | None:
        """Return the mask of a tile, or None if the tile is not masked. It is made anew on each
        call, because keeping the masks would take memory quadratic in the length."""
        if tile.kind != "masked":
            return None
        queries, keys = (
            torch.arange(s.start, s.stop, device=self.device) for s in (tile.queries, tile.keys)
        )
        return self.attention_mask.dense(queries, keys)

    @cached_property
    def spans(self) -> Spans:
        """What every query sees, as spans of keys for the kernels."""
        places = torch.arange(self.length, device=self.device)
        if self.attention_mask.documents_BS is None:
            return spans_of(self.attention_mask, self.batch, places, None)
        return spans_of(self.attention_mask, self.batch, places, places)


def spans_of(
    mask: AttentionMask, batch: int, queries: Tensor, keys: Tensor | None, *, causal: bool = True
) -> Spans:
    """Return the keys that queries see, as spans.

    queries, keys: ascending places of the tokens in their samples. With keys=None, queries and keys
    are both whole samples, and documents are ignored.
    """
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


def attend_by_kernel(
    kernels: Kernels, query_BQND: Tensor, key_BKGD: Tensor, value_BKGV: Tensor, mask: SequenceMask,
    scale: float,
) -> Tensor | None:  # fmt: skip
    """Compute attention [B, S, N, V] by a kernel. Return None if no kernel takes these
    arguments."""
    if not kernels.has("attention"):
        return None
    value = _widened(value_BKGV, query_BQND)
    given = (query_BQND, key_BKGD, value, mask.spans)
    run = kernels.find("attention", *given, scale=scale)
    if run is None:
        return None
    out, _ = run(*given, scale=scale)
    return out[..., : value_BKGV.shape[-1]]


Part = tuple[Tensor, Tensor]
"""Output [B, Q, N, V] and log-sum-exp [B, N, Q] of a tile."""


def tile_by_kernel(
    kernels: Kernels, query_BQND: Tensor, key_BKGD: Tensor, value_BKGV: Tensor,
    spans: Callable[[], Spans], scale: float,
) -> Part | None:  # fmt: skip
    """Compute a tile like `tiles.attend`. Return None if no kernel takes these arguments. The
    gradient of a tile computed here comes from `tile_backward_by_kernel`."""
    if not (kernels.has("attention") and kernels.has("attention_backward")):
        return None
    given = (query_BQND, key_BKGD, _widened(value_BKGV, query_BQND), spans())
    run = kernels.find("attention", *given, scale=scale, need_lse=True)
    if run is None:
        return None
    out, lse = run(*given, scale=scale, need_lse=True)
    return out[..., : value_BKGV.shape[-1]], lse


def tile_backward_by_kernel(
    kernels: Kernels, d_out: Tensor, query_BQND: Tensor, key_BKGD: Tensor, value_BKGV: Tensor,
    out_BQNV: Tensor, lse_BNQ: Tensor, spans: Callable[[], Spans], scale: float,
) -> tuple[Tensor, Tensor, Tensor] | None:  # fmt: skip
    """Compute the gradients of a tile like `tiles.attend_backward`. Return None if no kernel takes
    these arguments."""
    if not (kernels.has("attention") and kernels.has("attention_backward")):
        return None
    ends = (_widened(end, query_BQND) for end in (d_out, out_BQNV))
    d_out, out = ends
    value = _widened(value_BKGV, query_BQND)
    given = (d_out, query_BQND, key_BKGD, value, out, lse_BNQ, spans())
    run = kernels.find("attention_backward", *given, scale=scale)
    if run is None:
        return None
    d_query, d_key, d_value = run(*given, scale=scale)
    return d_query, d_key, d_value[..., : value_BKGV.shape[-1]]


def _widened(x: Tensor, like: Tensor) -> Tensor:
    """Pad the heads of x with zeros to the width of `like`. Zeros contribute nothing, and callers
    cut off the extra outputs."""
    missing = like.shape[-1] - x.shape[-1]
    return F.pad(x, (0, missing)) if missing > 0 else x
