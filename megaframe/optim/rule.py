"""Rule: how the gradients of one flat span of weights change them, and what is remembered of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


@dataclass(frozen=True)
class Step:
    """One update. number: from 1. lr: the learning rate. divisor: scalar in master precision by
    which gradients are to be divided. skip: scalar, fp32; where it is 1 nothing changes."""

    number: int
    lr: float
    divisor: Tensor
    skip: Tensor

    def constant(self, value: float, skipped: float) -> Tensor:
        """Scalar in master precision on the device: `value`, or `skipped` in a skipped step."""
        full = torch.full_like(self.divisor, value)
        return torch.where(self.skip.bool(), torch.full_like(self.divisor, skipped), full)

    def gradients(self, sums: Tensor) -> Tensor:
        """`sums` divided, in place; zero in a skipped step, whatever they were."""
        return sums.div_(self.divisor).masked_fill_(self.skip.bool(), 0.0)


class Rule(Protocol):
    """The optimizer of one flat span of weights in master precision."""

    @property
    def state(self) -> Mapping[str, Tensor]:
        """All that is remembered, as it lies in memory."""
        ...

    def start(self, weights: Tensor) -> None:
        """The weights have their initial values."""
        ...

    def update(
        self, weights: Tensor, grads: Tensor, step: Step, rounded: Tensor | None = None
    ) -> Iterable[None]:
        """Change the weights, and the gradients, which are on the device, as is convenient.
        rounded: on the device, becomes the weights in its own type; where it is given, weights lie
        where the state does. Of a rule that works together with other ranks the result is what
        remains to be done, in parts; all rules that start together do a part each in turn."""
        ...

    def settle(self) -> None:
        """Return when all that was changed is where it is kept."""
        ...

    def shown(self, *, to_load: bool = False) -> Mapping[str, Tensor]:
        """What a checkpoint holds, each as long as the weights. to_load: the tensors may be
        changed, and then `load` takes them back."""
        ...

    def load(self) -> None:
        """What was shown has been changed."""
        ...
