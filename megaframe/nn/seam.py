"""Seam: the place in a block between its attention and its late part, where values are waited for
on the way forward and gradients leave on the way back.

A block is one call of autograd, so what is done between its parts is told by the graph itself: a
node that changes nothing, which runs when all behind it has run.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megaframe.parameter import Module


class Seam:
    """Of one microbatch. take: returns when the values of a late part are here. done: is told of a
    late part to whose gradients the microbatch adds no more. Without them nothing happens."""

    def __init__(self, take: Callable[[Module], None] | None = None) -> None:
        self.take = take
        self.done: Callable[[Module], None] | None = None

    def cross(self, x: Tensor, late: Module) -> Tensor:
        """`x`, of which all is made that `late` is computed from, from now on."""
        if self.take is not None:
            self.take(late)
        return _Seam.apply(x, self, late) if torch.is_grad_enabled() else x


class _Seam(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, seam: Seam, late: Module) -> Tensor:
        ctx.seam, ctx.late = seam, late
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        if ctx.seam.done is not None:
            ctx.seam.done(ctx.late)
        return gradients[0], None, None
