"""Direct calls of operators, which bypass torch's dispatcher when nothing is being traced.

`torch.compile` needs an operator registered with `torch.library`, but each call of one costs the
host tens of microseconds in Python, more than the launch. When nothing is being traced, the same
function is called directly, with the same gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

is_compiling = torch.compiler.is_compiling
count_dispatch_modes = torch._C._len_torch_dispatch_stack
Keep = Callable[[Any, tuple[Any, ...], Any], None]
Differentiate = Callable[..., tuple[Tensor | None, ...]]


def bypass_dispatcher(
    operator: Callable[..., Any],
    function: Callable[..., Any],
    keep: Keep | None = None,
    differentiate: Differentiate | None = None,
) -> Callable[..., Any]:
    """Return a function that calls an operator or, when nothing is being traced, what is behind it.

    Args:
        operator: The operator, as registered with `torch.library`.
        function: The function behind it.
        keep: As registered with the operator, if it has a gradient.
        differentiate: As registered with the operator, if it has a gradient.
    """
    plain = function
    if keep is not None and differentiate is not None:
        plain = _make_function(function, keep, differentiate)

    def call(*arguments: Any) -> Any:
        # Asked at every call: the same function may be traced now and run directly later.
        is_traced = is_compiling() or count_dispatch_modes() > 0
        return (operator if is_traced else plain)(*arguments)

    return call


def _make_function(
    function: Callable[..., Any], keep: Keep, differentiate: Differentiate
) -> Callable[..., Any]:
    """Return the function with its gradient. If no argument requires a gradient, it is called as it
    is."""

    class Differentiated(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *arguments: Any) -> Any:
            # Inside forward no graph is recorded, so the function is just run.
            output = function(*arguments)
            keep(ctx, arguments, output)
            return output

        @staticmethod
        def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
            return differentiate(ctx, *gradients)

    # Without what transforms of `torch.func` need, which looks at each argument of each call in
    # Python: where anything traces, the operator is called instead.
    apply = super(torch.autograd.Function, Differentiated).apply

    def call(*arguments: Any) -> Any:
        # autograd.Function costs host time, so it is used only where a gradient is needed.
        if torch.is_grad_enabled():
            for argument in arguments:
                if isinstance(argument, Tensor) and argument.requires_grad:
                    return apply(*arguments)
        return function(*arguments)

    return call
