"""Parameter: a spec realised on one rank; and Module: the tree that owns parameters.

A parameter is not a torch Parameter. The model computes with `value` and gradients are summed into
`grad`. Both are views into a flat bucket, which binds them, and exist nowhere else. Matrices add
their gradient directly into `grad`; everything else goes through `use()`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megaframe.architecture.spec import Box, ParamSpec
from megaframe.ops.autograd import get_direct_apply
from megaframe.ops.kernel_dispatch import NO_KERNELS, Kernels
from megaframe.ops.matmul import write_weight_gradient


@dataclass(frozen=True)
class Precision:
    """The types of numbers.

    Attributes:
        compute: Type of values and activations.
        master: Type of master weights, of gradients and of optimizer state.
    """

    compute: torch.dtype
    master: torch.dtype


PRECISIONS = {
    "fp32": Precision(torch.float32, torch.float32),
    "bf16": Precision(torch.bfloat16, torch.float32),
    "fp16": Precision(torch.float16, torch.float32),
    "fp64": Precision(torch.float64, torch.float64),
}


_ABSENT = torch.empty(0)
"""Placeholder for a value or gradient that is not on this rank at the moment."""


class Parameter:
    """The local piece of one logical tensor.

    Attributes:
        spec: What the layer that owns it declares.
        box: Which piece of the tensor this is.
        value: In compute precision. A view into a bucket, absent while nothing needs it.
        grad: The sum of gradients, in master precision; a view into a bucket too.
        fresh: Nothing was added to `grad` yet. The first addition overwrites the old content, so it
            is never cleared. If matrices along dim 0 are added to separately, this holds for each.
        replica: Another rank's stage has the same parameter, and counts and saves it. The gradients
            of both are summed.
        frozen: The parameter is not trained and has no `grad`.
        missing: Matrices along dim 0 that separate additions have not reached; they hold an old
            sum.
    """

    __slots__ = ("_open", "box", "fresh", "frozen", "grad", "missing", "replica", "spec", "value")

    box: Box
    value: Tensor
    grad: Tensor

    def __init__(self, spec: ParamSpec, *, replica: bool = False) -> None:
        self.spec = spec
        self.replica = replica
        self.fresh = True
        self.frozen = False
        self.value = self.grad = _ABSENT
        self.missing: set[int] = set()

    def bind(self, box: Box, open_grad: Callable[[], object] | None) -> None:
        """Set which piece of the tensor this is.

        Args:
            box: The piece.
            open_grad: Called before the first addition if `grad` is not there, to set it. With
                None the parameter is frozen.
        """
        self.box, self._open, self.frozen = box, open_grad, open_grad is None

    def release_value(self) -> None:
        """Drop `value`; nothing may compute with the parameter until it is set again."""
        self.value = _ABSENT

    def release_grad(self) -> None:
        """Drop `grad`, whose sum has been taken elsewhere; the next addition starts a new sum."""
        self.grad, self.fresh = _ABSENT, True

    def use(self) -> Tensor:
        """Return `value` for ordinary autograd. The gradient is added to `grad`."""
        if self.frozen or not torch.is_grad_enabled():
            return self.value
        # A leaf that requires a gradient, so that autograd calls `_Use.backward`, which adds to
        # `grad` and leaves the leaf without one.
        return _apply_use(self.value.detach().requires_grad_(), self)

    def add(self, gradient: Tensor, matrix: int | None = None) -> None:
        """Add to the gradient.

        Args:
            gradient: What to add, in the shape of `grad`, or of one matrix of it.
            matrix: Index along dim 0 of the only matrix to add to; None for all.
        """
        if self.frozen:
            return
        grad, add = self._begin(matrix)
        if add:
            grad.add_(gradient)
        else:
            grad.copy_(gradient)

    def add_product(self, left_TO: Tensor, right_TI: Tensor, matrix: int | None = None) -> None:
        """Add left^T right, the gradient of a matrix [O, I] over T tokens.

        Args:
            left_TO: Gradient of the outputs, [T, O].
            right_TI: The inputs, [T, I].
            matrix: Index along dim 0 of the only matrix to add to; None for all.
        """
        if self.frozen:
            return
        grad, add = self._begin(matrix)
        grad_OI = grad.view(left_TO.shape[-1], right_TI.shape[-1])
        # Adds into the bucket itself, whose type is that of the master weights.
        write_weight_gradient(grad_OI, left_TO, right_TI, add=add)

    def add_grouped(
        self, left_NO: Tensor, right_NI: Tensor, ends_E: Tensor, kernels: Kernels = NO_KERNELS
    ) -> None:
        """Add the gradients of the matrices of all experts in one operation.

        Args:
            left_NO: Gradient of the outputs, [N, O], sorted by expert.
            right_NI: The inputs, [N, I], in the same order.
            ends_E: The rows of expert e end before row ends_E[e].
            kernels: The kernels of the run.
        """

        def add_into(grad: Tensor, add: bool) -> None:
            grads_EOI = grad.view(len(ends_E), -1, grad.shape[-1])
            arguments = grads_EOI, left_NO, right_NI, ends_E, add
            if kernel := kernels.find("grouped_gradient", *arguments):
                kernel(*arguments)
                return
            # torch's product has a result of its own type, which is then added in master precision.
            product_EOI = F.grouped_mm(left_NO.t(), right_NI, offs=ends_E).view(grad.shape)
            if add:
                grad.add_(product_EOI)
            else:
                grad.copy_(product_EOI)

        self.add_with(add_into)

    def add_with(self, add_into: Callable[[Tensor, bool], None]) -> None:
        """Call add_into(grad, add), which adds to `grad` itself, or overwrites it if `add` is
        false."""
        if not self.frozen:
            add_into(*self._begin())

    def add_rows(self, index_T: Tensor, gradient_TI: Tensor) -> None:
        """Add to rows of the gradient: grad[index] += gradient, as after a table lookup.

        Args:
            index_T: Row of the table for each token, [T]; may repeat.
            gradient_TI: What to add to these rows, [T, I].
        """
        if self.frozen:
            return
        self.finish()
        # Rows that occur more than once are summed in master precision. The table must be zero
        # before, which `finish` ensures.
        self.grad.index_add_(0, index_T, gradient_TI.to(self.grad.dtype))

    def finish(self) -> None:
        """Make `grad` a valid sum even if nothing was added to it or to some of its matrices."""
        grad, add = self._begin()
        if not add:
            grad.zero_()

    def _begin(self, matrix: int | None = None) -> tuple[Tensor, bool]:
        """Prepare an addition to a matrix by its number, or to all of `grad` if None. Returns the
        tensor to add to, and whether to add: false for the first addition, which must overwrite."""
        if self.fresh:
            if self._open is not None and self.grad is _ABSENT:
                # Borrows the buffer of the bucket, and so sets `grad`.
                self._open()
            self.fresh = False
            self.missing = set(range(len(self.grad))) if matrix is not None else set()
            if matrix is None:
                return self.grad, False
        if matrix is None:
            # What the separate additions have left out still holds an old sum.
            for index in self.missing:
                self.grad[index].zero_()
            self.missing.clear()
            return self.grad, True
        add = matrix not in self.missing
        self.missing.discard(matrix)
        return self.grad[matrix], add


class _Use(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, parameter: Parameter) -> Tensor:
        ctx.parameter = parameter
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, None]:
        # The leaf gets no gradient of its own, so nothing is stored twice.
        ctx.parameter.add(gradients[0])
        return None, None


_apply_use = get_direct_apply(_Use)


class Module:
    """A part of the model. Its parameters are found in its attributes, in order of assignment."""

    def parameters(self) -> Iterator[Parameter]:
        """Yield every parameter below this module once."""
        yielded: set[int] = set()
        for parameter in _walk(self):
            if id(parameter) not in yielded:
                yielded.add(id(parameter))
                yield parameter

    @property
    def second_half(self) -> Module | None:
        """The part of a unit that its forward pass uses last and its backward pass finishes first,
        so that its transfers overlap with the computation of the rest. None if there is none."""
        return None


def _walk(node: object) -> Iterator[Parameter]:
    if isinstance(node, Parameter):
        yield node
    elif isinstance(node, Module):
        for child in vars(node).values():
            yield from _walk(child)
    elif isinstance(node, (list, tuple, dict)):
        for child in node.values() if isinstance(node, dict) else node:
            yield from _walk(child)
