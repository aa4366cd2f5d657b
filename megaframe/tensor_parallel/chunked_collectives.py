"""Rows that travel between the tensor ranks in parts, so that one part travels while the product of
another part is computed.

A part contains some rows of every rank, because that is what one all-gather returns and one
reduce-scatter takes. Gathered parts are copied to where their rows belong, and parts to be
scattered are picked from there. If all rows travel at once, nothing is copied. On one rank nothing
travels, and rows stay together.

Shape legend: R rows of one rank, T = ranks * R rows of all ranks, C = ranks * c rows of one part, X
width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from megaframe.distributed.collectives import Group, Pending, all_gather, reduce_scatter


def gather_chunks(x_RX: Tensor, group: Group, chunks: int) -> Iterator[Tensor]:
    """Gather the rows of all ranks in parts. The first part is in transit when this returns.

    Args:
        x_RX: This rank's rows.
        group: The ranks.
        chunks: Number of parts; fewer if there are fewer rows.

    Returns:
        The parts [C, X], in order.
    """
    parts = _split(x_RX, 1, chunks if group.size > 1 else 1)
    transfers = (all_gather(part[0], group) for part in parts)
    # Not a generator itself: the first transfer must start now, not when the caller first asks.
    return _wait_one_behind(next(transfers), transfers)


def _wait_one_behind(
    current: Pending[Tensor], following: Iterator[Pending[Tensor]]
) -> Iterator[Tensor]:
    # The generator starts the next transfer before the current one is waited for. So each part is
    # in transit while the one before it is used, and at most two gathered parts exist at a time.
    for transfer in following:
        yield current.wait()
        current = transfer
    yield current.wait()


def scatter_chunks(
    x_TX: Tensor, compute: Callable[[Tensor], Tensor], group: Group, chunks: int
) -> list[Pending[Tensor]]:
    """Apply `compute` to each part of x, and start to reduce-scatter each result as soon as it is
    computed.

    Args:
        x_TX: Rows of all ranks.
        compute: Returns what is summed over the ranks, for the rows [C, X] of one part.
        group: The ranks.
        chunks: Number of parts; fewer if there are fewer rows.

    Returns:
        The parts of this rank's rows.
    """
    return [
        reduce_scatter(compute(part.flatten(0, 1)), group)
        for part in _split(x_TX, group.size, chunks if group.size > 1 else 1)
    ]


def wait_for_rows(scattered: list[Pending[Tensor]]) -> Tensor:
    """Wait for all parts of `scatter_chunks` and return this rank's rows [R, X]."""
    if len(scattered) == 1:
        return scattered[0].wait()
    return torch.cat([part.wait() for part in scattered])


def _split(x: Tensor, ranks: int, chunks: int) -> tuple[Tensor, ...]:
    # [ranks, R, X], divided along R: each part has some rows of every rank.
    x = x.unflatten(0, (ranks, -1))
    return x.split(max(1, -(-x.shape[1] // chunks)), 1)


class RowAssembly:
    """Puts parts [C, X] together, one after the other. `rows` [T, X] is complete once all were
    added."""

    rows: Tensor

    def __init__(self, total: int, ranks: int) -> None:
        self._total, self._ranks = total, ranks
        self._filled = 0

    def add(self, part_CX: Tensor) -> None:
        """Add the next part."""
        if len(part_CX) == self._total:  # the only part, which needs no copy
            self.rows = part_CX
            return
        if not self._filled:
            self.rows = part_CX.new_empty((self._total, part_CX.shape[1]))
        # Some rows of each rank: they belong to as many places that do not touch.
        part = part_CX.unflatten(0, (self._ranks, -1))
        end = self._filled + part.shape[1]
        self.rows.unflatten(0, (self._ranks, -1))[:, self._filled : end] = part
        self._filled = end
