"""Exchange: sends pieces of matrices to the one rank that works on the whole matrix, and back.

A rank holds flat parts of slices of a weight, as boxes. Every rank knows the boxes of all others,
whatever layout they come from: any layout is just a list of boxes.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megaframe.distributed.collectives import Group, Pending, all_to_all_uneven
from megaframe.parameters.spec import Box


@dataclass(frozen=True)
class Piece:
    """A box of tensor number `tensor`."""

    tensor: int
    box: Box


@dataclass(frozen=True)
class Boxes:
    """The pieces of every rank of a group, in the order of ranks. gives: what a rank sends, no
    element twice. takes: what a rank gets back, every element that it keeps."""

    gives: Sequence[Sequence[Piece]]
    takes: Sequence[Sequence[Piece]]


class Exchange:
    """Exchanges `wholes` (boxes of tensors); rank owners[i] of the group works on number i. They
    travel as type `dtype`."""

    def __init__(
        self,
        group: Group,
        boxes: Boxes,
        wholes: Sequence[Piece],
        owners: Sequence[int],
        dtype: torch.dtype,
    ) -> None:
        self._group, self._wholes, self._dtype = group, wholes, dtype
        self._owned = [i for i, owner in enumerate(owners) if owner == group.index]
        gives = [_cut(pieces, wholes) for pieces in boxes.gives]
        takes = [_cut(pieces, wholes) for pieces in boxes.takes]
        ranks = range(group.size)
        self._giving = [
            [cut for cut in gives[group.index] if owners[cut.whole] == o] for o in ranks
        ]
        self._taking = [
            [cut for cut in takes[group.index] if owners[cut.whole] == o] for o in ranks
        ]
        self._given = [[cut for cut in gives[r] if cut.whole in self._owned] for r in ranks]
        self._taken = [[cut for cut in takes[r] if cut.whole in self._owned] for r in ranks]

    def collect(self, pieces: Sequence[Tensor], device: torch.device) -> Pending[Tensor]:
        """Start sending this rank's pieces to the owners of the wholes."""
        parts = [pieces[c.piece][c.in_piece] for cuts in self._giving for c in cuts]
        return self._send(_flat(parts, self._dtype, device), self._giving, self._given)

    def wholes(self, arrived: Tensor) -> dict[int, Tensor]:
        """Return the wholes that this rank owns, by number, assembled from what was collected."""
        found = {i: arrived.new_empty(self._wholes[i].box.shape) for i in self._owned}
        for cut, part in _parts(arrived, self._given):
            found[cut.whole][cut.in_whole] = part
        return found

    def spread(self, wholes: Mapping[int, Tensor], device: torch.device) -> Pending[Tensor]:
        """Start sending results for the owned wholes to the ranks that take them."""
        parts = [wholes[c.whole][c.in_whole] for cuts in self._taken for c in cuts]
        return self._send(_flat(parts, self._dtype, device), self._taken, self._taking)

    def taken(self, arrived: Tensor) -> Iterator[tuple[int, tuple[slice, ...], Tensor]]:
        """Yield what was spread: number of a box that this rank takes, place in it, values."""
        for cut, part in _parts(arrived, self._taking):
            yield cut.piece, cut.in_piece, part

    def _send(
        self, flat: Tensor, leaving: Sequence[Sequence[_Cut]], coming: Sequence[Sequence[_Cut]]
    ) -> Pending[Tensor]:
        out, into = (
            [sum(cut.box.size for cut in cuts) for cuts in side] for side in (leaving, coming)
        )
        return all_to_all_uneven(flat, out, into, self._group)


def deal(work: Sequence[float], ranks: int) -> list[int]:
    """Return a rank for each piece of work: the largest first, each to the least loaded rank."""
    loads = [(0.0, rank) for rank in range(ranks)]
    owners = [0] * len(work)
    for index in sorted(range(len(work)), key=lambda i: (-work[i], i)):
        load, rank = loads[0]
        owners[index] = rank
        heapq.heapreplace(loads, (load + work[index], rank))
    return owners


@dataclass(frozen=True)
class _Cut:
    """What piece number `piece` and whole number `whole` have in common, as places in each."""

    piece: int
    whole: int
    in_piece: tuple[slice, ...]
    in_whole: tuple[slice, ...]
    box: Box


def _cut(pieces: Sequence[Piece], wholes: Sequence[Piece]) -> list[_Cut]:
    cuts = []
    for index, piece in enumerate(pieces):
        for number, whole in enumerate(wholes):
            if whole.tensor != piece.tensor:
                continue
            shared = piece.box.intersection(whole.box)
            if shared is not None:
                places = shared.relative_to(piece.box).slices, shared.relative_to(whole.box).slices
                cuts.append(_Cut(index, number, *places, shared))
    return cuts


def _flat(parts: Sequence[Tensor], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the parts as one flat tensor, one after the other."""
    out = torch.empty(sum(part.numel() for part in parts), dtype=dtype, device=device)
    start = 0
    for part in parts:
        out[start : start + part.numel()].view(part.shape).copy_(part)
        start += part.numel()
    return out


def _parts(flat: Tensor, cuts: Sequence[Sequence[_Cut]]) -> Iterator[tuple[_Cut, Tensor]]:
    """Split a flat tensor into the parts of cuts; the reverse of `_flat`."""
    start = 0
    for of_rank in cuts:
        for cut in of_rank:
            yield cut, flat[start : start + cut.box.size].view(cut.box.shape)
            start += cut.box.size
