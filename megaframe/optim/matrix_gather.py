"""MatrixGather: sends pieces of matrices to the one rank that works on the whole matrix, and back.

A rank holds flat parts of slices of a weight, as boxes. Every rank knows the boxes of all others,
whatever layout they come from: any layout is just a list of boxes.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megaframe.architecture.spec import Box
from megaframe.distributed.collectives import Group, Pending, all_to_all_v


@dataclass(frozen=True)
class MatrixPiece:
    """A box of tensor number `tensor`."""

    tensor: int
    box: Box


@dataclass(frozen=True)
class RankPieces:
    """The pieces of every rank of a group, in the order of ranks.

    Attributes:
        sent: What a rank sends, no element twice.
        received: What a rank gets back: every element whose weights it has.
    """

    sent: Sequence[Sequence[MatrixPiece]]
    received: Sequence[Sequence[MatrixPiece]]


class MatrixGather:
    """Gathers `matrices` (boxes of tensors) on their owners, and spreads results."""

    def __init__(
        self,
        group: Group,
        pieces: RankPieces,
        matrices: Sequence[MatrixPiece],
        owners: Sequence[int],
        dtype: torch.dtype,
    ) -> None:
        """Plan the transfers.

        Args:
            group: The ranks that together have every matrix.
            pieces: What each rank sends and gets back.
            matrices: The matrices.
            owners: The rank of the group that works on each matrix.
            dtype: The type in which they travel.
        """
        self._group, self._matrices, self._dtype = group, matrices, dtype
        self._owned = [i for i, owner in enumerate(owners) if owner == group.index]
        sent = [_cut(of_rank, matrices) for of_rank in pieces.sent]
        received = [_cut(of_rank, matrices) for of_rank in pieces.received]
        ranks, own_index = range(group.size), group.index
        # Four lists of cuts, each by the rank at the other end: what this rank sends to owners and
        # receives from them, and as an owner what it collects from others and returns to them.
        self._to_owners = [[c for c in sent[own_index] if owners[c.matrix] == r] for r in ranks]
        self._from_owners = [
            [c for c in received[own_index] if owners[c.matrix] == r] for r in ranks
        ]
        self._collected = [[c for c in sent[r] if c.matrix in self._owned] for r in ranks]
        self._returned = [[c for c in received[r] if c.matrix in self._owned] for r in ranks]

    def collect(self, pieces: Sequence[Tensor], device: torch.device) -> Pending[Tensor]:
        """Start sending this rank's pieces to the owners of the matrices."""
        # Cuts are listed alike at both ends of a transfer, so no message carries what it contains.
        parts = [pieces[c.piece][c.in_piece] for cuts in self._to_owners for c in cuts]
        flat = _flatten(parts, self._dtype, device)
        return self._exchange(flat, self._to_owners, self._collected)

    def assemble(self, collected: Tensor) -> dict[int, Tensor]:
        """Return the matrices that this rank owns, by number, from what was collected."""
        # No zeros needed: the pieces of all ranks together cover each matrix once.
        matrices = {i: collected.new_empty(self._matrices[i].box.shape) for i in self._owned}
        for cut, part in _split(collected, self._collected):
            matrices[cut.matrix][cut.in_matrix] = part
        return matrices

    def spread(self, results: Mapping[int, Tensor], device: torch.device) -> Pending[Tensor]:
        """Start sending results for the owned matrices to the ranks that have their weights."""
        parts = [results[c.matrix][c.in_matrix] for cuts in self._returned for c in cuts]
        flat = _flatten(parts, self._dtype, device)
        return self._exchange(flat, self._returned, self._from_owners)

    def split_results(self, spread: Tensor) -> Iterator[tuple[int, tuple[slice, ...], Tensor]]:
        """Yield what the owners returned to this rank.

        Args:
            spread: The values that `spread` has transferred, flat.

        Yields:
            Number of a piece that this rank receives, place in it, and values.
        """
        for cut, part in _split(spread, self._from_owners):
            yield cut.piece, cut.in_piece, part

    def _exchange(
        self, flat: Tensor, outgoing: Sequence[Sequence[_Cut]], incoming: Sequence[Sequence[_Cut]]
    ) -> Pending[Tensor]:
        sent, received = (
            # Both ends know all sizes from the layout, so none is exchanged.
            [sum(cut.box.size for cut in cuts) for cuts in side]
            for side in (outgoing, incoming)
        )
        return all_to_all_v(flat, sent, received, self._group)


def assign_owners(costs: Sequence[float], ranks: int) -> list[int]:
    """Divide work among ranks: the largest cost first, each to the least loaded rank.

    Args:
        costs: The cost of each item; only the ratios matter.
        ranks: Number of ranks.

    Returns:
        The rank of each item, in the order of the costs.
    """
    loads = [(0.0, rank) for rank in range(ranks)]
    owners = [0] * len(costs)
    # Ties go by index and by rank, so that all ranks assign the same owners.
    for index in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        load, rank = loads[0]
        owners[index] = rank
        heapq.heapreplace(loads, (load + costs[index], rank))
    return owners


@dataclass(frozen=True)
class _Cut:
    """What piece number `piece` and matrix number `matrix` have in common, as places in each."""

    piece: int
    matrix: int
    in_piece: tuple[slice, ...]
    in_matrix: tuple[slice, ...]
    box: Box


def _cut(pieces: Sequence[MatrixPiece], matrices: Sequence[MatrixPiece]) -> list[_Cut]:
    cuts = []
    for index, piece in enumerate(pieces):
        for number, matrix in enumerate(matrices):
            if matrix.tensor != piece.tensor:
                continue
            shared = piece.box.intersect(matrix.box)
            if shared is not None:
                places = (
                    shared.make_relative(piece.box).slices,
                    shared.make_relative(matrix.box).slices,
                )
                cuts.append(_Cut(index, number, *places, shared))
    return cuts


def _flatten(parts: Sequence[Tensor], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the parts as one flat tensor, one after the other."""
    out = torch.empty(sum(part.numel() for part in parts), dtype=dtype, device=device)
    start = 0
    for part in parts:
        # The copy also rounds to the type of the transfer and makes strided parts contiguous.
        out[start : start + part.numel()].view(part.shape).copy_(part)
        start += part.numel()
    return out


def _split(flat: Tensor, cuts: Sequence[Sequence[_Cut]]) -> Iterator[tuple[_Cut, Tensor]]:
    """Split a flat tensor into the parts of cuts; the reverse of `_flatten`."""
    start = 0
    for of_rank in cuts:
        for cut in of_rank:
            yield cut, flat[start : start + cut.box.size].view(cut.box.shape)
            start += cut.box.size
