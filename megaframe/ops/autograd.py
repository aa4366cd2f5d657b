"""Backward: the call that passes a gradient into an autograd graph.

`torch.autograd.backward` compares shapes symbolically, and importing the library for that takes
half a second. This module calls the engine beneath it, which does not need that library.
"""

from __future__ import annotations

from torch import Tensor
from torch.autograd.graph import GradientEdge, _engine_run_backward


def backward(output: Tensor | GradientEdge, gradient: Tensor) -> None:
    """Backpropagate `gradient`, which has the shape of `output`, and accumulate into the `grad` of
    every leaf that `output` was computed from. The graph is freed."""
    _engine_run_backward(
        (output,),
        (gradient,),
        False,  # keep_graph
        False,  # create_graph
        (),  # inputs: all leaves
        allow_unreachable=True,
        accumulate_grad=True,
    )
