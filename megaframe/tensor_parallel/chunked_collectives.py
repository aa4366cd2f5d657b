"""Rows that travel between the tensor ranks in parts, so that one part travels while the product of
another part is computed.

A part contains some rows of every rank, because that is what one all-gather returns and one
reduce-scatter takes. Gathered parts are copied to where their rows belong, and parts to be
scattered are picked from there. If all rows travel at once, nothing is copied.

Shape legend: R rows of one rank, T = ranks * R rows of all ranks, C = ranks * c rows of one part, X
width.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from megaframe.distributed.collectives import Pending, all_gather
from megaframe.model.forward_context import Frame


def gather(x_RX: Tensor, frame: Frame) -> Iterator[Tensor]:
    """Gather the rows of all ranks in parts [C, X]. The first part is in transit when this returns,
    and each later one while the part before it is used, so at most two gathered parts exist at a
    time."""
    pending = (all_gather(part[0], frame.tensor) for part in _split(x_RX, 1, frame.chunks))
    return _one_ahead(next(pending), pending)


def _one_ahead(here: Pending[Tensor], others: Iterator[Pending[Tensor]]) -> Iterator[Tensor]:
    for coming in others:
        yield here.wait()
        here = coming
    yield here.wait()


def split(x_TX: Tensor, frame: Frame) -> Iterator[Tensor]:
    """Split rows [T, X] into parts [C, X]."""
    for part in _split(x_TX, frame.tensor.size, frame.chunks):
        yield part.flatten(0, 1)


def _split(x: Tensor, ranks: int, chunks: int) -> tuple[Tensor, ...]:
    x = x.unflatten(0, (ranks, -1))
    return x.split(max(1, -(-x.shape[1] // chunks)), 1)


class Whole:
    """Puts parts [C, X] together, one after the other. `rows` [T, X] is complete once all were
    added."""

    rows: Tensor

    def __init__(self, frame: Frame) -> None:
        self._ranks, self._all = frame.tensor.size, frame.filled
        self._filled = 0

    def add(self, part_CX: Tensor) -> None:
        """Add the next part."""
        if len(part_CX) == self._all:
            self.rows = part_CX
            return
        if not self._filled:
            self.rows = part_CX.new_empty((self._all, part_CX.shape[1]))
        part = part_CX.unflatten(0, (self._ranks, -1))
        end = self._filled + part.shape[1]
        self.rows.unflatten(0, (self._ranks, -1))[:, self._filled : end] = part
        self._filled = end


def arrived(scattered: list[Pending[Tensor]]) -> Tensor:
    """Wait for all parts and return this rank's rows [R, X]."""
    if len(scattered) == 1:
        return scattered[0].wait()
    return torch.cat([part.wait() for part in scattered])
