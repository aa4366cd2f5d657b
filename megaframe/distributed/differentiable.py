"""Collectives within a layer, through which autograd passes gradients."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megaframe.distributed.collectives import Group, all_gather, all_to_all, reduce_scatter


def gather_differentiably(x_R: Tensor, group: Group) -> Tensor:
    """Gather the tensors [R, ...] of all ranks, [size * R, ...]. The backward pass sums what all
    ranks have of the gradient, and each keeps that of its own tensor."""
    return x_R if group.size == 1 else _Gather.apply(x_R, group)


def exchange_differentiably(x_U: Tensor, group: Group) -> Tensor:
    """Send part i of x [size, ...] to rank i. The backward pass returns the gradients in the same
    way."""
    return x_U if group.size == 1 else _AllToAll.apply(x_U, group)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return all_gather(x, group).wait()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return reduce_scatter(gradients[0], ctx.group).wait(), None


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return all_to_all(x, group).wait()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        # An all-to-all of equal parts is a permutation that is its own inverse, so also its
        # transpose.
        return all_to_all(gradients[0], ctx.group).wait(), None
