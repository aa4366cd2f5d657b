"""ExpertBalance: how the load of experts in one step changes their router's balance parameter.

It is a rule like any other, with the load as its gradient. The code that handles all weights
therefore also sums the load over the ranks, saves the parameter and preserves it in a skipped step.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megaframe.config import MoEConfig
from megaframe.optim.update_rule import UpdateRule, UpdateStep

_NEAR = 0.1
"""Distance from the mean load, as a share of it, within which a bias moves proportionally less."""


class ExpertBalance(UpdateRule):
    """The rule of a bucket with the balance parameters of some layers, one piece [E] per layer.

    With `bias`, an expert's bias moves by `balance_rate` in each step, up if its load is below the
    mean and down if it is above (Wang et al. 2024). Within a tenth of the mean it moves
    proportionally less, because with the sign alone loads would swing around the mean. Without
    `bias`, the parameter becomes load / mean. There is no state besides the weights.
    """

    def __init__(self, moe: MoEConfig, pieces: list[slice]) -> None:
        self._moe, self._pieces = moe, pieces

    def update(
        self, weights: Tensor, grads: Tensor, step: UpdateStep, rounded: Tensor | None = None
    ) -> None:
        """Set the balance parameters from the loads in `grads`."""
        for piece in self._pieces:
            load_E, balance_E = grads[piece], weights[piece]
            # An expert layer without tokens has a mean of 0, which must not divide.
            relative_E = load_E / load_E.mean().clamp_min(torch.finfo(load_E.dtype).tiny)
            if self._moe.balance == "bias":
                missing_E = ((1.0 - relative_E) / _NEAR).clamp(-1.0, 1.0)
                new_E = balance_E + self._moe.balance_rate * missing_E
            else:
                new_E = relative_E
            # A skipped step must leave the parameter alone, whatever the load was; so must a step
            # without any load, whose tokens have no labels.
            unknown = step.skip.bool() | (load_E.sum() == 0)
            balance_E.copy_(torch.where(unknown, balance_E, new_E))
