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
    """Moments of one flat span, of which the first `decayed` elements have weight decay."""

    def __init__(self, weights: Tensor, decayed: int, options: AdamWOptions) -> None:
        self.options = options
        self.state = {"mean": torch.zeros_like(weights), "square": torch.zeros_like(weights)}
        self._decayed = decayed

    def update(
        self, weights: Tensor, grads: Tensor, *, number: int, lr: float, divisor: Tensor
    ) -> None:
        """Update `number` (from 1) with gradients grads / divisor. All are flat and of one type."""
        scale: Tensor | None = divisor
        if weights.dtype == torch.float64:  # the fused kernel takes its divisor in fp32 only
            grads, scale = grads.div_(divisor), None
        for start, stop, decay in (
            (0, self._decayed, self.options.weight_decay),
            (self._decayed, len(weights), 0.0),
        ):
            if start == stop:
                continue
            adamw(
                [weights[start:stop]],
                [grads[start:stop]],
                [self.state["mean"][start:stop]],
                [self.state["square"][start:stop]],
                [],
                [torch.full((), number - 1, dtype=torch.float32, device=weights.device)],
                fused=True,
                grad_scale=scale,
                amsgrad=False,
                beta1=self.options.beta1,
                beta2=self.options.beta2,
                lr=lr,
                weight_decay=decay,
                eps=self.options.eps,
                maximize=False,
            )
