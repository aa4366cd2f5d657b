"""Products of heads with their parts of a column linear whose products are absorbed: what its
results would be multiplied with is multiplied by its weight instead.

Shape legend: T tokens, N heads of this rank, O results of a head, I inputs of the linear.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megaframe.ops.autograd import get_direct_apply
from megaframe.ops.matmul import multiply_batched
from megaframe.tensor_parallel.deferred_gradients import DeferredGradients
from megaframe.tensor_parallel.linear import Linear


def multiply_by_results(
    x_TNO: Tensor, linear: Linear, results: slice, deferred: DeferredGradients
) -> Tensor:
    """Return x W for each head, [T, N, I]: by this a linear's inputs are multiplied, in place of
    its results by x.

    Args:
        x_TNO: Heads, as wide as there are results.
        linear: A column linear with a weight [N, results of a head, I], without adapters.
        results: Which results of a head.
        deferred: Computes or keeps the weight gradient.
    """
    y_TNI: Tensor = _multiply(x_TNO, linear, results, True, deferred)
    return y_TNI


def multiply_inputs(
    x_TNI: Tensor, linear: Linear, results: slice, deferred: DeferredGradients
) -> Tensor:
    """Return x W^T for each head, [T, N, O], where each head has inputs of its own. The other
    arguments are those of `multiply_by_results`."""
    y_TNO: Tensor = _multiply(x_TNI, linear, results, False, deferred)
    return y_TNO


class _Multiply(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_TN: Tensor,
        linear: Linear,
        results: slice,
        by_results: bool,
        deferred: DeferredGradients,
    ) -> Tensor:
        ctx.save_for_backward(x_TN)
        ctx.linear, ctx.results, ctx.by_results = linear, results, by_results
        ctx.deferred = deferred
        weight_NOI = linear.weight.value[:, results]
        return _multiply_heads(x_TN, weight_NOI if by_results else weight_NOI.mT)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None, None]:
        # Without its graph, because a deferred gradient is added outside of a backward pass.
        x_TN, (dy_TN,) = ctx.saved_tensors[0].detach(), gradients
        linear, results = ctx.linear, ctx.results
        of_results, inputs = (x_TN, dy_TN) if ctx.by_results else (dy_TN, x_TN)

        def add_weight_gradient() -> None:
            if linear.weight.frozen:
                return
            product_NOI = multiply_batched(of_results.permute(1, 2, 0), inputs.transpose(0, 1))

            def add_into(grad: Tensor, add: bool) -> None:
                if not add:
                    grad.zero_()  # the other results of heads are added on their own
                grad[:, results] += product_NOI

            linear.weight.add_with(add_into)

        ctx.deferred.add(add_weight_gradient)
        # Read again, because the value may have been withdrawn in between.
        weight_NOI = linear.weight.value[:, results]
        dx_TN = _multiply_heads(dy_TN, weight_NOI.mT if ctx.by_results else weight_NOI)
        return dx_TN, None, None, None, None


_multiply = get_direct_apply(_Multiply)


def _multiply_heads(x_TN: Tensor, weight_N: Tensor) -> Tensor:
    """Return the products of each head with its matrix, as a view [T, N, ...]."""
    return multiply_batched(x_TN.transpose(0, 1), weight_N).transpose(0, 1)
