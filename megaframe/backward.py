"""Backward: gradients go into a graph of autograd here.

`torch.autograd.backward` compares shapes by a library of symbols, whose import takes half a second;
this goes to the engine beneath it, which needs none.
"""

from __future__ import annotations

from torch import Tensor
from torch.autograd.graph import GradientEdge, _engine_run_backward


def backward(output: Tensor | GradientEdge, gradient: Tensor) -> None:
    """Add to the `grad` of every leaf that `output` was computed from what `gradient`, of the shape
    of `output`, makes of it. The graph is given up."""
    _engine_run_backward(
        (output,),
        (gradient,),
        False,  # keep the graph
        False,  # make one of the backward pass
        (),  # leaves: all
        allow_unreachable=True,
        accumulate_grad=True,
    )
