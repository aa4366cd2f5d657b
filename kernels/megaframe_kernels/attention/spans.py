"""Spans: which keys each query sees, as one contiguous run of keys per query.

With causal masks, sliding windows, packed documents and the tiles of a ring, each query sees one
run of keys, and the ends of the run never move back from one query to the next. Each key is then
also seen by one run of queries. Two pairs of numbers per token describe the mask from both sides,
and the same few lines in a kernel find which blocks to visit and which of those need no mask. Spans
are made once per batch and used by every layer.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Spans:
    """Which keys each query sees, as ranges.

    Query q of sample b sees keys starts[b, q] .. stops[b, q] - 1, or none if that range is empty.
    Key k is seen by queries first[b, k] .. last[b, k] - 1. All are int32 and ascending along a
    sample.

    Attributes:
        starts: [B, Q].
        stops: [B, Q].
        first: [B, K].
        last: [B, K].
        plain: There is only a causal mask (with `window`) over as many queries as keys, which other
            libraries support directly.
        window: A query sees at most this many places, its own included; None for no window.
    """

    starts: Tensor
    stops: Tensor
    first: Tensor
    last: Tensor
    plain: bool = False
    window: int | None = None

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """starts, stops, first and last."""
        return self.starts, self.stops, self.first, self.last

    def mask(self) -> Tensor:
        """Return the bool mask [B, Q, K], true where a query sees a key."""
        key = torch.arange(self.first.shape[1], device=self.starts.device)
        return (key >= self.starts[..., None]) & (key < self.stops[..., None])


def find_spans(
    batch: int,
    queries: int,
    keys: int,
    device: torch.device | str,
    *,
    causal: bool = True,
    window: int | None = None,
    query_places: Tensor | None = None,
    key_places: Tensor | None = None,
    query_documents: Tensor | None = None,
    key_documents: Tensor | None = None,
) -> Spans:
    """Return what queries see of keys.

    Args:
        batch: Number of samples B.
        queries: Number of queries Q of a sample.
        keys: Number of keys K of a sample.
        device: Where the spans are made.
        causal: Queries see nothing after their own place.
        window: A query sees at most this many places, its own included.
        query_places: Where in the sample the queries are, ascending [Q]; by default 0, 1, ...
        key_places: Where in the sample the keys are, ascending [K]; by default 0, 1, ...
        query_documents: Document numbers, ascending along each sample, [B, Q]; a query sees only
            its own document.
        key_documents: Document numbers of the keys, [B, K].

    Returns:
        The spans; `plain` if they are only a causal mask over as many queries as keys.
    """
    # Everything is computed in int64 on the device, so the host does not wait.
    query = _make_places(query_places, queries, device)
    key = _make_places(key_places, keys, device)
    starts = torch.zeros(batch, queries, dtype=torch.int64, device=device)
    stops = torch.full_like(starts, keys)
    if causal:
        # Places ascend: the number of keys at or before a query is where its run stops.
        stops = stops.minimum(torch.searchsorted(key, query, right=True))
    if window is not None:
        # The oldest place that a window of this size reaches.
        starts = starts.maximum(torch.searchsorted(key, query - window + 1))
    if query_documents is not None and key_documents is not None:
        query_numbers, key_numbers = query_documents.contiguous(), key_documents.contiguous()
        # Document numbers ascend, so a document is one run of keys.
        starts = starts.maximum(torch.searchsorted(key_numbers, query_numbers))
        stops = stops.minimum(torch.searchsorted(key_numbers, query_numbers, right=True))
    masks = (query_places, key_places, query_documents, key_documents)
    plain = causal and queries == keys and all(g is None for g in masks)
    return make_spans(starts, stops, keys, plain, window)


def make_spans(
    starts: Tensor, stops: Tensor, keys: int, plain: bool = False, window: int | None = None
) -> Spans:
    """Return the spans, given the runs of keys that queries see.

    Args:
        starts: First key that each query sees, ascending [B, Q].
        stops: End of the keys that each query sees, ascending [B, Q].
        keys: Number of keys K.
        plain: As in `Spans`.
        window: As in `Spans`.

    Returns:
        The spans, with the runs of queries that see each key.
    """
    key = torch.arange(keys, device=starts.device).expand(starts.shape[0], -1).contiguous()
    # The same mask from the side of the keys. The first query whose run stops after key k sees it;
    # the last is the last one whose run starts at or before k. Both ends ascend, so two searches
    # suffice.
    first = torch.searchsorted(stops.long().contiguous(), key, right=True)
    last = torch.searchsorted(starts.long().contiguous(), key, right=True)

    def convert(x: Tensor) -> Tensor:
        # int32 is enough for a sample's length, and half as much for the kernels to read.
        return x.to(torch.int32).contiguous()

    ends = convert(starts), convert(stops), convert(first), convert(last)
    return Spans(*ends, plain, window)


def _make_places(places: Tensor | None, length: int, device: torch.device | str) -> Tensor:
    if places is None:
        return torch.arange(length, device=device)
    return places.to(torch.int64).contiguous()
