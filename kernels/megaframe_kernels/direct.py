"""Direct calls of operators: around torch's dispatcher where nobody traces.

An operator registered with `torch.library` is what `torch.compile` sees through, and each of its
calls costs the host some tens of microseconds in Python, more than the launch. Where nothing is
traced the same function, with the same gradient, is called without it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Keep = Callable[[Any, tuple[Any, ...], Any], None]
Differentiate = Callable[..., tuple[Tensor | None, ...]]


def direct(
    operator: Callable[..., Any],
    function: Callable[..., Any],
    keep: Keep | None = None,
    differentiate: Differentiate | None = None,
) -> Callable[..., Any]:
    """Calls `operator`, or where nothing is traced the `function` that it was made of. keep,
    differentiate: as registered with the operator, where it has a gradient."""
    plain = function
    if keep is not None and differentiate is not None:
        plain = _function(function, keep, differentiate)

    def call(*arguments: Any) -> Any:
        return (operator if traced() else plain)(*arguments)

    return call


def traced() -> bool:
    """Whether somebody sees the operators that are called: a compiler, or a mode of dispatch."""
    return torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0


def _function(
    function: Callable[..., Any], keep: Keep, differentiate: Differentiate
) -> Callable[..., Any]:
    """As a function of autograd; without anything to differentiate, as it is."""

    class Differentiated(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *arguments: Any) -> Any:
            output = function(*arguments)
            keep(ctx, arguments, output)
            return output

        @staticmethod
        def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
            return differentiate(ctx, *gradients)

    def call(*arguments: Any) -> Any:
        if torch.is_grad_enabled() and any(
            isinstance(one, Tensor) and one.requires_grad for one in arguments
        ):
            return Differentiated.apply(*arguments)
        return function(*arguments)

    return call
