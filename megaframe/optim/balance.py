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


class Balance:
    """Of a bucket that has, one after the other, the numbers of all experts of some layers, each
    piece [E]. With a bias, that of an expert moves towards the mean load: b += rate * (1 - load /
    mean), but never faster than the rate (after Wang et al. 2024, who take the sign alone, around
    which loads then swing). Else what is kept is load / mean."""

    def __init__(self, moe: Moe, pieces: list[slice]) -> None:
        self._moe, self._pieces = moe, pieces

    @property
    def state(self) -> Mapping[str, Tensor]:
        """Nothing beside the numbers themselves."""
        return {}

    def start(self, weights: Tensor) -> None:
        """Nothing depends on the initial numbers."""

    def update(self, weights: Tensor, grads: Tensor, step: Step) -> Iterable[None]:
        """Nothing remains to be done."""
        for piece in self._pieces:
            load_E, kept_E = grads[piece], weights[piece]
            relative_E = load_E / load_E.mean().clamp_min(torch.finfo(load_E.dtype).tiny)
            if self._moe.balance == "bias":
                new_E = kept_E + self._moe.balance_rate * (1.0 - relative_E).clamp(-1.0, 1.0)
            else:
                new_E = relative_E
            kept_E.copy_(torch.where(step.skip.bool(), kept_E, new_E))
        return ()

    def shown(self, *, to_load: bool = False) -> Mapping[str, Tensor]:
        """Nothing beside the numbers themselves."""
        return {}

    def load(self) -> None:
        """Nothing was shown."""
