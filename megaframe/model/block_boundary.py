"""Seam: the boundary in a block between its attention and its second half. In the forward pass the
values of the second half are waited for here, and in the backward pass its gradients leave here.

Autograd runs the backward pass of a block in one call, so the graph itself signals the boundary: an
identity node, whose backward runs once everything after it in the block has been differentiated.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megaframe.parameters.parameter import Module


class BlockBoundary:
    """The seams of one microbatch.

    take: returns when the values of a second half are here. done: is called with a second half once
    this microbatch adds nothing more to its gradients. Either may be None.
    """

    def __init__(self, take: Callable[[Module], None] | None = None) -> None:
        self.take = take
        self.done: Callable[[Module], None] | None = None

    def cross(self, x: Tensor, second_half: Module) -> Tensor:
        """Return x, from which `second_half` is about to be computed: wait for the values of
        `second_half`, and in the backward pass report that `second_half` is done."""
        if self.take is not None:
            self.take(second_half)
        return _Boundary.apply(x, self, second_half) if torch.is_grad_enabled() else x


class _Boundary(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, seam: BlockBoundary, second_half: Module) -> Tensor:
        ctx.seam, ctx.second_half = seam, second_half
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        if ctx.seam.done is not None:
            ctx.seam.done(ctx.second_half)
        return gradients[0], None, None
