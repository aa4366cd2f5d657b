"""Activation sparsity: gates of an MLP that are cut off at a quantile of their row, as in Gemma 3n,
whose code calls it a Gaussian top-k.

The quantile is that of a normal distribution with the mean and the variance of a token's gates,
which tensor ranks divide. So two moments of each token are summed over these ranks, and in the
backward pass their gradients.

Shape legend: T tokens, G gates of this rank, F features: the gates, and what they multiply.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megaframe.architecture.mlp import MLPDescription
from megaframe.distributed.collectives import Group, all_reduce


class GaussianTopK:
    """Replaces gates x by max(0, x - mean - k deviation)."""

    def __init__(self, description: MLPDescription, tensor: Group) -> None:
        """Remember the quantile.

        Args:
            description: Has the share of gates that are cut off.
            tensor: The ranks that divide them.
        """
        self.width, self.tensor = description.width, tensor
        self.parts = 2 if description.gated else 1
        # In fp32, as Gemma 3n's code computes it; else logits would be about 1e-7 beside theirs.
        share = torch.tensor(description.sparsity, dtype=torch.float32)
        self.deviations = 2**0.5 * float(torch.erfinv(2 * share - 1))

    def __call__(self, x_TF: Tensor) -> Tensor:
        """Return the results of the first product with gates that are cut off."""
        cut: Tensor = _GaussianTopK.apply(x_TF, self)
        return cut

    def average(self, sums: list[Tensor]) -> Tensor:
        """Return sums [T, 1] over gates of this rank as means over all gates, [number, T, 1]."""
        return all_reduce(torch.stack(sums), self.tensor).wait().div_(self.width)


class _GaussianTopK(torch.autograd.Function):
    """y = max(0, x - m - k s) with s = (q - m^2)^(1/2), the means m of x and q of x^2.

    With g = dy where y > 0, and its sum G: dm = -G (1 - k m / s), dq = -G k / (2 s), and
    dx = g + (dm + 2 x dq) / F, where dm and dq are summed over the ranks.
    """

    @staticmethod
    def forward(ctx: Any, x_TF: Tensor, own: GaussianTopK) -> Tensor:
        gates_TG, *others = x_TF.chunk(own.parts, 1)
        wide = _widen(gates_TG)
        sums = [wide.sum(1, keepdim=True), wide.square().sum(1, keepdim=True)]
        moments = own.average(sums)
        ctx.own = own
        ctx.save_for_backward(x_TF, moments)
        cut_TG = (wide - _find_bound(moments, own.deviations)).clamp_min_(0).to(x_TF.dtype)
        return torch.cat((cut_TG, *others), 1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (x_TF, moments), own = ctx.saved_tensors, ctx.own
        wide = _widen(x_TF.chunk(own.parts, 1)[0])
        dy_TG, *others = gradients[0].chunk(own.parts, 1)
        open_TG = wide > _find_bound(moments, own.deviations)
        dx_TG = torch.where(open_TG, _widen(dy_TG), 0.0)
        mean, square = moments
        k, size = own.deviations, (square - mean.square()).clamp_min(_LEAST).sqrt()
        total = dx_TG.sum(1, keepdim=True)
        d_mean, d_square = own.average([-total * (1 - k * mean / size), -total * k / (2 * size)])
        dx_TG = dx_TG + d_mean + 2 * wide * d_square
        return torch.cat((dx_TG.to(x_TF.dtype), *others), 1), None


_LEAST = 1e-30
"""The least variance of a token's gates, so that equal ones have a gradient."""


def _find_bound(moments: Tensor, deviations: float) -> Tensor:
    """Return what gates are cut off at, [T, 1]."""
    mean, square = moments
    return mean + deviations * (square - mean.square()).clamp_min(_LEAST).sqrt()


def _widen(x: Tensor) -> Tensor:
    """Return x in at least fp32."""
    return x.to(torch.promote_types(x.dtype, torch.float32))
