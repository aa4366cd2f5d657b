"""Calls the callbacks of a run (`run.callbacks`) at the points of a step where the trainer says so,
and for each step whose metrics have become known.

Only the first rank has callbacks. What they can do to the run, ending it, is a number among the
step's metrics, which all ranks read when these have been reduced: so they stop after the same step,
and nothing waits for a callback's decision.
"""

from __future__ import annotations

import json
import math
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

from megaframe.config import RunConfig
from megaframe.config.part_calls import describe_failure
from megaframe.distributed.mesh import Mesh
from megaframe.errors import UserError
from megaframe.extensions import Callback, RunView
from megaframe.metrics import MetricsLogger
from megaframe.metrics.metrics_logger import StepValues

CallbackStates = Mapping[str, dict[str, Any]]
"""What callbacks have in a checkpoint, by their name."""
_STOP = "agreed/stop"
"""Metric by which ranks know that a callback asks the run to stop."""


class CallbackRunner:
    """The callbacks of a run. All ranks call the same methods at the same points.

    Attributes:
        stopping: Whether a callback has asked the run to stop, once all ranks know of it.
    """

    def __init__(
        self, config: RunConfig, mesh: Mesh, metrics: MetricsLogger, states: CallbackStates
    ) -> None:
        """Make the callbacks on the first rank.

        Args:
            config: The run.
            mesh: This rank's groups.
            metrics: Of the run.
            states: As in `load_state`.

        Raises:
            UserError: A callback cannot be made.
        """
        self._config, self._metrics, self._progress = config, metrics, mesh.progress
        self._is_first = mesh.rank == 0
        self.stopping = False
        self._saved: deque[int] = deque()  # filled by the thread that saves
        self._added: dict[str, float] | None = None
        """What callbacks record of a step whose metrics they are given; None at other times."""
        self.load_state(states)
        metrics.observe_steps(self._take_metrics)

    def load_state(self, states: CallbackStates) -> None:
        """Make the callbacks anew, at a start and when the run goes back to a checkpoint.

        Args:
            states: What `state` returned for the checkpoint; empty without one. What belongs to no
                callback of this run is left out.

        Raises:
            UserError: A callback fails.
        """
        self.stopping = False
        self._step = 0
        self._request: tuple[str, str, int] | None = None
        self._callbacks: dict[str, tuple[Callback, RunView]] = {}
        counts: Counter[str] = Counter()
        for part in self._config.run.callbacks if self._is_first else ():
            counts[part.name] += 1
            name = part.name if counts[part.name] == 1 else f"{part.name}-{counts[part.name]}"
            with _name_errors(name, part, "when it is made"):
                callback = part.make_callback(self._config)
            if not isinstance(callback, Callback):
                kind = type(callback).__name__
                raise UserError(f"callback {name}: make_callback returns {kind}, not a Callback")
            if name in states:
                with _name_errors(name, callback, "when it loads its state"):
                    callback.load_state(states[name])
            view = RunView(
                self._config,
                partial(self._record, name),
                self._metrics.note,
                partial(self._ask_to_stop, name),
            )
            self._callbacks[name] = callback, view

    def state(self) -> dict[str, dict[str, Any]]:
        """Return what a checkpoint keeps of each callback, by name; nothing on other ranks.

        Raises:
            UserError: A callback fails, or its state is no plain data.
        """
        states = {}
        for name, (callback, _) in self._callbacks.items():
            with _name_errors(name, callback, f"in its state of step {self._step}"):
                state = callback.state()
            try:
                # As a resume will get it.
                states[name] = json.loads(json.dumps(state))
            except (TypeError, ValueError) as error:
                raise UserError(f"callback {name}: its state is no plain data: {error}") from None
            if not isinstance(state, dict):
                raise UserError(f"callback {name}: its state is {type(state).__name__}, not a dict")
        return states

    def before_step(self, step: int) -> None:
        """Call before a step. step: its number."""
        self._step = step
        self._call(f"before step {step}", lambda callback, run: callback.before_step(run))

    def after_evaluation(self, values: Mapping[str, float]) -> None:
        """Call after an evaluation. values: its results; nothing is called without any."""
        if values:
            self._call(
                f"after the evaluation of step {self._step}",
                lambda callback, run: callback.after_evaluation(run, values),
            )

    def end_step(self) -> None:
        """Call at the end of a step, before its metrics are reduced."""
        self._tell_of_saves()
        if self._config.run.callbacks:
            self._metrics.record(_STOP, float(self._request is not None), "max")

    def watch_saves(self, record_save: Callable[[int], None]) -> Callable[[int], None]:
        """Return a function that is called, by any thread, with the step of each complete
        checkpoint. Callbacks are told between two steps.

        Args:
            record_save: What else it calls.
        """

        def add_save(step: int) -> None:
            record_save(step)
            self._saved.append(step)

        return add_save

    def _take_metrics(self, values: StepValues) -> dict[str, float]:
        """Give callbacks the metrics of a step, which all ranks have reduced. Returns what they
        record of it."""
        self.stopping |= bool(values.get(_STOP))
        step, self._added = int(values["step"]), {}
        # A step without labels has no loss; a callback that reads it need not know.
        shown = {"loss": math.nan}
        shown |= {name: values[name] for name in values if not name.startswith("agreed/")}
        for _, run in self._callbacks.values():
            run.metrics, run.metrics_step = shown, step
        self._call(f"after step {step}", lambda callback, run: callback.after_step(run), step)
        added, self._added = self._added, None
        return added

    def finish(self) -> None:
        """Call when the last save is complete, at the end of the run."""
        self._tell_of_saves()

    def describe_stop(self) -> str:
        """Return who has asked the run to stop, and why."""
        if self._request is None:
            return "by a callback"
        name, reason, step = self._request
        return f"by callback {name} in step {step}: {reason}"

    def _tell_of_saves(self) -> None:
        while self._saved:
            self._call_after_save(self._saved.popleft())

    def _call_after_save(self, saved: int) -> None:
        self._call(
            f"after the save of step {saved}", lambda callback, run: callback.after_save(run, saved)
        )

    def _call(
        self, when: str, call: Callable[[Callback, RunView], None], step: int | None = None
    ) -> None:
        """Call each callback. step: the one that it is about; None for the last one."""
        for name, (callback, run) in self._callbacks.items():
            run.step = self._step if step is None else step
            # The watchdog names it if it takes longer than `faults.step_timeout`.
            self._progress.begin_activity(f"callback {name} {when}")
            with _name_errors(name, callback, when):
                call(callback, run)

    def _record(self, name: str, key: str, value: float) -> None:
        if not key or "/" in key:
            raise ValueError(f"{key!r} cannot be recorded: a name has no slash")
        name, value = f"callbacks/{name}/{key}", float(value)
        if self._added is None:
            self._metrics.record(name, value, "last")
        else:
            self._added[name] = value

    def _ask_to_stop(self, name: str, reason: str) -> None:
        if self._request is None:
            step = self._callbacks[name][1].step
            self._request = name, reason, step
            self._metrics.note(f"step {step}: callback {name} asks the run to stop: {reason}")


@contextmanager
def _name_errors(name: str, owner: object, when: str) -> Iterator[None]:
    """Return a context that turns what a callback raises into a UserError.

    Args:
        name: The callback.
        owner: The object whose code runs.
        when: It runs, in words.
    """
    try:
        yield
    except Exception as error:
        text = describe_failure(owner, error)
        raise UserError(f"callback {name} fails {when}: {text}") from error
