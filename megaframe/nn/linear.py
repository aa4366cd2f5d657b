"""Linear layers whose backward adds the weight gradient straight into the gradient bucket.

Shape legend: T tokens (all leading dims), I inputs, O outputs.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megaframe.parameter import Module, Parameter
from megaframe.product import product
from megaframe.spec import Constant, Normal, ParamSpec

Elementwise = Callable[[Tensor], Tensor]
"""Something cheap between two matrix products: a norm or an activation."""


class Linear(Module):
    """y = x W^T + b.

    The weight has shape (*outputs, *inputs): fused parts and heads stay dims of their own, so that
    a shard is a plain slice. `split` is the dim of the weight that lies on the tensor axis.
    """

    def __init__(
        self,
        name: str,
        inputs: tuple[int, ...],
        outputs: tuple[int, ...],
        *,
        std: float,
        split: int,
        bias: bool,
    ) -> None:
        self.weight = Parameter(
            ParamSpec(
                f"{name}.weight",
                (*outputs, *inputs),
                Normal(std),
                role="matrix",
                decay=True,
                axes={split: "tensor"},
            )
        )
        self.bias: Parameter | None = None
        if bias:
            axes = {split: "tensor"} if split < len(outputs) else {}
            spec = ParamSpec(f"{name}.bias", outputs, Constant(0.0), role="bias", axes=axes)
            self.bias = Parameter(spec)
        self._outputs = len(outputs)

    def __call__(self, x: Tensor, before: Elementwise, *, again: bool) -> Tensor:
        """before(x) [..., I] to [..., O], inputs and outputs flattened.

        `before` is a norm or an activation, cheap to compute beside the product. With `again` only
        its input is kept, and backward computes it a second time.
        """
        if again:
            return _Linear.apply(x, self.weight, self.bias, self._outputs, before)
        return self.plain(before(x))

    def plain(self, x: Tensor) -> Tensor:
        """x [..., I] to [..., O], inputs and outputs flattened."""
        return _Linear.apply(x, self.weight, self.bias, self._outputs, None)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Parameter,
        bias: Parameter | None,
        outputs: int,
        before: Elementwise | None,
    ) -> Tensor:
        weight_OI = weight.value.view(math.prod(weight.value.shape[:outputs]), -1)
        ctx.save_for_backward(x)
        ctx.weight, ctx.bias, ctx.weight_OI, ctx.before = weight, bias, weight_OI, before
        source = x if before is None else before(x)
        flat = source.reshape(-1, source.shape[-1])
        y = product(flat, weight_OI.t(), None if bias is None else bias.value.view(-1))
        return y.view(*x.shape[:-1], y.shape[-1])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, None, None, None, None]:
        (x,) = ctx.saved_tensors
        dy_TO = gradients[0].reshape(-1, gradients[0].shape[-1])
        source = x
        if ctx.before is not None:
            x = x.detach().requires_grad_()
            with torch.enable_grad():
                source = ctx.before(x)
        flat = source.detach().reshape(-1, source.shape[-1])
        ctx.weight.add_product(dy_TO, flat)
        if ctx.bias is not None:
            ctx.bias.add(dy_TO.sum(0).view_as(ctx.bias.grad))
        dx: Tensor | None = product(dy_TO, ctx.weight_OI).view_as(source)
        if ctx.before is not None:
            source.backward(dx)
            dx = x.grad
        return dx, None, None, None, None
