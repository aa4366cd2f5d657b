"""AdamW over a flat span (Loshchilov and Hutter 2019), in one fused pass over memory."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from megaframe.ops.kernel_dispatch import NO_KERNELS, Kernels
from megaframe.optim.elementwise import GroupRates, UpdateChunk, UpdateTransform
from megaframe.optim.optimizer_state import MomentStorage
from megaframe.optim.update_rule import UpdateStep


@dataclass(frozen=True)
class AdamWOptions:
    """The constants of AdamW; the learning rate comes with each step."""

    beta1: float
    beta2: float
    eps: float
    rates: GroupRates


class AdamW(UpdateTransform):
    """AdamW, with running means of gradients and of their squares.

    Args:
        options: Betas, eps and the group's rates.
        storage: The types of the moments.
        kernels: The kernel that computes the update, if it is there.
    """

    single_chunk = True
    writes_rounded = True

    def __init__(
        self, options: AdamWOptions, storage: MomentStorage, kernels: Kernels = NO_KERNELS
    ) -> None:
        super().__init__({"mean": storage.signed, "square": storage.square})
        self.options, self._kernels = options, kernels

    def apply(self, chunk: UpdateChunk, step: UpdateStep) -> None:
        """Update as torch's AdamW does, after dividing the gradients."""
        weights, grads, moments = chunk.weights, chunk.grads, chunk.moments
        tensors = (weights, grads, moments["mean"], moments["square"], chunk.rounded)
        options = {
            "lr": step.lr * self.options.rates.lr,
            "beta1": self.options.beta1,
            "beta2": self.options.beta2,
            "eps": self.options.eps,
            "weight_decay": self.options.rates.weight_decay,
            "step": step.number,
            "divisor": step.divisor,
            "skip": step.skip,
        }
        # The kernel divides gradients, skips and writes the rounded weights in the same pass.
        if kernel := self._kernels.find("adamw", *tensors, **options):
            kernel(*tensors, **options)
            return
        scale: Tensor | None = step.divisor
        if weights.dtype == torch.float64:  # the fused kernel takes its divisor in fp32 only
            grads, scale = grads.div_(step.divisor), None
        adamw(
            [weights],
            [grads],
            [moments["mean"]],
            [moments["square"]],
            [],
            # torch's kernel counts the step itself, before it uses the number.
            [torch.full((), step.number - 1, dtype=torch.float32, device=weights.device)],
            fused=True,
            # Divisor and skip are read on the device, so the host does not wait for the norm.
            grad_scale=scale,
            found_inf=step.skip,
            amsgrad=False,
            beta1=self.options.beta1,
            beta2=self.options.beta2,
            lr=step.lr * self.options.rates.lr,
            weight_decay=self.options.rates.weight_decay,
            eps=self.options.eps,
            maximize=False,
        )
        # torch's kernel writes master weights only, so the rounding is a second pass.
        if chunk.rounded is not None:
            chunk.rounded.copy_(weights)
