"""Handles faults of a run at the points of a step where the trainer calls it.

A step is judged when its metrics line has been reduced over all ranks, while the next step runs. So
all ranks judge by the same numbers at the same point, no step waits for the judgement, and no extra
communication is needed. Only a replay waits for its step, because it must come before the next one.
"""

from __future__ import annotations

import signal
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from torch import Tensor

from megaframe.checkpoint import StorePath
from megaframe.checkpoint.folder import list_checkpoints, step_of
from megaframe.checkpoint.train_state import TrainState
from megaframe.config import FaultToleranceConfig
from megaframe.data.loader import StepBatch
from megaframe.data.microbatch import Microbatch
from megaframe.data_parallel.bucket import Bucket
from megaframe.distributed.mesh import Mesh
from megaframe.distributed.rank_progress import name_ranks
from megaframe.errors import BadDevice, CollectiveMismatch, LostRanks, NotFinite, UserError
from megaframe.metrics import MetricsLogger
from megaframe.metrics.metrics_logger import StepValues
from megaframe.optim.optimizer import Optimizer, UpdateResult
from megaframe.pipeline_parallel.nonfinite import PassMaximum, locate_nonfinite
from megaframe.resilience.downtime import FAULTS, DowntimeLedger
from megaframe.resilience.launcher import LauncherProcess
from megaframe.resilience.replica_check import ReplicaCheck, ReplicaMismatch
from megaframe.resilience.spike_policy import SpikePolicy
from megaframe.resilience.stragglers import StragglerDetector

GoBack = Callable[[Callable[[StorePath], StorePath | None]], tuple[int, TrainState] | None]
"""A function that continues the run from an earlier checkpoint. It gets a function that chooses the
checkpoint in a folder of them. It returns the checkpoint's step and state, or None if none was
chosen."""


@dataclass(frozen=True)
class _UnjudgedStep:
    """A step that has not been judged yet.

    Attributes:
        step: Its number, counted from 1.
        first: Number of its first sample.
        samples: Sample numbers of each microbatch of this rank.
        update: The outcome of its update.
        maxima: The largest magnitudes of its passes.
    """

    step: int
    first: int
    samples: Sequence[Tensor]
    update: UpdateResult
    maxima: Sequence[PassMaximum]


