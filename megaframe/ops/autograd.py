"""Backward: the call that passes a gradient into an autograd graph; and functions that keep only
their arguments for it.

`torch.autograd.backward` compares shapes symbolically, and importing the library for that takes
half a second. This module calls the engine beneath it, which does not need that library.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, _engine_run_backward


def backward(
    output: Tensor | GradientEdge,
    gradient: Tensor,
    more: Sequence[GradientEdge] = (),
    gradients: Sequence[Tensor] = (),
) -> None:
    """Backpropagate `gradient`, which has the shape of `output`, and `gradients` of `more` outputs,
    and accumulate into the `grad` of every leaf that they were computed from. The graph is
    freed."""
    _engine_run_backward(
        (output, *more),
        (gradient, *gradients),
        False,  # keep_graph
        False,  # create_graph
        (),  # inputs: all leaves
        allow_unreachable=True,
        accumulate_grad=True,
    )


def get_direct_apply(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """Return `function.apply` without what transforms of `torch.func` need, which looks at each
    argument of each call in Python and takes as long as the rest of it. For functions that neither
    a transform nor a compiler traces."""
    return super(torch.autograd.Function, function).apply  # type: ignore[misc]


def recompute(
    function: Callable[..., Tensor], *tensors: Tensor, kept: Sequence[Tensor] = ()
) -> Tensor:
    """Return function(*tensors) and keep only the tensors for the backward pass, which calls the
    function again. So a layer keeps what its description can say in one line.

    Args:
        function: Returns a new tensor, the same each time. Parameters that it uses
            (`Parameter.use`) get their gradients, and what it communicates is sent again.
        tensors: Its arguments.
        kept: Gets what the first call keeps for the second.
    """
    return _Recompute.apply(function, kept, *tensors)


class _Recompute(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, function: Callable[..., Tensor], kept: Sequence[Tensor], *tensors: Tensor
    ) -> Tensor:
        ctx.function, ctx.arguments = function, len(tensors)
        output = function(*tensors)
        # The function has what it keeps. Here whoever counts what is kept sees it, too.
        ctx.save_for_backward(*tensors, *kept)
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        # A graph of its own, from leaves that share the memory of what was kept.
        leaves = [
            tensor.detach().requires_grad_(tensor.is_floating_point())
            for tensor in ctx.saved_tensors[: ctx.arguments]
        ]
        with torch.enable_grad():
            output = ctx.function(*leaves)
        backward(output, gradients[0])
        return None, None, *(leaf.grad for leaf in leaves)
