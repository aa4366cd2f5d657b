"""Backward: the call that passes a gradient into an autograd graph; and functions that keep only
their arguments for it.

`torch.autograd.backward` compares shapes symbolically, and importing the library for that takes
half a second. This module calls the engine beneath it, which does not need that library.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, _engine_run_backward


def backward(output: Tensor | GradientEdge, gradient: Tensor) -> None:
    """Backpropagate `gradient`, which has the shape of `output`, and accumulate into the `grad` of
    every leaf that `output` was computed from. The graph is freed."""
    _run_engine((output,), (gradient,))


def _run_engine(
    outputs: tuple[Tensor | GradientEdge, ...], gradients: tuple[Tensor, ...]
) -> None:
    _engine_run_backward(
        outputs,
        gradients,
        False,  # keep_graph
        False,  # create_graph
        (),  # inputs: all leaves
        allow_unreachable=True,
        accumulate_grad=True,
    )


Result = TypeVar("Result", Tensor, tuple[Tensor, ...])


def recompute(function: Callable[..., Result], *tensors: Tensor) -> Result:
    """Return function(*tensors) and keep only the tensors for the backward pass, which calls the
    function again. So a layer keeps what its description can say in one line.

    Args:
        function: Returns a new tensor, or several, and computes the same each time, without
            communication. Parameters that it uses (`Parameter.use`) get their gradients.
        tensors: Its arguments.
    """
    return _Recompute.apply(function, *tensors)


class _Recompute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, function: Callable[..., Result], *tensors: Tensor) -> Result:
        ctx.function = function
        ctx.save_for_backward(*tensors)
        return function(*tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        # A graph of its own, from leaves that share the memory of what was kept.
        leaves = [
            tensor.detach().requires_grad_(tensor.is_floating_point())
            for tensor in ctx.saved_tensors
        ]
        with torch.enable_grad():
            results = ctx.function(*leaves)
        _run_engine(results if isinstance(results, tuple) else (results,), gradients)
        return None, *(leaf.grad for leaf in leaves)
