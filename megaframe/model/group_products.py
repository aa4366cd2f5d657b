"""A product for each group of heads (DeepSeek-V4's grouped output projection).

Shape legend: T tokens, G groups of this tensor rank, I inputs of a group, O outputs of a group.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megaframe.architecture.compressed_attention import GroupProductsSpec
from megaframe.ops.autograd import get_direct_apply
from megaframe.parameters.parameter import Module, Parameter
from megaframe.tensor_parallel.deferred_gradients import DeferredGradients


class GroupProducts(Module):
    """Multiplies what the heads of each group of this tensor rank have made."""

    def __init__(self, name: str, spec: GroupProductsSpec) -> None:
        (self.weight,) = map(Parameter, spec.declare_own_parameters(name))
        self.inputs = spec.terms

    def __call__(self, x_TGI: Tensor, deferred: DeferredGradients) -> Tensor:
        """Return the products of all groups, [T, G * O].

        Args:
            x_TGI: Outputs of the heads of each group.
            deferred: Computes or keeps the weight gradients.
        """
        y_TGO: Tensor = _apply(x_TGI, self.weight, deferred)
        return y_TGO.flatten(1)


class _GroupProducts(torch.autograd.Function):
    """y_g = x_g W_g^T for each group g."""

    @staticmethod
    def forward(ctx: Any, x_TGI: Tensor, weight: Parameter, deferred: DeferredGradients) -> Tensor:
        ctx.save_for_backward(x_TGI)
        ctx.weight, ctx.deferred = weight, deferred
        return (x_TGI.transpose(0, 1) @ weight.value.mT).transpose(0, 1).contiguous()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (x_TGI,), weight, dy_TGO = ctx.saved_tensors, ctx.weight, gradients[0]
        x_TGI = x_TGI.detach()  # otherwise a deferred weight gradient keeps the graph alive

        def add_weight_gradient() -> None:
            for group, (dy_TO, x_TI) in enumerate(
                zip(dy_TGO.unbind(1), x_TGI.unbind(1), strict=True)
            ):
                weight.add_product(dy_TO, x_TI, matrix=group)

        ctx.deferred.add(add_weight_gradient)
        return (dy_TGO.transpose(0, 1) @ weight.value).transpose(0, 1), None, None


_apply = get_direct_apply(_GroupProducts)
