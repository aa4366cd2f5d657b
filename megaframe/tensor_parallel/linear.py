"""Linear layers whose backward pass adds the weight gradient directly to the gradient bucket, or
defers it.

Shape legend: T rows, I inputs, O outputs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from megaframe.distributed.collectives import Pending, all_gather, reduce_scatter
from megaframe.model.forward_context import Frame
from megaframe.ops.autograd import backward
from megaframe.ops.kernel_dispatch import Kernels
from megaframe.parameters.parameter import Module, Parameter
from megaframe.parameters.spec import Constant, Normal, ParamSpec
from megaframe.tensor_parallel import symmetric_memory
from megaframe.tensor_parallel.chunked_collectives import Whole, arrived, gather, split

Elementwise = Callable[[Tensor, Kernels], Tensor]
"""A cheap operation before a matrix product: a norm or an activation, computed with these
kernels."""


class Linear(Module):
    """y = x W^T + b.

    The weight has shape (*outputs, *inputs): fused parts and heads stay separate dims, so that a
    shard is a plain slice. split: the dim of the weight that is divided over the tensor axis, one
    of the outputs (a column linear) or of the inputs (a row linear). With None every rank has the
    whole weight and multiplies its own rows, without communication. fused: {dim along which the
    weight is several matrices: their sizes}.
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
        """Return before(x) W^T + b, [rows, O], for x [rows, I] with inputs and outputs flattened.

        before: a norm or an activation, cheap compared to the product. With a selective frame only
        x is kept, and the backward pass computes before(x) again.
        """
        if frame.selective:
            return _Linear.apply(x, self, frame, before)
        return self.plain(before(x, frame.kernels), frame)

    def plain(self, x: Tensor, frame: Frame) -> Tensor:
        """Return x W^T + b, [rows, O], for x [rows, I] with inputs and outputs flattened."""
        return _Linear.apply(x, self, frame, None)

    def matrix(self) -> Tensor:
        """Return this rank's part of the weight as a matrix [O, I]."""
        return self.weight.value.view(math.prod(self.weight.value.shape[: self._outputs]), -1)

    def flat_bias(self) -> Tensor | None:
        """Return this rank's part of the bias, [O], or None."""
        return None if self.bias is None else self.bias.value.view(-1)

    def add_bias_gradient(self, dy_TO: Tensor) -> None:
        """Add the gradient of the bias, if there is one."""
        if self.bias is not None:
            self.bias.add(dy_TO.sum(0).view(self.bias.box.shape))


def as_it_is(x: Tensor, _: Kernels) -> Tensor:
    """Return x. Used as `before` if the norm or activation was already applied."""
    return x


class _Linear(torch.autograd.Function):
    """The product, with its communication over the tensor axis.

    A column linear holds some of the outputs and first gathers the rows of all ranks. A row linear
    holds some of the inputs, so its product is a partial sum: it is reduce-scattered over the rows,
    and the bias is added once, after that. If rows travel in parts, the product of one part is
    computed while another part travels.
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
            y = symmetric_memory.gather_product(x, matrix.t(), group)
        elif frame.symmetric:
            y = symmetric_memory.product_scatter(_made(x, before, frame), matrix.t(), group)
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
    """Return the operand of the product: before(x), or x."""
    return x if before is None else before(x, frame.kernels)


def _whole_backward(linear: Linear, frame: Frame, dy: Tensor, x: Tensor) -> Tensor:
    """Compute the gradients without communication. The weight gradient is later summed over the
    tensor ranks, as its spec says."""

    def weight() -> None:
        frame.add_weight_gradient(linear.weight, dy, x)
        linear.add_bias_gradient(dy)

    frame.later.do(weight)
    return frame.input_gradient(dy, linear.matrix())


def _column_backward(linear: Linear, frame: Frame, dy: Tensor, x: Tensor) -> Tensor:
    """Compute the gradients of a column linear. Each transfer overlaps with a product: the input is
    gathered while its gradient is computed, and that gradient is reduce-scattered while the weight
    gradient is computed."""
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
    """Compute the gradients of a row linear. coming: `dy` of all ranks in parts; the first part has
    been in transit while `x` was computed. If weight gradients are deferred, only this rank's rows
    are kept and they are gathered again later."""
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
    """Apply `of` to each part of x, and start to reduce-scatter each result as soon as it is
    computed. The results are the parts of this rank's rows."""
    return [reduce_scatter(of(part), frame.tensor) for part in split(x, frame)]
