"""The loss scale of fp16 training: halved on overflow, doubled after a window without one."""

from __future__ import annotations

from megaframe.config import RunConfig

_SMALLEST, _LARGEST = 2.0**-14, 2.0**24


class LossScale:
    """`value` multiplies the loss, and gradients are divided by it before they are used. It is 1
    and constant unless the precision is fp16."""

    def __init__(self, config: RunConfig) -> None:
        self.dynamic = config.train.precision == "fp16"
        self._window = config.optim.loss_scale_window
        self.value = config.optim.loss_scale if self.dynamic else 1.0
        self.good = 0

    def update(self, finite: bool) -> None:
        """Adjust the scale to one step, whose gradients were finite or not."""
        if not self.dynamic:
            return
        self.good = self.good + 1 if finite else 0
        if not finite:
            self.value = max(self.value / 2.0, _SMALLEST)
        elif self.good % self._window == 0:
            self.value = min(self.value * 2.0, _LARGEST)
