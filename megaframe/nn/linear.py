"""Linear layers whose backward adds the weight gradient straight into the gradient bucket, or
leaves it for later.

Shape legend: T rows, I inputs, O outputs.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megaframe.comm import all_gather, reduce_scatter
from megaframe.nn.frame import Frame
from megaframe.parameter import Module, Parameter
from megaframe.product import product
from megaframe.spec import Constant, Normal, ParamSpec

Elementwise = Callable[[Tensor], Tensor]
"""Something cheap between two matrix products: a norm or an activation."""


class Linear(Module):
    """y = x W^T + b.

    The weight has shape (*outputs, *inputs): fused parts and heads stay dims of their own, so that
    a shard is a plain slice. `split` is the dim of the weight that lies on the tensor axis: one of
    the outputs (a column linear) or of the inputs (a row linear). fused: the dim along which the
    weight is several matrices, and their sizes.
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
        fused: tuple[int, tuple[int, ...]] | None = None,
    ) -> None:
        self.weight = Parameter(
            ParamSpec(
                f"{name}.weight",
                (*outputs, *inputs),
                Normal(std),
                role="matrix",
                decay=True,
                axes={split: "tensor"},
                inputs=len(inputs),
                fused=fused,
            )
        )
        self.bias: Parameter | None = None
        if bias:
            axes = {split: "tensor"} if split < len(outputs) else {}
            spec = ParamSpec(f"{name}.bias", outputs, Constant(0.0), role="bias", axes=axes)
            self.bias = Parameter(spec)
        self._outputs = len(outputs)
        self.column = split < len(outputs)

    def __call__(self, x: Tensor, before: Elementwise, frame: Frame) -> Tensor:
        """before(x) [rows, I] to [rows, O], inputs and outputs flattened.

        `before` is a norm or an activation, cheap to compute beside the product. With a selective
        frame only its input is kept, and backward computes it a second time.
        """
        if frame.selective:
            return _Linear.apply(x, self, frame, before)
        return self.plain(before(x), frame)

    def plain(self, x: Tensor, frame: Frame) -> Tensor:
        """x [rows, I] to [rows, O], inputs and outputs flattened."""
        return _Linear.apply(x, self, frame, None)

    def matrix(self) -> Tensor:
        """This rank's part of the weight as a matrix [O, I]."""
        return self.weight.value.view(math.prod(self.weight.value.shape[: self._outputs]), -1)

    def flat_bias(self) -> Tensor | None:
        """This rank's part of the bias, [O]."""
        return None if self.bias is None else self.bias.value.view(-1)

    def add_bias_gradient(self, dy_TO: Tensor) -> None:
        """Add the gradient of the bias, if there is one."""
        if self.bias is not None:
            self.bias.add(dy_TO.sum(0).view(self.bias.box.shape))


class _Linear(torch.autograd.Function):
    """With a tensor axis, a column linear holds some outputs: it gathers the rows of all ranks
    first. A row linear holds some inputs, so that its product is a part of a sum: it is summed and
    scattered, rows to their ranks, and the bias added once, after that.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, linear: Linear, frame: Frame, before: Elementwise | None
    ) -> Tensor:
        ctx.save_for_backward(x)
        ctx.linear, ctx.frame, ctx.before = linear, frame, before
        source, bias = x if before is None else before(x), linear.flat_bias()
        if linear.column:
            source = all_gather(source, frame.tensor).wait()
        elif frame.tensor.size > 1:
            part = product(source, linear.matrix().t())
            y = reduce_scatter(part, frame.tensor).wait()
            return y if bias is None else y.add_(bias)
        return product(source, linear.matrix().t(), bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, None, None, None]:
        (x,) = ctx.saved_tensors
        source = x
        if ctx.before is not None:
            x = x.detach().requires_grad_()
            with torch.enable_grad():
                source = ctx.before(x)
        grow = _column_backward if ctx.linear.column else _row_backward
        dx: Tensor | None = grow(ctx.linear, ctx.frame, gradients[0], source.detach())
        if ctx.before is not None:
            source.backward(dx)
            dx = x.grad
        return dx, None, None, None


def _column_backward(linear: Linear, frame: Frame, dy: Tensor, x: Tensor) -> Tensor:
    """Both transfers run beside a product: the input is gathered while the gradient of it is made,
    and that is scattered while the weight's gradient is made."""
    group, later = frame.tensor, frame.later
    gathered = None if later.hold else all_gather(x, group)
    scattered = reduce_scatter(product(dy, linear.matrix()), group)

    def weight() -> None:
        rows = (gathered or all_gather(x, group)).wait()
        linear.weight.add_product(dy, rows)
        linear.add_bias_gradient(dy)

    later.do(weight)
    return scattered.wait()


def _row_backward(linear: Linear, frame: Frame, dy: Tensor, x: Tensor) -> Tensor:
    rows = all_gather(dy, frame.tensor).wait()

    def weight() -> None:
        linear.weight.add_product(rows, x)
        linear.add_bias_gradient(dy)

    frame.later.do(weight)
    return product(rows, linear.matrix())
