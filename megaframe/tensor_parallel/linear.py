"""Linear layers whose backward pass adds the weight gradient directly to the gradient bucket, or
defers it.

Shape legend: T rows, I inputs, O outputs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megaframe.architecture.adapters import Adapter
from megaframe.architecture.linear import LinearSpec
from megaframe.distributed.collectives import ALONE, Pending, all_gather
from megaframe.ops.autograd import backward, get_direct_apply
from megaframe.ops.kernel_dispatch import Kernels
from megaframe.parameters.parameter import Module, Parameter
from megaframe.tensor_parallel import symmetric_memory
from megaframe.tensor_parallel.adapted_results import AdaptedRows, RowMagnitudes, apply_addition
from megaframe.tensor_parallel.axis import TensorParallel
from megaframe.tensor_parallel.chunked_collectives import (
    RowAssembly,
    gather_chunks,
    scatter_chunks,
    wait_for_rows,
)
from megaframe.tensor_parallel.deferred_gradients import DeferredGradients, InputDropout

Elementwise = Callable[[Tensor, Kernels], Tensor]
"""A cheap operation before a matrix product: a norm or an activation, computed with these
kernels."""


class Linear(Module):
    """y = x W^T + b.

    The weight has shape (*outputs, *inputs): fused parts and heads stay separate dims, so that a
    shard is a plain slice.
    """

    def __init__(self, name: str, spec: LinearSpec, tensor: TensorParallel) -> None:
        """Make the parameters.

        Args:
            name: Of the layer in the model.
            spec: What it declares.
            tensor: The tensor ranks, and how products are computed.
        """
        weight, *bias = map(Parameter, spec.declare_own_parameters(name))
        self.weight = weight
        self.bias: Parameter | None = bias[0] if bias else None
        self.tensor, self.spec = tensor, spec
        self._outputs = len(spec.outputs)
        self._viewed = self._matrix = self.weight.value
        self.is_local = spec.split is None or tensor.group.size == 1
        """Whether this rank computes the product of its rows alone."""
        self.column = spec.is_column
        self.adapters = [LowRankAdapter(name, spec, place, tensor) for place in spec.adapters]
        self.magnitudes = self._make_magnitudes() if spec.rescales else None

    def __call__(
        self, x: Tensor, deferred: DeferredGradients, before: Elementwise | None = None
    ) -> Tensor:
        """Return before(x) W^T + b.

        Args:
            x: This rank's rows [rows, I], for a row linear [T, I of this rank].
            deferred: Computes or keeps the weight gradients of this backward pass.
            before: A norm or an activation, cheap compared to the product. If the run recomputes
                these, only x is kept, and the backward pass computes before(x) again.

        Returns:
            [T, O of this rank] from a column linear, else this rank's rows [rows, O].
        """
        if before is not None and not self.tensor.recompute:
            # Outside of `_Linear`, so that autograd keeps what its backward pass needs.
            x, before = before(x, self.tensor.kernels), None
        y = _apply_linear(x, self, deferred, before)
        for adapter in self.adapters:
            y = adapter.add_to(y, x, self.weight.box.shape[: self._outputs], deferred, before)
        if self.magnitudes is not None:
            y = self.magnitudes.rescale(y)
            y = y if self.bias is None else y.add_(self.bias.value.view(-1))
        return y

    def _make_magnitudes(self) -> RowMagnitudes:
        rows = [
            AdaptedRows(each.place, each.a.weight, each.b.weight, each.magnitude)
            for each in self.adapters
            if each.magnitude is not None
        ]
        divided = self.spec.is_row and not self.is_local
        return RowMagnitudes(self.weight, rows, self.tensor.group if divided else ALONE)

    @property
    def matrix(self) -> Tensor:
        """This rank's part of the weight as a matrix [O, I]."""
        value = self.weight.value
        # Made again only where the value was withdrawn in between (ZeRO stage 3).
        if self._viewed is not value:
            self._viewed = value
            self._matrix = value.view(math.prod(value.shape[: self._outputs]), -1)
        return self._matrix

    @property
    def flat_bias(self) -> Tensor | None:
        """This rank's part of the bias, [O]; None if there is none, or if what it is added to is
        rescaled before."""
        if self.bias is None or self.magnitudes is not None:
            return None
        return self.bias.value.view(-1)

    def add_bias_gradient(self, dy_TO: Tensor) -> None:
        """Add the gradient of the bias, if there is one."""
        if self.bias is not None:
            self.bias.add(dy_TO.sum(0).view(self.bias.box.shape))


