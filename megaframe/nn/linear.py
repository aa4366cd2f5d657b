"""Linear layers whose backward adds the weight gradient straight into the gradient bucket, or
leaves it for later.

Shape legend: T rows, I inputs, O outputs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from megaframe.backward import backward
from megaframe.comm import Pending, all_gather, reduce_scatter, symmetric
from megaframe.kernels import Kernels
from megaframe.nn.frame import Frame
from megaframe.nn.parts import Whole, arrived, gather, split
from megaframe.parameter import Module, Parameter
from megaframe.spec import Constant, Normal, ParamSpec

Elementwise = Callable[[Tensor, Kernels], Tensor]
"""Something cheap between two matrix products, a norm or an activation, by these kernels."""


class Linear(Module):
    """y = x W^T + b.

    The weight has shape (*outputs, *inputs): fused parts and heads stay dims of their own, so that
    a shard is a plain slice. `split` is the dim of the weight that lies on the tensor axis: one of
    the outputs (a column linear) or of the inputs (a row linear). Without one every rank has all of
    it and multiplies its own rows, which go nowhere. fused: {dim along which the weight is several
    matrices: their sizes}.
    """

    def __init__(
        self,
        name: str,
        inputs: tuple[int, ...],
        outputs: tuple[int, ...],
        *,
        std: float,
        split: int | None,
        bias: bool,
        fused: Mapping[int, tuple[int, ...]] | None = None,
    ) -> None:
        self.weight = Parameter(
            ParamSpec(
                f"{name}.weight",
                (*outputs, *inputs),
                Normal(std),
                role="matrix",
                decay=True,
                axes={} if split is None else {split: "tensor"},
                inputs=len(inputs),
                fused=fused or {},
            )
        )
        self.bias: Parameter | None = None
        if bias:
            axes = {} if split is None or split >= len(outputs) else {split: "tensor"}
            spec = ParamSpec(f"{name}.bias", outputs, Constant(0.0), role="bias", axes=axes)
            self.bias = Parameter(spec)
        self._outputs = len(outputs)
        self.whole = split is None
        self.column = split is not None and split < len(outputs)

    def __call__(self, x: Tensor, before: Elementwise, frame: Frame) -> Tensor:
        """before(x) [rows, I] to [rows, O], inputs and outputs flattened.

        `before` is a norm or an activation, cheap to compute beside the product. With a selective
        frame only its input is kept, and backward computes it a second time.
        """
        if frame.selective:
            return _Linear.apply(x, self, frame, before)
        return self.plain(before(x, frame.kernels), frame)

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


def as_it_is(x: Tensor, _: Kernels) -> Tensor:
    """x, in the place of something cheap that was done before."""
    return x


class _Linear(torch.autograd.Function):
    """With a tensor axis, a column linear holds some outputs: it gathers the rows of all ranks
    first. A row linear holds some inputs, so that its product is a part of a sum: it is summed and
    scattered, rows to their ranks, and the bias added once, after that. In parts, the product of
    one is made while another travels.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, linear: Linear, frame: Frame, before: Elementwise | None
    ) -> Tensor:
        ctx.save_for_backward(x)
        ctx.linear, ctx.frame, ctx.before = linear, frame, before
        group, matrix, bias = frame.tensor, linear.matrix(), linear.flat_bias()
        if linear.whole:
            return frame.forward_product(_made(x, before, frame), matrix, bias)
        if linear.column or group.size == 1:
            x = _made(x, before, frame)
            if not frame.symmetric:
                y_TO = Whole(frame)
                for part in gather(x, frame):
                    y_TO.add(frame.forward_product(part, matrix, bias))
                return y_TO.rows
            y = symmetric.gather_product(x, matrix.t(), group)
        elif frame.symmetric:
            y = symmetric.product_scatter(_made(x, before, frame), matrix.t(), group)
        else:

            def of(part: Tensor) -> Tensor:
                return frame.forward_product(_made(part, before, frame), matrix, None)

            y = arrived(_scatter(x, of, frame))
        return y if bias is None else y.add_(bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, None, None, None]:
        (x,) = ctx.saved_tensors
        linear, frame, dy = ctx.linear, ctx.frame, gradients[0]
        coming = None if linear.whole or linear.column else gather(dy, frame)
        source = x
        if ctx.before is not None:
            x = x.detach().requires_grad_()
            with torch.enable_grad():
                source = ctx.before(x, frame.kernels)
        dx: Tensor | None
        if coming is not None:
            dx = _row_backward(linear, frame, dy, coming, source.detach())
        elif linear.whole:
            dx = _whole_backward(linear, frame, dy, source.detach())
        else:
            dx = _column_backward(linear, frame, dy, source.detach())
        if ctx.before is not None:
            backward(source, dx)
            dx = x.grad
        return dx, None, None, None


def _made(x: Tensor, before: Elementwise | None, frame: Frame) -> Tensor:
    """What the product takes."""
    return x if before is None else before(x, frame.kernels)


def _whole_backward(linear: Linear, frame: Frame, dy: Tensor, x: Tensor) -> Tensor:
    """Nothing travels: the weight's gradient is summed over the ranks, as its spec says."""

    def weight() -> None:
        frame.add_weight_gradient(linear.weight, dy, x)
        linear.add_bias_gradient(dy)

    frame.later.do(weight)
    return frame.input_gradient(dy, linear.matrix())


def _column_backward(linear: Linear, frame: Frame, dy: Tensor, x: Tensor) -> Tensor:
    """Both transfers run beside a product: the input is gathered while the gradient of it is made,
    and that is scattered while the weight's gradient is made."""
    group, later = frame.tensor, frame.later
    gathered = None if later.hold else all_gather(x, group)
    scattered = _scatter(dy, lambda part: frame.input_gradient(part, linear.matrix()), frame)

    def weight(rows_TI: Tensor) -> None:
        frame.add_weight_gradient(linear.weight, dy, rows_TI)
        linear.add_bias_gradient(dy)

    later.do(weight, lambda: gathered or all_gather(x, group))
    return arrived(scattered)


def _row_backward(
    linear: Linear, frame: Frame, dy: Tensor, coming: Iterator[Tensor], x: Tensor
) -> Tensor:
    """`coming` is `dy` of all ranks, whose first part was on its way while `x` was made. What waits
    for a weight pass keeps the rows of this rank only, and gathers them again."""
    dy_TO, dx = Whole(frame), Whole(frame)
    hold = frame.later.hold
    for part in coming:
        dx.add(frame.input_gradient(part, linear.matrix()))
        if not hold:
            dy_TO.add(part)

    def weight(rows_TO: Tensor) -> None:
        frame.add_weight_gradient(linear.weight, rows_TO, x)
        linear.add_bias_gradient(dy)

    group = frame.tensor
    frame.later.do(weight, lambda: all_gather(dy, group) if hold else Pending(dy_TO.rows))
    return dx.rows


def _scatter(x: Tensor, of: Callable[[Tensor], Tensor], frame: Frame) -> list[Pending[Tensor]]:
    """What comes of each part of x, summed over the ranks and scattered as soon as it is made: the
    parts of this rank's rows."""
    return [reduce_scatter(of(part), frame.tensor) for part in split(x, frame)]
