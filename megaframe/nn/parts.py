"""Rows that travel between the tensor ranks in parts, so that one part travels while the product of
another is made.

A part holds some rows of every rank, because that is what one gather brings or one reduce-scatter
takes: gathered parts are put where their rows belong, and parts that will be scattered are picked
from there. Where all rows travel at once nothing is copied.

Shape legend: R rows of one rank, T = ranks * R rows of all ranks, C = ranks * c rows of one part, X
the width.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from megaframe.comm import Pending, all_gather
from megaframe.nn.frame import Frame


def gather(x_RX: Tensor, frame: Frame) -> Iterator[Tensor]:
    """The rows of all ranks in parts [C, X]. The first is on its way when this returns, and each
    other one while the one before it is used; so no more than two are here at a time."""
    pending = (all_gather(part[0], frame.tensor) for part in _split(x_RX, 1, frame.chunks))
    return _one_ahead(next(pending), pending)


def _one_ahead(here: Pending[Tensor], others: Iterator[Pending[Tensor]]) -> Iterator[Tensor]:
    for coming in others:
        yield here.wait()
        here = coming
    yield here.wait()


def split(x_TX: Tensor, frame: Frame) -> Iterator[Tensor]:
    """Rows [T, X] in parts [C, X]."""
    for part in _split(x_TX, frame.tensor.size, frame.chunks):
        yield part.flatten(0, 1)


def _split(x: Tensor, ranks: int, chunks: int) -> tuple[Tensor, ...]:
    x = x.unflatten(0, (ranks, -1))
    return x.split(max(1, -(-x.shape[1] // chunks)), 1)


class Whole:
    """Parts [C, X] put together, one after the other: `rows` [T, X] once all were added."""

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
    """This rank's rows [R, X], of which each part brought some."""
    if len(scattered) == 1:
        return scattered[0].wait()
    return torch.cat([part.wait() for part in scattered])
