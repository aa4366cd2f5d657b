"""Attention by a kernel: of tokens that are all here, or a tile of a ring.

A kernel is told what queries see as runs of keys, two numbers a token, where plain code has a mask
that is quadratic in the length; either is made once for a microbatch, when it is first asked for.
Shape legend: B samples, S tokens, Q queries, K keys, N query heads, G key/value heads, D width of a
query or key head, V of a value head.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from megaframe.kernels import Kernels
from megaframe.nn.tiles import Sight, Tile

if TYPE_CHECKING:
    from megaframe_kernels.spans import Spans

_QUERIES = 128
"""Of a tile on a CPU: with fewer there is less to compute that nobody sees, more are faster."""


@dataclass(frozen=True)
class Among:
    """What `batch` samples of `length` tokens see of each other."""

    sight: Sight
    batch: int
    length: int
    device: torch.device

    @cached_property
    def mask(self) -> Tensor | None:
        """Bool [S, S] or [B, 1, S, S], true where a query (row) may see a key; None for causal."""
        if not self.sight.narrow:
            return None
        everything = torch.arange(self.length, device=self.device)
        return self.sight.mask(everything, everything)

    @cached_property
    def tiles(self) -> list[Tile]:
        """All that is seen: at once where queries see everything before them, else some queries
        after the other, each time against the keys that any of them may see."""
        if not self.sight.narrow:
            return [Tile(slice(0, self.length), slice(0, self.length), "causal")]
        reach = self.sight.window or self.length
        starts = range(0, self.length, _QUERIES)
        ends = ((start, min(start + _QUERIES, self.length)) for start in starts)
        return [
            Tile(slice(start, end), slice(max(0, start - reach + 1), end), "masked")
            for start, end in ends
        ]

    def mask_of(self, tile: Tile) -> Tensor | None:
        """The mask of a tile, made anew each time: a kept one is quadratic in the length."""
        if tile.kind != "masked":
            return None
        places = (
            torch.arange(s.start, s.stop, device=self.device) for s in (tile.queries, tile.keys)
        )
        return self.sight.mask(*places)

    @cached_property
    def spans(self) -> Spans:
        """The same as runs of keys."""
        places = torch.arange(self.length, device=self.device)
        if self.sight.documents_BS is None:
            return spans_of(self.sight, self.batch, places, None)
        return spans_of(self.sight, self.batch, places, places)


def spans_of(
    sight: Sight, batch: int, queries: Tensor, keys: Tensor | None, *, causal: bool = True
) -> Spans:
    """What queries at these places of their samples, ascending, see of keys at theirs; None where
    both are whole samples of one document."""
    from megaframe_kernels.spans import find_spans

    documents, device = sight.documents_BS, queries.device
    if keys is None:
        size = len(queries)
        return find_spans(batch, size, size, device, causal=causal, window=sight.window)
    return find_spans(
        batch,
        len(queries),
        len(keys),
        device,
        causal=causal,
        window=sight.window,
        query_places=queries,
        key_places=keys,
        query_documents=None if documents is None else documents[:, queries],
        key_documents=None if documents is None else documents[:, keys],
    )


def attend_by_kernel(
    kernels: Kernels, query_BQND: Tensor, key_BKGD: Tensor, value_BKGV: Tensor, among: Among,
    scale: float,
) -> Tensor | None:  # fmt: skip
    """[B, S, N, V], or None where there is no kernel for it."""
    if not kernels.has("attention"):
        return None
    value = _widened(value_BKGV, query_BQND)
    given = (query_BQND, key_BKGD, value, among.spans)
    run = kernels.find("attention", *given, scale=scale)
    if run is None:
        return None
    out, _ = run(*given, scale=scale)
    return out[..., : value_BKGV.shape[-1]]


Part = tuple[Tensor, Tensor]
"""Output [B, Q, N, V], and log-sum-exp [B, N, Q]."""


def tile_by_kernel(
    kernels: Kernels, query_BQND: Tensor, key_BKGD: Tensor, value_BKGV: Tensor,
    spans: Callable[[], Spans], scale: float,
) -> Part | None:  # fmt: skip
    """A tile as `tiles.attend` makes it, or None where there is no kernel for it. Its backward is
    then `tile_backward_by_kernel`."""
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
    """As `tiles.attend_backward`, or None where there is no kernel for it."""
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
    """Heads as wide as those of another tensor: zeros add nothing, and what they give is cut."""
    missing = like.shape[-1] - x.shape[-1]
    return F.pad(x, (0, missing)) if missing > 0 else x