class LowRankAdapter(Module):
    """What is added to the results of one matrix of a linear layer: scale B A x; and with DoRA the
    magnitudes of its rows.

    Both products are linear layers themselves, so only the few numbers per row between them travel
    between tensor ranks, in one part.
    """

    def __init__(self, name: str, spec: LinearSpec, place: Adapter, tensor: TensorParallel) -> None:
        """Make the parameters.

        Args:
            name: Of the linear layer in the model.
            spec: What that declares.
            place: Which adapter this is.
            tensor: The tensor ranks, and how products are computed.
        """
        tensor = replace(tensor, chunks=1, symmetric=False, fp8=None)
        self.place, self.name = place, place.name_factors(name)[0]
        self.a, self.b = (
            Linear(factor_name, factor, tensor)
            for factor, factor_name in zip(
                spec.make_factors(place), place.name_factors(name), strict=True
            )
        )
        self.magnitude = Parameter(spec.declare_magnitude(place, name)) if place.dora else None
        self._first_input = len(self.a.spec.outputs)

    def add_to(
        self,
        y: Tensor,
        x: Tensor,
        outputs: tuple[int, ...],
        deferred: DeferredGradients,
        before: Elementwise | None,
    ) -> Tensor:
        """Return the results of the linear layer with what this adds to them.

        Args:
            y: The results, which are overwritten.
            x: Input of the linear layer.
            outputs: Dims of this rank's results.
            deferred: That of the linear layer,
            before: and its norm or activation.
        """
        place = self.place
        if place.dropout and deferred.dropout is not None:
            before = partial(self._drop, before, deferred.dropout)
        low = _apply_linear(x, self.a, deferred, before)
        low = low if place.scale == 1.0 else low * place.scale
        return apply_addition(y, _apply_linear(low, self.b, deferred, None), outputs, place)

    def _drop(
        self, before: Elementwise | None, dropout: InputDropout, x: Tensor, kernels: Kernels
    ) -> Tensor:
        """Return the inputs of A with some of them 0, the same under every layout."""
        x = x if before is None else before(x, kernels)
        box = self.a.weight.box
        # A row linear has some of the inputs of all rows; any other one all inputs of its own rows.
        first = box.offset[self._first_input] * math.prod(box.shape[self._first_input + 1 :])
        divided = self.a.spec.is_row and not self.a.is_local
        return dropout(x, self.name, first, all_rows=divided)


