"""Decides what to do after a step, from what all ranks know about it.

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

_WINDOW, _LEAST = 64, 8
"""Number of losses whose median is taken, and the fewest for which it is."""
_MAX_SKIPPED = 20
"""Consecutive steps with gradients that are not finite, after which a run gives up."""
_MAX_RETURNS = 8
"""Times in a row that a run goes back to the same checkpoint before it gives up."""

Choice = Literal["go_on", "go_back", "stop"]


@dataclass(frozen=True)
class Judgement:
    """choice: what to do after a step. why: the reason in words, empty if there is nothing to
    say."""

    choice: Choice = "go_on"
    why: str = ""


class History:
    """What has to be remembered of a run's steps to judge the next one."""

    def __init__(self, faults: FaultToleranceConfig) -> None:
        self._faults = faults
        self._losses: deque[float] = deque(maxlen=_WINDOW)
        self._left_out: set[int] = set()
        self._failed: set[int] = set()
        self._skipped = self._returns = 0
        self._returned_to = -1

    def leaves_out(self, first: int) -> bool:
        """Return whether the step that begins with sample number `first` is to be skipped."""
        return first in self._left_out

    def judge(self, first: int, loss: float, finite: bool) -> Judgement:
        """Decide what to do after the step that began with sample number `first`. finite: whether
        its update was finite and therefore made."""
        return self._spiked(first, loss) if finite else self._not_finite(first)

    def _not_finite(self, first: int) -> Judgement:
        self._skipped += 1
        if self._skipped >= _MAX_SKIPPED:
            return Judgement("stop", f"{_MAX_SKIPPED} consecutive non-finite steps, giving up")
        if self._faults.non_finite == "stop":
            return Judgement("stop", "faults.non_finite=stop")
        if self._faults.non_finite != "roll_back":
            return Judgement()
        if first in self._failed:
            self._left_out.add(first)
            return Judgement("go_back", "it failed twice, and its data is left out")
        self._failed.add(first)
        return Judgement("go_back", "its data is tried once more")

    def _spiked(self, first: int, loss: float) -> Judgement:
        self._skipped = 0
        factor, losses = self._faults.spike_factor, self._losses
        if factor is not None and len(losses) >= _LEAST:
            usual = statistics.median(losses)
            if not math.isfinite(loss) or loss > factor * usual:
                self._left_out.add(first)
                return Judgement(
                    "go_back",
                    f"its loss is {loss:.4f}, over faults.spike_factor={factor:g} times the median "
                    f"of {usual:.4f}; its data is left out",
                )
        losses.append(loss)
        return Judgement()

    def may_return(self, step: int) -> bool:
        """Count that the run goes back to the checkpoint of `step`. Returns whether it still
        may."""
        self._returns = self._returns + 1 if step == self._returned_to else 1
        self._returned_to = step
        return self._returns <= _MAX_RETURNS

    def state(self) -> SpikeHistory:
        """Return the history for a checkpoint."""
        return SpikeHistory(list(self._losses), sorted(self._left_out), sorted(self._failed))

    def load(self, state: SpikeHistory) -> None:
        """Continue after the step that `state` belongs to. Data that has been skipped or has failed
        since then is not forgotten."""
        self._losses = deque(state.losses, _WINDOW)
        self._left_out.update(state.left_out)
        self._failed.update(state.failed)
