"""AdamW over a flat span (Loshchilov and Hutter 2019), one fused pass over memory."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim.adamw import adamw


@dataclass(frozen=True)
class AdamWOptions:
    """The constants of AdamW; the learning rate comes with each step."""

    beta1: float
    beta2: float
    eps: float
    weight_decay: float


class AdamW:
    """Moments of one flat span of weights."""

    def __init__(self, weights: Tensor, options: AdamWOptions) -> None:
        self.options = options
        self.state = {"mean": torch.zeros_like(weights), "square": torch.zeros_like(weights)}

    def update(
        self,
        weights: Tensor,
        grads: Tensor,
        *,
        number: int,
        lr: float,
        divisor: Tensor,
        skip: Tensor,
    ) -> None:
        """Update `number` (from 1) with gradients grads / divisor. All are flat and of one type.

        divisor: scalar of that type. skip: scalar, fp32; where it is 1 nothing changes.
        """
        scale: Tensor | None = divisor
        if weights.dtype == torch.float64:  # the fused kernel takes its divisor in fp32 only
            grads, scale = grads.div_(divisor), None
        adamw(
            [weights],
            [grads],
            [self.state["mean"]],
            [self.state["square"]],
            [],
            [torch.full((), number - 1, dtype=torch.float32, device=weights.device)],
            fused=True,
            grad_scale=scale,
            found_inf=skip,
            amsgrad=False,
            beta1=self.options.beta1,
            beta2=self.options.beta2,
            lr=lr,
            weight_decay=self.options.weight_decay,
            eps=self.options.eps,
            maximize=False,
        )
