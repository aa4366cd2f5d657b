"""xIELU, an activation whose two slopes are trained (Huang and Schlag 2024; Apertus, 2025).

It grows with the square of positive inputs, and like an exponential linear unit of negative ones.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megaframe.architecture.activation import XIELU_BETA, SlopesDescription
from megaframe.ops.kernel_dispatch import Kernels
from megaframe.parameters.parameter import Module, Parameter

_EPS = -1e-6
"""Largest exponent, as transformers has it."""


class XIELU(Module):
    """The activation of one MLP with its slopes."""

    def __init__(self, name: str, description: SlopesDescription) -> None:
        """Make the parameters.

        Args:
            name: Of the activation in the model.
            description: Declares them.
        """
        self.positive, self.negative = map(Parameter, description.declare_parameters(name))

    def __call__(self, x: Tensor, kernels: Kernels) -> Tensor:
        """Return the activation of x. Tensor ranks have some columns of it, and the gradients of
        the slopes are summed over them, as those of gains are."""
        y: Tensor = _XIELU.apply(x, self.positive.use(), self.negative.use())
        return y


class _XIELU(torch.autograd.Function):
    """y = p x^2 + b x for x > 0, else n (exp(min(x, eps)) - 1 - x) + b x, where p and n - b are
    softplus of parameters. Keeps only x."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, positive: Tensor, negative: Tensor) -> Tensor:
        ctx.save_for_backward(x, positive, negative)
        positive, negative = F.softplus(positive), XIELU_BETA + F.softplus(negative)
        below = (torch.expm1(x.clamp(max=_EPS)) - x).mul_(negative)
        return torch.where(x > 0, x.square().mul_(positive), below).add_(x, alpha=XIELU_BETA)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x, *parameters = ctx.saved_tensors
        (dy,) = gradients
        positive, negative = map(F.softplus, parameters)
        negative = XIELU_BETA + negative
        exponential = torch.expm1(x.clamp(max=_EPS))
        # What is clamped does not change with x.
        below = torch.where(x < _EPS, exponential, -1.0).mul_(negative)
        slope = torch.where(x > 0, 2.0 * positive * x, below).add_(XIELU_BETA)
        # Summed over all elements in at least fp32.
        wide = torch.promote_types(x.dtype, torch.float32)
        of_positive = torch.where(x > 0, x.square(), 0.0).mul_(dy).sum(dtype=wide)
        of_negative = torch.where(x > 0, 0.0, exponential - x).mul_(dy).sum(dtype=wide)
        # The derivative of softplus is the sigmoid.
        d_positive, d_negative = (
            total * parameter.to(wide).sigmoid()
            for total, parameter in zip((of_positive, of_negative), parameters, strict=True)
        )
        return slope.mul_(dy), d_positive.to(x.dtype), d_negative.to(x.dtype)
