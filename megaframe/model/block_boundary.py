"""Seam: the boundary in a block between its attention and its late part. In the forward pass the
values of the late part are waited for here, and in the backward pass its gradients leave here.

Autograd runs the backward pass of a block in one call, so the graph itself signals the boundary: an
identity node, whose backward runs once everything after it in the block has been differentiated.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megaframe.parameters.parameter import Module


class Seam:
    """The seams of one microbatch.

    take: returns when the values of a late part are here. done: is called with a late part once
    this microbatch adds nothing more to its gradients. Either may be None.
    """

    def __init__(self, take: Callable[[Module], None] | None = None) -> None:
        self.take = take
        self.done: Callable[[Module], None] | None = None

    def cross(self, x: Tensor, late: Module) -> Tensor:
        """Return x, from which `late` is about to be computed: wait for the values of `late`, and
        in the backward pass report that `late` is done."""
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
