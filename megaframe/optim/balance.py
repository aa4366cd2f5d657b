"""Balance: how the load of experts in one step changes what their router knows in the next.

It is a rule like any other, whose gradient is the load: so the load is summed over the ranks,
saved, and left alone by a step that is skipped, by what does this for all weights.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from megaframe.config import Moe
from megaframe.optim.rule import Step

_NEAR = 0.1
"""Distance from the mean load, as a share of it, within which a bias moves in proportion."""


class Balance:
    """Of a bucket that has, one after the other, the numbers of all experts of some layers, each
    piece [E]. With a bias, that of an expert moves by the rate in each step, up where its load is
    under the mean and down where it is over (Wang et al. 2024); but within a tenth of the mean in
    proportion, for with the sign alone loads swing around it. Else what is kept is load / mean."""

    def __init__(self, moe: Moe, pieces: list[slice]) -> None:
        self._moe, self._pieces = moe, pieces

    @property
    def state(self) -> Mapping[str, Tensor]:
        """Nothing beside the numbers themselves."""
        return {}

    def start(self, weights: Tensor) -> None:
        """Nothing depends on the initial numbers."""

    def update(
        self, weights: Tensor, grads: Tensor, step: Step, rounded: Tensor | None = None
    ) -> Iterable[None]:
        """Nothing remains to be done."""
        for piece in self._pieces:
            load_E, kept_E = grads[piece], weights[piece]
            relative_E = load_E / load_E.mean().clamp_min(torch.finfo(load_E.dtype).tiny)
            if self._moe.balance == "bias":
                missing_E = ((1.0 - relative_E) / _NEAR).clamp(-1.0, 1.0)
                new_E = kept_E + self._moe.balance_rate * missing_E
            else:
                new_E = relative_E
            kept_E.copy_(torch.where(step.skip.bool(), kept_E, new_E))
        return ()

    def settle(self) -> None:
        """Everything is where it is kept."""

    def shown(self, *, to_load: bool = False) -> Mapping[str, Tensor]:
        """Nothing beside the numbers themselves."""
        return {}

    def load(self) -> None:
        """Nothing was shown."""
