"""Tally: counts and losses that the layers of a stage add up over the microbatches of a step."""

from __future__ import annotations

import torch
from torch import Tensor


class LayerStatistics:
    """Sums of one step on this rank. counts: by name. losses: parts that are added to the model's
    loss."""

    def __init__(self) -> None:
        self.counts: dict[str, Tensor] = {}
        self.losses: dict[str, Tensor] = {}

    def add(self, name: str, value: Tensor) -> None:
        """Add the scalar `value` to the count `name`."""
        _add(self.counts, name, value)

    def add_loss(self, name: str, value: Tensor) -> None:
        """Add the scalar `value` to the part `name` of the loss."""
        _add(self.losses, name, value)

    def copied(self) -> LayerStatistics:
        """Return a copy of the numbers in memory of its own."""
        made = LayerStatistics()
        made.counts = {name: value.clone() for name, value in self.counts.items()}
        made.losses = {name: value.clone() for name, value in self.losses.items()}
        return made

    @property
    def loss(self) -> Tensor | None:
        """Sum of everything that is added to the loss, fp64 scalar; None if there is nothing."""
        return torch.stack(list(self.losses.values())).sum() if self.losses else None


def _add(sums: dict[str, Tensor], name: str, value: Tensor) -> None:
    value = value.detach().double()
    sums[name] = sums[name] + value if name in sums else value
