"""LayerNorm, RMSNorm, and norms from outside."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megaframe.architecture.norm import LayerNormDescription, NormDescription, RMSNormDescription
from megaframe.ops.kernel_dispatch import NO_KERNELS, Kernels
from megaframe.parameters.parameter import Module, Parameter


class Norm(Module):
    """A norm over the last dim; of our own, y = normalised x times a gain (plus a bias)."""

    def __init__(self, name: str, description: NormDescription) -> None:
        """Make the parameters.

        Args:
            name: Of the norm in the model.
            description: What it declares, and what computes it if it comes from outside.
        """
        self.description = description
        self.weights = [*map(Parameter, description.declare_parameters(name))]
        self.options: dict[str, Any] | None = None
        # First, because a description from outside may be derived from one of ours.
        if type(description).compute is not NormDescription.compute:
            return
        match description:
            case RMSNormDescription():
                self.options = {"kind": "rmsnorm", "eps": description.eps}
            case LayerNormDescription():
                self.options = {"kind": "layernorm", "eps": description.eps}
            case _:
                kind = type(description).__name__
                raise TypeError(f"{kind} has no method compute(x, *parameters)")

    def __call__(self, x: Tensor, kernels: Kernels = NO_KERNELS) -> Tensor:
        """Return the norm of x, of the same shape [..., width]."""
        if self.options is None:
            weights = (weight.use() for weight in self.weights)
            return kernels.maybe_compile(self.description.compute)(x, *weights)
        gain, bias = self._use_gain_and_bias()
        if kernel := kernels.find("norm", x, gain, bias, **self.options):
            return kernel(x, gain, bias, **self.options)[0]
        return kernels.maybe_compile(normalize)(x, gain, bias, *self.options.values())

    def add_and_normalize(
        self, x: Tensor, branch: Tensor, kernels: Kernels
    ) -> tuple[Tensor, Tensor]:
        """Return the norm of x + branch and the sum itself, both [..., width]."""
        if self.options is None:
            total = x + branch
            return self(total, kernels), total
        gain, bias = self._use_gain_and_bias()
        if kernel := kernels.find("norm", branch, gain, bias, x, **self.options):
            return kernel(branch, gain, bias, x, **self.options)
        run = kernels.maybe_compile(_normalize_sum)
        return run(x, branch, gain, bias, *self.options.values())

    def _use_gain_and_bias(self) -> tuple[Tensor, Tensor | None]:
        gain = self.weights[0].use()
        return gain, self.weights[1].use() if len(self.weights) > 1 else None


def normalize(x: Tensor, gain: Tensor, bias: Tensor | None, kind: str, eps: float) -> Tensor:
    """Compute `Norm` in plain code.

    Args:
        x: The rows, [..., width].
        gain: Factor of each column, [width].
        bias: Added to each column, [width]; only a LayerNorm has one.
        kind: "layernorm" or "rmsnorm".
        eps: Added to the variance or the mean square.
    """
    if kind == "rmsnorm":
        return _RMSNorm.apply(x, gain, eps)
    return F.layer_norm(x, gain.shape, gain, bias, eps)


def _normalize_sum(
    x: Tensor, branch: Tensor, gain: Tensor, bias: Tensor | None, kind: str, eps: float
) -> tuple[Tensor, Tensor]:
    total = x + branch
    return normalize(total, gain, bias, kind, eps), total


class _RMSNorm(torch.autograd.Function):
    """y = x r gain with r = (mean(x^2) + eps)^(-1/2).

    Keeps only x, gain and r. With g = dy gain: dx = r g - x r^3 mean(g x), dgain = sum of dy x r.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, gain: Tensor, eps: float) -> Tensor:
        # Statistics in at least fp32: a sum of many squares in bf16 would lose small terms.
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        scale = (torch.linalg.vecdot(wide, wide).unsqueeze(-1) / x.shape[-1] + eps).rsqrt()
        # x itself and not its copy in fp32, which would take twice the memory; `scale` is one
        # number a row.
        ctx.save_for_backward(x, gain, scale)
        # Rounded to the type of x first, then multiplied by the gain in place.
        return (wide * scale).to(x.dtype).mul_(gain)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        x, gain, scale = ctx.saved_tensors
        wide, dy = x.to(scale.dtype), gradients[0].to(scale.dtype)
        # Computed again: a kept copy would be as large as x.
        normed = wide * scale
        # Summed over all rows in at least fp32.
        dgain = (dy * normed).flatten(0, -2).sum(0)
        inner = dy * gain
        mean = torch.linalg.vecdot(inner, normed).unsqueeze(-1) / x.shape[-1]
        # In place: `inner` is read for the mean above and not needed again.
        dx = inner.addcmul_(normed, mean, value=-1.0).mul_(scale)
        return dx.to(x.dtype), dgain, None
