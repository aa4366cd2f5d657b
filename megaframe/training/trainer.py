"""The training loop: batch, step, record, evaluate, save. What each of these does is elsewhere."""

from __future__ import annotations

import math
import signal
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from megaframe.checkpoint import CheckpointWriter, StorePath, open_checkpoint
from megaframe.checkpoint.lock import RunLock
from megaframe.checkpoint.manager import CheckpointManager
from megaframe.checkpoint.stores.peer_memory import PeerMemoryWriter
from megaframe.checkpoint.train_state import TrainState
from megaframe.config import RunConfig, dump
from megaframe.data.loader import Loader
from megaframe.data.microbatch import Microbatch
from megaframe.distributed.collectives import all_reduce, barrier
from megaframe.distributed.mesh import Mesh
from megaframe.io.run_files import CONFIG_FILE, METRICS_FILE
from megaframe.metrics import MetricsLogger, StepTimer
from megaframe.metrics.expert_load import ExpertLoadMetrics
from megaframe.metrics.memory import explain_out_of_memory
from megaframe.metrics.run_summary import make_opening_lines
from megaframe.metrics.sinks import set_metrics_aside
from megaframe.model.model_chunk import list_model_specs
from megaframe.resilience.downtime import DowntimeLedger
from megaframe.resilience.recovery import FaultHandler
from megaframe.resilience.signals import (
    LauncherProcess,
    exit_status,
    handle_signals,
    resume_command,
)
from megaframe.training.autotune import tune
from megaframe.training.batches import Batches
from megaframe.training.run_checkpoint import RunCheckpoint
from megaframe.training.start_notes import log_start
from megaframe.training.train_step import StepResult, TrainStep
from megaframe.training.validation import Validator, move_to_device

_JUMP = 1.5
"""A first loss after a load that exceeds the last one before it by this factor gets a warning."""


