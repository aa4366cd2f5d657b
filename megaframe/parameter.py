"""Parameter: a spec made real on one rank, and Module, the tree that owns parameters.

A parameter is not a torch Parameter. The model computes with `value`, gradients are summed into
`grad` (both are views into a flat bucket, which binds them), and there is no other place where
either could live. Matrices add their gradient straight into `grad`; all else goes through `use()`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megaframe.product import product_into
from megaframe.spec import Box, ParamSpec


@dataclass(frozen=True)
class Precision:
    """compute: type of values and activations; master: of weights that are updated, of gradients
    and of optimizer state."""

    compute: torch.dtype
    master: torch.dtype


PRECISIONS = {
    "fp32": Precision(torch.float32, torch.float32),
    "bf16": Precision(torch.bfloat16, torch.float32),
    "fp16": Precision(torch.float16, torch.float32),
    "fp64": Precision(torch.float64, torch.float64),
}


class Parameter:
    """The local piece of one logical tensor.

    value: in compute precision. grad: the sum of gradients, in master precision.
    `fresh` says that nothing was added to `grad` yet, so that its old content is overwritten
    instead of first being set to zero. replica: another rank's stage has the same parameter, counts
    and saves it; their gradients are summed.
    """

    __slots__ = ("box", "fresh", "grad", "replica", "spec", "value")

    box: Box
    value: Tensor
    grad: Tensor

    def __init__(self, spec: ParamSpec, *, replica: bool = False) -> None:
        self.spec = spec
        self.replica = replica
        self.fresh = True

    def bind(self, box: Box, value: Tensor, grad: Tensor) -> None:
        """Give the parameter its storage."""
        self.box, self.value, self.grad = box, value, grad

    def use(self) -> Tensor:
        """`value` for ordinary autograd; what flows back is added to `grad`."""
        if not torch.is_grad_enabled():
            return self.value
        return _Use.apply(self.value.detach().requires_grad_(), self)

    def add(self, gradient: Tensor) -> None:
        """grad += gradient."""
        if self.fresh:
            self.grad.copy_(gradient)
        else:
            self.grad.add_(gradient)
        self.fresh = False

    def add_product(self, left_TO: Tensor, right_TI: Tensor, scale: float = 1.0) -> None:
        """grad += scale * left^T right, the gradient of a matrix [O, I] over T tokens."""
        grad_OI = self.grad.view(left_TO.shape[-1], right_TI.shape[-1])
        product_into(grad_OI, left_TO.t(), right_TI, scale=scale, add=not self.fresh)
        self.fresh = False

    def add_rows(self, index_T: Tensor, gradient_TI: Tensor) -> None:
        """grad[index] += gradient, row by row: the gradient of a look-up."""
        self.finish()
        self.grad.index_add_(0, index_T, gradient_TI.to(self.grad.dtype))

    def finish(self) -> None:
        """Make `grad` a valid sum even if nothing was added."""
        if self.fresh:
            self.grad.zero_()
            self.fresh = False


class _Use(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, parameter: Parameter) -> Tensor:
        ctx.parameter = parameter
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, None]:
        ctx.parameter.add(gradients[0])
        return None, None


class Module:
    """A part of the model. Its parameters are those of its attributes, in order of assignment."""

    def parameters(self) -> Iterator[Parameter]:
        """Every parameter below this module, once each."""
        seen: set[int] = set()
        for parameter in _walk(self):
            if id(parameter) not in seen:
                seen.add(id(parameter))
                yield parameter


def _walk(thing: object) -> Iterator[Parameter]:
    if isinstance(thing, Parameter):
        yield thing
    elif isinstance(thing, Module):
        for child in vars(thing).values():
            yield from _walk(child)
    elif isinstance(thing, (list, tuple)):
        for child in thing:
            yield from _walk(child)
