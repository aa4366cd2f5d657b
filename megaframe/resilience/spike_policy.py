"""Spike policy: decides what to do after a step, from what all ranks know about it.

Decisions depend on losses and sample numbers only. So all ranks decide alike without communicating,
and so does a run under another layout. Skipped data is identified by its first sample, which stays
valid after the run goes back to a checkpoint.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from dataclasses import dataclass
from typing import Literal

from megaframe.checkpoint.train_state import SpikeHistory
from megaframe.config import FaultToleranceConfig

_WINDOW, _FEWEST_LOSSES = 64, 8
"""Number of losses whose median is taken, and the fewest for which it is."""
_MAX_SKIPPED = 20
"""Consecutive steps with gradients that are not finite, after which a run gives up."""
_MAX_ROLLBACKS = 8
"""Times in a row that a run goes back to the same checkpoint before it gives up."""

Choice = Literal["go_on", "go_back", "stop"]


@dataclass(frozen=True)
class StepDecision:
    """What to do after a step, and why.

    Attributes:
        choice: What to do.
        why: The reason in words, empty if there is nothing to say.
    """

    choice: Choice = "go_on"
    why: str = ""


class SpikePolicy:
    """Judges steps by their loss, with what has to be remembered of the steps before."""

    def __init__(self, faults: FaultToleranceConfig) -> None:
        self._faults = faults
        self._losses: deque[float] = deque(maxlen=_WINDOW)
        self._skipped_data: set[int] = set()
        self._failed_data: set[int] = set()
        self._steps_skipped = self._rollbacks = 0
        self._rolled_back_to = -1

    def is_skipped(self, first: int) -> bool:
        """Return whether the step that begins with sample number `first` is to be skipped."""
        return first in self._skipped_data

    def judge(self, first: int, loss: float | None, finite: bool) -> StepDecision:
        """Decide what to do after a step.

        Args:
            first: Number of the step's first sample.
            loss: Its loss; None if none of its tokens has a label.
            finite: Whether its update was finite and therefore made.
        """
        return self._judge_loss(first, loss) if finite else self._judge_not_finite(first)

    def _judge_not_finite(self, first: int) -> StepDecision:
        self._steps_skipped += 1
        if self._steps_skipped >= _MAX_SKIPPED:
            return StepDecision("stop", f"{_MAX_SKIPPED} consecutive non-finite steps, giving up")
        if self._faults.non_finite == "stop":
            return StepDecision("stop", "faults.non_finite=stop")
        if self._faults.non_finite != "roll_back":
            return StepDecision()
        if first in self._failed_data:
            self._skipped_data.add(first)
            return StepDecision("go_back", "it failed twice, and its data is left out")
        self._failed_data.add(first)
        return StepDecision("go_back", "its data is tried once more")

    def _judge_loss(self, first: int, loss: float | None) -> StepDecision:
        self._steps_skipped = 0
        if loss is None:
            return StepDecision()
        factor, losses = self._faults.spike_factor, self._losses
        if factor is not None and len(losses) >= _FEWEST_LOSSES:
            median = statistics.median(losses)
            if not math.isfinite(loss) or loss > factor * median:
                self._skipped_data.add(first)
                return StepDecision(
                    "go_back",
                    f"its loss is {loss:.4f}, over faults.spike_factor={factor:g} times the median "
                    f"of {median:.4f}; its data is left out",
                )
        losses.append(loss)
        return StepDecision()

    def count_rollback(self, step: int) -> bool:
        """Count that the run goes back to the checkpoint of `step`.

        Returns:
            Whether it still may.
        """
        self._rollbacks = self._rollbacks + 1 if step == self._rolled_back_to else 1
        self._rolled_back_to = step
        return self._rollbacks <= _MAX_ROLLBACKS

    def save(self) -> SpikeHistory:
        """Return the history for a checkpoint."""
        return SpikeHistory(
            list(self._losses), sorted(self._skipped_data), sorted(self._failed_data)
        )

    def load(self, state: SpikeHistory) -> None:
        """Continue after the step that `state` belongs to. Data that has been skipped or has failed
        since then is not forgotten."""
        self._losses = deque(state.losses, _WINDOW)
        self._skipped_data.update(state.left_out)
        self._failed_data.update(state.failed)
