"""Rule: how gradients change one flat span of weights, and what it remembers between steps."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


@dataclass(frozen=True)
class Step:
    """One update. number: counted from 1. lr: the learning rate. divisor: scalar in master
    precision by which to divide gradients. skip: fp32 scalar; if it is 1, nothing changes."""

    number: int
    lr: float
    divisor: Tensor
    skip: Tensor

    def constant(self, value: float, skipped: float) -> Tensor:
        """Return a scalar in master precision: `value`, or `skipped` in a skipped step."""
        full = torch.full_like(self.divisor, value)
        return torch.where(self.skip.bool(), torch.full_like(self.divisor, skipped), full)

    def gradients(self, sums: Tensor) -> Tensor:
        """Divide `sums` in place and return them; zero in a skipped step, even if not finite."""
        return sums.div_(self.divisor).masked_fill_(self.skip.bool(), 0.0)


class Rule(Protocol):
    """The optimizer of one flat span of weights in master precision."""

    @property
    def state(self) -> Mapping[str, Tensor]:
        """All state, as it is stored in memory."""
        ...

    def start(self, weights: Tensor) -> None:
        """Begin a run: the weights have their initial values."""
        ...

    def update(
        self, weights: Tensor, grads: Tensor, step: Step, rounded: Tensor | None = None
    ) -> Iterable[None]:
        """Change the weights, and the gradients as is convenient; gradients are on the device.
        rounded: on the device, receives the weights in its own type; if it is given, the weights
        are kept where the state is. A rule that works together with other ranks returns the work
        that remains, in parts; rules that start together do one part each in turn."""
        ...

    def settle(self) -> None:
        """Return when everything that was changed is back where it is kept."""
        ...

    def shown(self, *, to_load: bool = False) -> Mapping[str, Tensor]:
        """Return the state for a checkpoint, each tensor as long as the weights. to_load: the
        caller may change the tensors; `load` then takes them back."""
        ...

    def load(self) -> None:
        """Take back the tensors that were shown, which have been changed."""
        ...