class FaultHandler:
    """One rank's handling of faults. All ranks call it at the same points.

    As a context manager it ends the watch over steps.

    Attributes:
        history: What it remembers of earlier steps.
        exit_signal: The signal that asked the run to exit, once all ranks know of it; 0 for none.
    """

    def __init__(
        self,
        faults: FaultToleranceConfig,
        folder: Path,
        mesh: Mesh,
        optimizer: Optimizer,
        buckets: Sequence[Bucket],
        stages: int,
        metrics: MetricsLogger,
        ledger: DowntimeLedger,
        go_back: GoBack,
        launcher: LauncherProcess,
    ) -> None:
        """Start to watch over steps, if `faults.step_timeout` is set.

        Args:
            faults: What to do about them.
            folder: Of the run.
            mesh: This rank's groups.
            optimizer: Names the parameters whose gradients are not finite.
            buckets: The weights that are compared with their replicas.
            stages: Number of stages of the pipeline.
            metrics: Shares metrics among ranks, and logs.
            ledger: Accounts for lost time.
            go_back: Continues from an earlier checkpoint.
            launcher: The launcher of this process.
        """
        self._faults, self._mesh, self._optimizer = faults, mesh, optimizer
        self._stages, self._metrics, self._ledger = stages, metrics, ledger
        self._load_earlier = go_back
        self.history = SpikePolicy(faults)
        self.exit_signal = 0
        self._launcher = launcher
        self._unjudged: deque[_UnjudgedStep] = deque()
        self._compared = self._times_back = 0
        self._save_seconds = 0.0
        self._mismatches: dict[int, ReplicaMismatch] = {}
        self._replicas = ReplicaCheck(mesh, buckets, optimizer.synchronize_state)
        factor = faults.straggler_factor
        self._stragglers = StragglerDetector(mesh, factor) if factor is not None else None
        mesh.watch_steps(faults.step_timeout, folder / FAULTS)

    def __enter__(self) -> FaultHandler:
        self._mesh.progress.in_step_loop = True
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # A rank that ends with its own error does not restart, so others must not wait for it.
        lost = isinstance(error, LostRanks) and not isinstance(error, CollectiveMismatch)
        self._mesh.progress.in_step_loop = lost
        self.begin("")
        if error is None:
            self._metrics.note(self._ledger.summarize())

    def start_after(self, step: int, state: TrainState | None) -> None:
        """Announce that training continues after a step.

        Args:
            step: The last step that is done; 0 at the start of a run.
            state: The state of the checkpoint that was loaded, if any.
        """
        self._compared = step
        self._ledger.record_start(step)
        if state is not None:
            self.history.load(state.history)

    def begin(self, doing: str) -> None:
        """Announce that something begins that must end within `faults.step_timeout`.

        Args:
            doing: What it is; empty for something without a time limit.
        """
        self._mesh.progress.begin_activity(doing)

    def is_skipped(self, batch: StepBatch) -> bool:
        """Return whether this data is to be skipped."""
        return self.history.is_skipped(batch.first)

    def needs_replay(self, update: UpdateResult) -> bool:
        """Return whether a step is to be run again with checks of every block
        (`faults.non_finite=replay`), because its update was skipped."""
        return self._faults.non_finite == "replay" and not update.is_finite()

    def report_replay(
        self,
        step: int,
        microbatches: Sequence[Microbatch],
        first: tuple[UpdateResult, Sequence[PassMaximum]],
        replay: tuple[UpdateResult, Sequence[PassMaximum]],
    ) -> None:
        """Log what running a step twice has shown. Collective.

        Args:
            step: The step's number, counted from 1.
            microbatches: This rank's.
            first: Update and largest magnitudes of the first run.
            replay: Those of the second run.
        """
        samples = [microbatch.samples_B for microbatch in microbatches]
        text = f"step {step}: {self._describe_nonfinite(*first, samples)}; "
        update, maxima = replay
        if update.is_finite():
            text += "finite when rerun: a transient fault"
        else:
            text += f"the same when rerun: {self._locate(maxima, samples)}"
        self._metrics.note(text)

    def add_step(
        self, step: int, batch: StepBatch, update: UpdateResult, maxima: Sequence[PassMaximum]
    ) -> None:
        """Keep the outcome of a step until it can be judged (see `judge_steps`).

        Args:
            step: The step's number.
            batch: This rank's data of the step.
            update: The outcome of its optimizer step.
            maxima: The largest magnitude of each pass on this rank.
        """
        samples = [microbatch.samples_B for microbatch in batch.microbatches]
        self._unjudged.append(_UnjudgedStep(step, batch.first, samples, update, maxima))

    @contextmanager
    def time_save(self) -> Iterator[None]:
        """Count the time within this context as waiting for a save."""
        began = time.perf_counter()
        with self._metrics.time("checkpoint"):
            yield
        self._save_seconds += time.perf_counter() - began

    def record_step(self, step: int) -> None:
        """Add to the step's metrics the signal that this rank has received, so that all ranks get
        to know it, and the time lost."""
        received = self._mesh.progress.leave_signal or (
            signal.SIGTERM if self._launcher.has_ended else 0
        )
        self._metrics.record("agreed/told", float(received), "max")
        lost = self._ledger.record_step(step, self._save_seconds)
        self._save_seconds = 0.0
        for cause, seconds in lost.items():
            self._metrics.record(f"lost_seconds/{cause}", seconds, "last")
        for line in self._stragglers.add_step() if self._stragglers else ():
            self._metrics.note(f"step {step}: {line}")

    def judge_steps(self, step_values: Sequence[StepValues]) -> bool:
        """Judge the next steps and act on the result.

        Args:
            step_values: The reduced metrics of the steps not judged yet, oldest first.

        Returns:
            Whether the run has gone back to a checkpoint.

        Raises:
            NotFinite: The run must end.
        """
        return any(self._judge(metrics) for metrics in step_values)

    def _judge(self, metrics: StepValues) -> bool:
        step = self._unjudged.popleft()
        self.exit_signal = self.exit_signal or int(metrics["agreed/told"])
        finite = not metrics["skipped"]  # of all islands, so that all ranks decide alike
        text = f"step {step.step}"
        if not finite:
            reason = self._describe_nonfinite(step.update, step.maxima, step.samples)
            text += f": {reason}; update skipped"
        judgement = self.history.judge(step.first, metrics.get("loss"), finite)
        if judgement.choice == "stop":
            self._metrics.note(text)
            self._metrics.close([("cut short", f"after step {step.step}: {judgement.why}")])
            raise NotFinite(f"{text}; {judgement.why}")
        if judgement.choice == "go_back":
            return self._go_back(step.step, f"{text}: {judgement.why}")
        if not finite:
            self._metrics.note(text)
        return False

    def compare_replicas(self, step: int) -> bool:
        """Compare the weights after `step` with their replicas.

        Returns:
            Whether the run has gone back to a checkpoint because they differ.

        Raises:
            BadDevice: If they differ at this step for the second time, or there is no earlier
                checkpoint.
        """
        mismatch, before = self._replicas.compare(), self._mismatches.pop(step, None)
        if mismatch is None:
            self._compared = step
            if before is not None:
                text = f"step {step}: all replicas are equal when rerun; the difference on"
                self._metrics.note(f"{text} {name_ranks(before.ranks)} was a transient fault")
            return False
        ranks = name_ranks(mismatch.ranks) + (
            "" if mismatch.sure else ", of which one must be wrong,"
        )
        text = f"step {step}: weights on {ranks} differ from their replicas"
        if before is not None:
            self._metrics.note(text)
            raise BadDevice(f"{text}, again after resuming from a checkpoint: check the device")
        self._mismatches[step] = mismatch
        if not self._go_back(self._compared + 1, text):
            raise BadDevice(f"{text}, and there is no earlier checkpoint to resume from")
        return True

    def _describe_nonfinite(
        self, update: UpdateResult, maxima: Sequence[PassMaximum], samples: Sequence[Tensor]
    ) -> str:
        """Describe which gradients of a step were not finite, and where that began. Collective."""
        names = self._optimizer.find_nonfinite_parameters(update)
        subject = ", ".join(names[:3]) + (" ..." if len(names) > 3 else "")
        subject = (
            f"gradients of {subject} are" if names else "the norm of all gradients together is"
        )
        return f"{subject} not finite ({self._locate(maxima, samples)})"

    def _locate(self, maxima: Sequence[PassMaximum], samples: Sequence[Tensor]) -> str:
        world, device = self._mesh.world, self._mesh.device
        return locate_nonfinite(maxima, self._stages, world, device, samples)

    def _go_back(self, before: int, why: str) -> bool:
        """Continue from the newest checkpoint of a step before `before`. Returns False if there is
        none. Raises `NotFinite` if the run has gone back there too often."""
        self.begin(f"the way back before step {before}")
        self._times_back += 1
        key, mesh = f"back/{self._times_back}", self._mesh

        def choose(home: StorePath) -> StorePath | None:
            # Only the first rank looks, because others may not yet see a checkpoint that was just
            # published.
            if mesh.rank == 0:
                names = [path.name for path in _list_checkpoints(home) if step_of(path) < before]
                mesh.store.set(key, names[0] if names else "")
            name = mesh.store.get(key).decode()
            return home / name if name else None

        with self._metrics.time("checkpoint"):
            loaded = self._load_earlier(choose)
        if loaded is None:
            self._metrics.note(f"{why}; there is no earlier checkpoint to resume from")
            return False
        step, state = loaded
        self.history.load(state.history)
        self._unjudged.clear()
        self._metrics.rewind(step)
        text = f"{why}; continuing from the checkpoint of step {step}"
        self._metrics.note(text)
        self._ledger.record_rollback(step, text)
        if not self.history.count_rollback(step):
            raise NotFinite(f"{text} too often, giving up")
        return True


def _list_checkpoints(home: StorePath) -> list[StorePath]:
    try:
        return list_checkpoints(home)
    except OSError as error:
        raise UserError(f"cannot look for checkpoints in {home}: {error.strerror}") from None
