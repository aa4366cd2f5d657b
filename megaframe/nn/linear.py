"""Linear layers whose backward adds the weight gradient straight into the gradient bucket, or
leaves it for later.

Shape legend: T tokens (all leading dims), I inputs, O outputs.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megaframe.nn.frame import Frame, Later
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

    def __call__(self, x: Tensor, before: Elementwise, frame: Frame) -> Tensor:
        """before(x) [..., I] to [..., O], inputs and outputs flattened.

        `before` is a norm or an activation, cheap to compute beside the product. With a selective
        frame only its input is kept, and backward computes it a second time.
        """
        if frame.selective:
            return _Linear.apply(x, self, frame.later, before)
        return self.plain(before(x), frame)

    def plain(self, x: Tensor, frame: Frame) -> Tensor:
        """x [..., I] to [..., O], inputs and outputs flattened."""
        return _Linear.apply(x, self, frame.later, None)

    def matrix(self) -> Tensor:
        """The weight as a matrix [O, I]."""
        return self.weight.value.view(math.prod(self.weight.value.shape[: self._outputs]), -1)

    def add_gradients(self, dy_TO: Tensor, x_TI: Tensor) -> None:
        """Add the gradients of weight and bias."""
        self.weight.add_product(dy_TO, x_TI)
        if self.bias is not None:
            self.bias.add(dy_TO.sum(0).view_as(self.bias.grad))


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, linear: Linear, later: Later, before: Elementwise | None
    ) -> Tensor:
        ctx.save_for_backward(x)
        ctx.linear, ctx.later, ctx.before = linear, later, before
        source = x if before is None else before(x)
        flat = source.reshape(-1, source.shape[-1])
        bias = None if linear.bias is None else linear.bias.value.view(-1)
        y = product(flat, linear.matrix().t(), bias)
        return y.view(*x.shape[:-1], y.shape[-1])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, None, None, None]:
        (x,) = ctx.saved_tensors
        dy_TO = gradients[0].reshape(-1, gradients[0].shape[-1])
        source = x
        if ctx.before is not None:
            x = x.detach().requires_grad_()
            with torch.enable_grad():
                source = ctx.before(x)
        flat = source.detach().reshape(-1, source.shape[-1])
        ctx.later.do(partial(ctx.linear.add_gradients, dy_TO, flat))
        dx: Tensor | None = product(dy_TO, ctx.linear.matrix()).view_as(source)
        if ctx.before is not None:
            source.backward(dx)
            dx = x.grad
        return dx, None, None, None
