"""Tally: what the layers of a stage count on their way through the microbatches of a step."""

from __future__ import annotations

import torch
from torch import Tensor


class Tally:
    """Sums over a step, on this rank. loss: of what is added to the model's loss."""

    def __init__(self) -> None:
        self.counts: dict[str, Tensor] = {}
        self.losses: dict[str, Tensor] = {}

    def add(self, name: str, value: Tensor) -> None:
        """Count `value`, a scalar."""
        _add(self.counts, name, value)

    def add_loss(self, name: str, value: Tensor) -> None:
        """The same of a part of the loss."""
        _add(self.losses, name, value)

    def copied(self) -> Tally:
        """The same numbers, in memory of their own."""
        made = Tally()
        made.counts = {name: value.clone() for name, value in self.counts.items()}
        made.losses = {name: value.clone() for name, value in self.losses.items()}
        return made

    @property
    def loss(self) -> Tensor | None:
        """All that is added to the loss, fp64 scalar; None where nothing is."""
        return torch.stack(list(self.losses.values())).sum() if self.losses else None


def _add(sums: dict[str, Tensor], name: str, value: Tensor) -> None:
    value = value.detach().double()
    sums[name] = sums[name] + value if name in sums else value