class Trainer:
    """One rank's part of one run.

    Args:
        config: of the run, with a known vocabulary and layout.
        mesh: the process groups of all ranks.
        notes: lines to log when the run starts.
        launcher: the launcher of this process, as seen at the start of the process, which may be
            earlier than the start of this trainer.
        lock: the locks of the run's folders, held by the first rank.

    Raises:
        UserError: for anything in the config that cannot work.
    """

    def __init__(
        self,
        config: RunConfig,
        mesh: Mesh,
        notes: Sequence[str] = (),
        launcher: LauncherProcess | None = None,
        lock: RunLock | None = None,
    ) -> None:
        self.config, self.mesh, self._lock = config, mesh, lock
        self.folder = Path(config.run.dir)
        ledger = DowntimeLedger(self.folder, keep=mesh.rank == 0)
        self._loss = torch.zeros((), dtype=torch.float64)
        self._last: StepResult | None = None
        timer = self._build(config, mesh)
        self.checkpointer = CheckpointManager(config, mesh)
        self._checkpoint = RunCheckpoint(config, self.checkpointer, self.train_step, self.loader)
        source = self.checkpointer.open_newest()
        restored = self._checkpoint.restore_or_initialize(source)
        barrier(mesh.world)  # all have seen the run folder as it was before any rank writes to it
        self.step = restored.step if restored else 0
        self._loss_before = restored.state.loss if restored else None
        old_metrics = None
        if restored is None and mesh.rank == 0:
            old_metrics = set_metrics_aside(self.folder / METRICS_FILE)
        routines = restored.state.routines if restored else None
        self._routines, routine_lines = tune(config, routines, mesh)
        self.metrics = self._open_metrics(timer)
        notes_of_start = [
            *(restored.notes if restored else ()),
            *self.checkpointer.take_notes(),
        ]
        log_start(
            self.metrics,
            config,
            mesh,
            self.train_step.schedule,
            step=self.step,
            notes=notes,
            details=routine_lines,
            old_metrics=old_metrics,
            restored_notes=notes_of_start,
        )
        self.checkpointer.create_writers(source, ledger.record_save)
        self.fault_handler = FaultHandler(
            config,
            mesh,
            self.optimizer,
            self.sharded_parameters.buckets,
            len(self.train_step.rank_of),
            self.metrics,
            ledger,
            self._go_back,
            launcher or LauncherProcess(),
        )
        self.fault_handler.start_after(self.step, restored.state if restored else None)
        if mesh.rank == 0:
            (self.folder / CONFIG_FILE).write_text(dump(config), encoding="utf-8")

    def _build(self, config: RunConfig, mesh: Mesh) -> StepTimer:
        """Build what computes a step and what feeds it. Returns the timer of steps."""
        timer = StepTimer.make_for_device(mesh.device)
        self.train_step = TrainStep(
            config,
            mesh,
            timer.time,
            lambda text: self.metrics.note_from_rank(text),  # there are none before the first step
            trace=timer.time_action,
        )
        self.sharded_parameters = self.train_step.sharded_parameters
        self.optimizer = self.train_step.optimizer
        data = mesh.group("data")
        self.loader = Loader(config, data.index, data.size)
        self.batches = Batches(self.loader, mesh.data_control_group, masked=config.data.mask_eod)
        self._validator = Validator(config, mesh, self.loader, self.train_step.evaluate)
        return timer

    def _open_metrics(self, timer: StepTimer) -> MetricsLogger:
        """Open the sinks of metrics, and print the first lines of the run."""
        config, mesh, specs = self.config, self.mesh, list_model_specs(self.config)
        self._experts: ExpertLoadMetrics | None = None
        if config.model.moe is not None:
            self._experts = ExpertLoadMetrics(config, specs, mesh.layout.expert)
        return MetricsLogger(
            config,
            mesh,
            specs,
            timer,
            start_step=self.step,
            held=self.optimizer.memory_bytes,
            kernels=self.train_step.kernels.record(),
            opening=[
                *make_opening_lines(config, mesh, specs, self.loader.sizes),
                *self.train_step.describe_kernels(),
            ],
        )

    def run(self) -> None:
        """Train until `train.steps`, with evaluations and saves in between. If a signal asks the
        run to leave earlier, saves a checkpoint and raises `SystemExit`."""
        with handle_signals(self.mesh.progress), self.fault_handler:
            try:
                while not self._finished():
                    self._one_step()
                self.checkpointer.finish(self.metrics.note, leaving=not self._at_end())
                barrier(self.mesh.world)
            except torch.OutOfMemoryError as error:
                held, device = self.optimizer.memory_bytes(), self.mesh.device
                raise explain_out_of_memory(self.mesh.rank, held, device, self.folder) from error
            finally:
                self.loader.close()
        self.metrics.close([] if self._at_end() else self._cut_short())
        if not self._at_end():
            raise SystemExit(exit_status(self.fault_handler.exit_signal))

    def _cut_short(self) -> list[tuple[str, str]]:
        """Return what the summary says about a run that a signal has ended."""
        name = signal.Signals(self.fault_handler.exit_signal).name
        rows = [("cut short", f"by {name} after step {self.step} of {self.config.train.steps}")]
        if self.checkpointer.writer_due(self.step, leaving=True) is None:
            return [*rows, ("continue with", "nothing: checkpoint.every=0 saves no step")]
        return [*rows, ("continue with", resume_command())]

    def release(self) -> None:
        """Close what this trainer has open before an in-process restart, so that the next trainer
        can continue the run."""
        self.checkpointer.wait_briefly()
        self.metrics.release()

    def _finished(self) -> bool:
        """Return whether the run is over: no steps are left, or it must leave, and the fault
        handler asks for no step to be run again."""
        over = self.fault_handler.exit_signal or self._at_end()
        return bool(over) and not self.fault_handler.judge_steps(self.metrics.write_pending_steps())

    def _at_end(self) -> bool:
        return self.step >= self.config.train.steps

    def _one_step(self) -> None:
        """Run one step and what follows it: an evaluation, the judgement of finished steps, a
        comparison of replicas, a save."""
        faults, config = self.fault_handler, self.config
        self.mesh.progress.step = self.step + 1
        faults.begin(f"step {self.step + 1}")
        self._train_step()
        if self._due(config.train.eval_every):
            faults.begin(f"the evaluation after step {self.step}")
            with self.metrics.time("evaluation"):
                self._validator.evaluate(self.metrics, self.step)
        faults.begin(f"the end of step {self.step}")
        faults.record_step(self.step)
        if faults.judge_steps(self.metrics.flush(self.step)):
            return
        if self._lock is not None:
            self._lock.check()
        if self._due(config.faults.compare_every) and faults.compare_replicas(self.step):
            return
        self.checkpointer.report_failures(self.metrics.note)
        writer = self.checkpointer.writer_due(self.step, leaving=bool(faults.exit_signal))
        if writer is not None:
            # The line of a step is written before its checkpoint is saved. Otherwise a run resumed
            # from the checkpoint could miss the line.
            if faults.judge_steps(self.metrics.write_pending_steps()):
                return
            faults.begin(f"the save after step {self.step}")
            with faults.time_save():
                self._save(writer)

    def _due(self, every: int) -> bool:
        """Return whether something is due that is done every `every` steps and at the end; 0 is
        never."""
        return bool(every) and (self.step % every == 0 or self.step == self.config.train.steps)

    def _train_step(self) -> None:
        """Run the next step on the next batch, and record its metrics."""
        metrics, device = self.metrics, self.mesh.device
        metrics.start_step()
        with metrics.time("data"):
            batch, valid = self.batches.next(self.fault_handler.is_skipped)
            microbatches = [move_to_device(microbatch, device) for microbatch in batch.microbatches]
            if self.step + 1 < self.config.train.steps:
                self.batches.look_ahead()
        with metrics.time("compute"):
            scale = self.optimizer.loss_scale / valid
            result = self.train_step.train(microbatches, self.step, scale)
            if self.fault_handler.needs_replay(result.update):
                result = self._replay(microbatches, scale, result)
        self.step += 1
        self.fault_handler.add_step(self.step, batch, result.update, result.maxima)
        self._loss = result.loss / valid
        self._record(result, batch.samples, valid)
        self._last = result
        self._compare_with_before()

    def _record(self, result: StepResult, samples: int, valid: int) -> None:
        """Record the metrics of a step. samples: of the global batch. valid: its tokens with a
        label, which are the normaliser of all losses."""
        record, update = self.metrics.record, result.update
        record("loss", self._loss, "sum")
        if self.config.model.mtp_depth:
            record("mtp_loss", result.mtp_loss / valid, "sum")
        if self._experts is not None:
            loads = self.sharded_parameters.expert_loads()
            for name, row, how in self._experts.make_records(
                loads, result.statistics, valid, self.step
            ):
                record(name, row, how)
        record("grad_norm", update.grad_norm, "last")
        record("skipped", (~torch.isfinite(update.grad_norm)).double(), "last")
        record("lr", update.lr, "last")
        record("tokens", samples * self.config.train.seq, "last")
        record("sources", torch.tensor(self.loader.consumed), "last")
        if self.config.train.precision == "fp16":
            record("loss_scale", self.optimizer.loss_scale, "last")

    def _replay(
        self, microbatches: Sequence[Microbatch], scale: float | Tensor, first: StepResult
    ) -> StepResult:
        """Run a step again, with checks of every block, and log what both runs show."""
        again = self.train_step.train(microbatches, self.step, scale, by_block=True)
        self.fault_handler.report_replay(
            self.step + 1,
            microbatches,
            (first.update, first.maxima),
            (again.update, again.maxima),
        )
        return again

    def _compare_with_before(self) -> None:
        """After a load, log a note if the first loss is much larger than the last one before."""
        if self._loss_before is not None:
            before, self._loss_before = self._loss_before, None
            now = self._global_loss()
            if now > _JUMP * before:
                self.metrics.note(
                    f"the first loss after the load is {now:.4f}, the last before it was "
                    f"{before:.4f}: check that data and config are those of the run"
                )

    def _global_loss(self) -> float:
        """Return the loss of the last step, summed over all ranks."""
        loss = float(all_reduce(self._loss.clone(), self.mesh.world).wait())
        # On a GPU, what is computed from an ended transfer is complete too.
        self.mesh.progress.check_not_ended()
        return loss

    def _save(self, writer: CheckpointWriter | PeerMemoryWriter) -> None:
        """Start a save of the last step. Weights are copied while the next step runs: its update
        waits for the copy."""
        state = TrainState(
            config=self.config,
            data=self.loader.state,
            optimizer=self.optimizer.state(),
            loss=self._global_loss(),
            grad_norm=float(self._last.update.grad_norm) if self._last else math.nan,
            history=self.fault_handler.history.save(),
            routines=self._routines,
        )
        slices = self._checkpoint.slices(owned_only=True)
        residuals = self._checkpoint.compression_slices()
        saved = self.step, [*slices, *residuals], state.model_dump(mode="json")
        self.checkpointer.start_save(writer, *saved, self.metrics.note)
        if residuals or self.config.parallel.serial:  # residuals change before the update
            writer.wait_for_copy()
        else:
            self.optimizer.delay_update(partial(self._until_copied, writer))

    def _until_copied(self, writer: CheckpointWriter | PeerMemoryWriter) -> None:
        with self.fault_handler.time_save():
            writer.wait_for_copy()

    def _go_back(
        self, choose: Callable[[StorePath], StorePath | None]
    ) -> tuple[int, TrainState] | None:
        """Wait for saves in progress, then continue from the checkpoint that `choose` picks in the
        folder of checkpoints. Returns its step and state, or None if it picks none."""
        self.checkpointer.wait_for_saves(self.metrics.note)
        path = choose(self.checkpointer.root)
        if path is None:
            return None
        restored = self._checkpoint.restore(open_checkpoint(path))
        self.step = restored.step
        for line in self.checkpointer.take_notes():
            self.metrics.note(line)
        self.checkpointer.forget_memory_copies()
        self._loss_before = None
        return restored.step, restored.state
