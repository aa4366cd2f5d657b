"""Callbacks: code of an extension that a run calls between its steps.

Callbacks run on the first rank only, in the process of the run, and are given numbers, not tensors
or process groups. So they cannot make ranks disagree, and no other rank waits for what they do
except by the time that they take: `faults.step_timeout` ends a run whose callback does not return,
and names it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from megaframe.config.schema import RunConfig


@dataclass
class RunView:
    """What a callback sees of a run, and can do with it.

    Attributes:
        config: The whole config.
        step: The step that a call is about: the one that begins, or whose numbers or evaluation
            are known; in `after_save` the last one that is done.
        metrics: The newest metrics that all ranks have summed up, by name: `loss` (NaN if no token
            of the step has a label), `grad_norm`, `lr`, `eval_loss` and whatever else was recorded;
            `a/b` is key b of the object a of `metrics.jsonl`.
        metrics_step: The step of these metrics. In `after_step` it is `step`; at other times an
            earlier one, because nothing waits for them. 0 while there are none.
    """

    config: RunConfig
    record_value: Callable[[str, float], None]
    note: Callable[[str], None]
    """Print a line, and put it into the run log."""
    stop: Callable[[str], None]
    """Ask the run to stop, for the given reason. All ranks stop after the same step, a few steps
    later, with a checkpoint and exit status 0."""
    step: int = 0
    metrics: Mapping[str, Any] = field(default_factory=dict)
    metrics_step: int = 0

    def record(self, name: str, value: float) -> None:
        """Put a number into the line of `step` in `metrics.jsonl`, as `callbacks.CALLBACK.NAME`; in
        `after_save`, into that of the next step. Of several in one step the last one stays.

        Args:
            name: Without a slash.
            value: The number.
        """
        self.record_value(name, value)


class Callback:
    """Base of callbacks. Each method may be left out."""

    def before_step(self, run: RunView) -> None:
        """Called before step `run.step`."""

    def after_step(self, run: RunView) -> None:
        """Called once for each step, in order, when all ranks know its numbers: `run.metrics` are
        those of step `run.step`, its evaluation included. No step waits for them, so it is called
        when the next step is done (on a GPU the one after that), for the last steps before a
        checkpoint or the end of the run also earlier."""

    def after_evaluation(self, run: RunView, values: Mapping[str, float]) -> None:
        """Called after the evaluation that follows step `run.step`, unless no token of it has a
        label.

        Args:
            run: The run.
            values: The results: `eval_loss`, `eval_perplexity`, and others as in `metrics.jsonl`.
        """

    def after_save(self, run: RunView, step: int) -> None:
        """Called when a checkpoint is complete, between two steps. Training goes on meanwhile.

        Args:
            run: The run.
            step: The step of the checkpoint.
        """

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint is to remember, as JSON values."""
        return {}

    def load_state(self, state: dict[str, Any]) -> None:
        """Continue from what `state` has returned, in a new object: after a resume, and when the
        run goes back to a checkpoint."""