class _Linear(torch.autograd.Function):
    """The product, with its communication over the tensor axis.

    A column linear holds some of the outputs and first gathers the rows of all ranks. A row linear
    holds some of the inputs, so its product is a partial sum, which is reduce-scattered over the
    rows.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, linear: Linear, deferred: DeferredGradients, before: Elementwise | None
    ) -> Tensor:
        # Nothing gathered, and of a recomputed norm or activation only the input. The backward
        # pass gathers and computes the rest again.
        ctx.save_for_backward(x)
        ctx.linear, ctx.deferred, ctx.before = linear, deferred, before
        tensor, matrix, bias = linear.tensor, linear.matrix, linear.flat_bias
        group = tensor.group
        if linear.is_local:
            x = x if before is None else before(x, tensor.kernels)
            return tensor.forward_product(x, matrix, bias)
        if linear.column:
            # Before the rows are gathered, so that each rank normalises only its own.
            x = _apply(before, x, tensor)
            if not tensor.symmetric:
                y_TO = RowAssembly(len(x) * group.size, group.size)
                # The product of one part is computed while the next part travels.
                for part in gather_chunks(x, group, tensor.chunks):
                    y_TO.add(tensor.forward_product(part, matrix, bias))
                return y_TO.rows
            y = symmetric_memory.gather_and_multiply(x, matrix.t(), group)
        elif tensor.symmetric:
            y = symmetric_memory.multiply_and_scatter(_apply(before, x, tensor), matrix.t(), group)
        else:

            def compute_partial_sums(part: Tensor) -> Tensor:
                return tensor.forward_product(_apply(before, part, tensor), matrix, None)

            # The partial sums of one part travel while the product of the next part is computed.
            y = wait_for_rows(scatter_chunks(x, compute_partial_sums, group, tensor.chunks))
        # Once, after the sum over the ranks, and in place: y is new memory.
        return y if bias is None else y.add_(bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, None, None, None]:
        (x,) = ctx.saved_tensors
        linear, deferred, dy = ctx.linear, ctx.deferred, gradients[0]
        tensor = linear.tensor
        # Started first, so that the first part travels while the operand is computed again.
        dy_parts = None if linear.is_local or linear.column else _gather_gradient(dy, tensor)
        operand = x
        if ctx.before is not None:
            # A graph of its own for the norm or activation, from x to the operand of the product.
            x = x.detach().requires_grad_()
            with torch.enable_grad():
                operand = ctx.before(x, tensor.kernels)
        dx: Tensor | None
        if dy_parts is not None:
            dx = _backward_row(linear, deferred, dy, dy_parts, operand.detach())
        elif linear.is_local:
            dx = _backward_locally(linear, deferred, dy, operand.detach())
        else:
            dx = _backward_column(linear, deferred, dy, operand.detach())
        if ctx.before is not None:
            # dx is the gradient of the operand so far; this turns it into that of x.
            backward(operand, dx)
            dx = x.grad
        return dx, None, None, None


_apply_linear = get_direct_apply(_Linear)


def _apply(before: Elementwise | None, x: Tensor, tensor: TensorParallel) -> Tensor:
    """Return the operand of the product: before(x), or x."""
    return x if before is None else before(x, tensor.kernels)


def _gather_gradient(dy: Tensor, tensor: TensorParallel) -> Iterator[Tensor]:
    return gather_chunks(dy, tensor.group, tensor.chunks)


def _backward_locally(linear: Linear, deferred: DeferredGradients, dy: Tensor, x: Tensor) -> Tensor:
    """Compute the gradients without communication. If several tensor ranks have the weight, its
    gradient is later summed over them, as its spec says."""

    def add_weight_gradient() -> None:
        linear.tensor.add_weight_gradient(linear.weight, dy, x)
        if linear.bias is not None:
            linear.add_bias_gradient(dy)

    deferred.add(add_weight_gradient)
    return linear.tensor.compute_input_gradient(dy, linear.matrix)


def _backward_column(linear: Linear, deferred: DeferredGradients, dy: Tensor, x: Tensor) -> Tensor:
    """Compute the gradients of a column linear, [rows, I] for its input. Each transfer overlaps
    with a product."""
    tensor, group = linear.tensor, linear.tensor.group
    # A deferred gradient keeps only this rank's rows, and gathers the others when it is computed.
    # Started first: the input travels while its gradient is computed.
    gathered = None if deferred.deferring else all_gather(x, group)

    def compute_input_gradient(part: Tensor) -> Tensor:
        return tensor.compute_input_gradient(part, linear.matrix)

    scattered = scatter_chunks(dy, compute_input_gradient, group, tensor.chunks)

    def add_weight_gradient(rows_TI: Tensor) -> None:
        tensor.add_weight_gradient(linear.weight, dy, rows_TI)
        linear.add_bias_gradient(dy)

    # Unless deferred, it is computed here, while the gradient of the input is reduce-scattered.
    deferred.add(add_weight_gradient, lambda: gathered or all_gather(x, group))
    return wait_for_rows(scattered)


def _backward_row(
    linear: Linear, deferred: DeferredGradients, dy: Tensor, dy_parts: Iterator[Tensor], x: Tensor
) -> Tensor:
    """Compute the gradients of a row linear.

    Args:
        linear: The layer.
        deferred: Takes the weight gradient if that is computed later.
        dy: Gradient of this rank's rows of the outputs.
        dy_parts: `dy` of all ranks in parts; the first part has been in transit while `x` was
            computed.
        x: The inputs, of all rows.

    Returns:
        The gradient of `x`.
    """
    tensor, group = linear.tensor, linear.tensor.group
    total, deferring = len(dy) * group.size, deferred.deferring
    dy_TO, dx = RowAssembly(total, group.size), RowAssembly(total, group.size)
    for part in dy_parts:
        # No communication after the product: each rank keeps the gradient of its own inputs, for
        # all rows.
        dx.add(tensor.compute_input_gradient(part, linear.matrix))
        if not deferring:
            dy_TO.add(part)

    def add_weight_gradient(rows_TO: Tensor) -> None:
        tensor.add_weight_gradient(linear.weight, rows_TO, x)
        # The bias is added to this rank's rows only; its gradient is summed over the tensor ranks.
        linear.add_bias_gradient(dy)

    # A deferred gradient keeps only this rank's rows, and gathers them again.
    deferred.add(
        add_weight_gradient, lambda: all_gather(dy, group) if deferring else Pending(dy_TO.rows)
    )
    return dx.rows
