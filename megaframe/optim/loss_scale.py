"""The loss scale of fp16 training: halved on overflow, doubled after a window without one.

It follows from the outcome of each step, which only the device knows, so it stays on the device:
the next step can be launched before this one is over.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megaframe.config import OptimConfig, TrainConfig

_SMALLEST, _LARGEST = 2.0**-14, 2.0**24


class LossScale:
    """The factor on the loss, by which gradients are divided before they are used. It is 1 and
    constant unless the precision is fp16.

    Attributes:
        dynamic: Whether it changes.
        value: That of the next step, fp64 scalar on the device.
    """

    def __init__(self, train: TrainConfig, optim: OptimConfig, device: torch.device) -> None:
        self.dynamic = train.precision == "fp16"
        self._window = optim.loss_scale_window
        self._device = device
        self.load(optim.loss_scale if self.dynamic else 1.0, 0)

    def load(self, value: float, good: int) -> None:
        """Continue with this value, after `good` steps without overflow."""
        self.value = torch.full((), value, dtype=torch.float64, device=self._device)
        self._good = torch.full((), good, dtype=torch.int64, device=self._device)

    def read_state(self) -> tuple[float, int]:
        """Return what `load` takes; waits for the device."""
        return float(self.value), int(self._good)

    def update(self, finite: Tensor) -> None:
        """Adjust the scale to one step.

        Args:
            finite: Whether the gradients of the step were finite, a bool scalar on the device.
        """
        if not self.dynamic:
            return
        # All branches are selects on the device: the host never learns which one was taken here.
        self._good = torch.where(finite, self._good + 1, 0)
        doubled = (2.0 * self.value).clamp_max(_LARGEST)
        # Doubling and halving change exponents only, so they round nothing.
        grown = torch.where(self._good % self._window == 0, doubled, self.value)
        self.value = torch.where(finite, grown, (self.value / 2.0).clamp_min(_SMALLEST))
