"""The training loop: batch, step, record, evaluate, save. What each of these does is elsewhere."""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from megaframe.checkpoint import CheckpointWriter, StorePath, open_checkpoint
from megaframe.checkpoint.lock import RunLock
from megaframe.checkpoint.manager import CheckpointManager
from megaframe.checkpoint.stores.peer_memory import PeerMemoryWriter
from megaframe.checkpoint.train_state import TrainState, list_loaded_extensions
from megaframe.config import RunConfig, dump
from megaframe.config.phases import name_phase
from megaframe.data.loader import Loader
from megaframe.data.microbatch import Microbatch
from megaframe.distributed.collectives import barrier
from megaframe.distributed.mesh import Mesh
from megaframe.io.output_files import OutputFiles
from megaframe.io.run_files import (
    CONFIG_FILE,
    METRICS_FILE,
    RUN_ID_FILE,
    SAMPLES_FILE,
    WANDB_ID_FILE,
)
from megaframe.metrics import StepTimer
from megaframe.metrics.memory import explain_out_of_memory
from megaframe.metrics.sinks import set_metrics_aside
from megaframe.model.autotune import tune
from megaframe.model.layer_inputs import move_to_device
from megaframe.resilience.downtime import DowntimeLedger
from megaframe.resilience.launcher import LauncherProcess
from megaframe.resilience.recovery import FaultHandler
from megaframe.resilience.signals import exit_status, handle_signals, resume_command
from megaframe.training.auto_layout import refuse_undecided
from megaframe.training.batches import Batches
from megaframe.training.callbacks import CallbackRunner
from megaframe.training.measured_stages import decide_stages
from megaframe.training.run_checkpoint import Restored, RunCheckpoint
from megaframe.training.same_on_ranks import check_same_extensions, check_same_streams
from megaframe.training.start_notes import log_start
from megaframe.training.step_metrics import StepMetrics
from megaframe.training.task_evaluation import TaskEvaluator
from megaframe.training.text_samples import TextSampler
from megaframe.training.train_step import StepResult, TrainStep
from megaframe.training.validation import Validator


class Trainer:
    """One rank's part of one run.

    Args:
        config: The run, as `resolve_config` returns it.
        mesh: The process groups of all ranks.
        notes: Lines to log when the run starts.
        launcher: The launcher of this process, as seen at the start of the process, which may be
            earlier than the start of this trainer.
        lock: The locks of the run's folders, held by the first rank.

    Raises:
        UserError: Something in the config cannot work, or is not decided yet.
    """

    def __init__(
        self,
        config: RunConfig,
        mesh: Mesh,
        notes: Sequence[str] = (),
        launcher: LauncherProcess | None = None,
        lock: RunLock | None = None,
    ) -> None:
        config, stage_times = decide_stages(config, mesh)
        refuse_undecided(config)
        self.config, self.mesh, self._lock = config, mesh, lock
        self.folder = Path(config.run.dir)
        check_same_extensions(config.run, mesh)
        files = OutputFiles(self.folder) if mesh.rank == 0 else None
        launcher = launcher or LauncherProcess()
        ledger = DowntimeLedger(self.folder, files, launcher)
        timer = StepTimer.make_for_device(mesh.device)
        self._build_step(timer)
        self.checkpointer = CheckpointManager(config, mesh)
        self._checkpoint = RunCheckpoint(config, self.checkpointer, self.train_step, self.loader)
        source = self.checkpointer.open_newest()
        restored = self._checkpoint.restore_or_initialize(source)
        barrier(mesh.world)  # all have seen the run folder as it was before any rank writes to it
        self.step = restored.step if restored else 0
        joined = self._join_islands()
        state = restored.state if restored else None
        self._start_metrics(timer, files, restored, [*notes, *stage_times.notes, *joined])
        for name, value in stage_times.values.items():
            self.metrics.record(f"measured_stages/{name}", value)
        self.callbacks = CallbackRunner(
            config, mesh, self.metrics, state.callbacks if state else {}
        )
        self.checkpointer.create_writers(source, self.callbacks.watch_saves(ledger.record_save))
        self.fault_handler = FaultHandler(
            config.faults,
            self.folder,
            mesh,
            self.optimizer,
            self.train_step.sharded_parameters.buckets,
            len(self.train_step.rank_of),
            self.metrics,
            ledger,
            self._go_back,
            launcher,
        )
        self.fault_handler.start_after(self.step, state)
        if files is not None:
            files.write(CONFIG_FILE, dump(config))
            for name in (RUN_ID_FILE, WANDB_ID_FILE):
                files.keep(name)

    def _build_step(self, timer: StepTimer) -> None:
        """Build what computes a step and what feeds it. timer: of the steps."""
        config, mesh = self.config, self.mesh
        self.train_step = TrainStep(
            config,
            mesh,
            timer.time,
            lambda text: self.metrics.note_from_rank(text),  # there are none before the first step
            trace=timer.time_action,
        )
        self.optimizer = self.train_step.optimizer
        data = mesh.group("data")
        self.loader = Loader(config, data.index, data.size)
        check_same_streams(self.loader, mesh)
        self.batches = Batches(
            self.loader,
            mesh.data_control_group,
            masked=self.loader.masks_labels,
            islands=mesh.layout.islands,
        )
        self._validator = Validator(config.train, mesh, self.loader, self.train_step.evaluate)
        self._evaluated: tuple[int, float | None] = (-1, None)
        self._task_evaluator: TaskEvaluator | None = None
        if config.evaluate.tasks:
            self._task_evaluator = TaskEvaluator(config, mesh, self.train_step)
        self._text_sampler: TextSampler | None = None
        if config.train.sample_every:
            self._text_sampler = TextSampler(config, mesh, self.train_step)

    def _start_metrics(
        self,
        timer: StepTimer,
        files: OutputFiles | None,
        restored: Restored | None,
        notes: Sequence[str],
    ) -> None:
        """Measure the CPU's routines, open the metrics of the run, and log its start.

        Args:
            timer: Of the steps.
            files: Those of the run, on the first rank.
            restored: What was loaded, if the run continues.
            notes: Lines to log.
        """
        config, mesh = self.config, self.mesh
        state, old_metrics = restored.state if restored else None, None
        if restored is None and mesh.rank == 0:
            old_metrics = set_metrics_aside(self.folder / METRICS_FILE)
            set_metrics_aside(self.folder / SAMPLES_FILE)
        self._routines, routine_details, routine_notes = tune(
            config.run, config.train, config.kernels, state.routines if state else None, mesh
        )
        self._step_metrics = StepMetrics(
            config,
            mesh,
            self.train_step,
            self.loader,
            timer,
            start_step=self.step,
            previous_loss=state.loss if state else None,
            files=files,
        )
        if state is not None:
            self._step_metrics.noise.averages = state.gradient_noise
        self.metrics = self._step_metrics.logger
        log_start(
            self.metrics,
            config,
            mesh,
            self.train_step.schedule,
            step=self.step,
            notes=[
                *notes,
                *self.loader.describe_sources(max(0, config.train.steps - self.step)),
                *routine_notes,
            ],
            details=routine_details,
            old_metrics=old_metrics,
            restored_notes=[
                *(restored.notes if restored else self._checkpoint.initial_notes),
                *self.checkpointer.take_notes(),
            ],
        )

    def run(self) -> str:
        """Train until `train.steps`, with evaluations and saves in between. If a callback asks the
        run to stop earlier, saves a checkpoint; if a signal does, also raises `SystemExit`.

        Returns:
            What is missing in the files of the run, on the first rank; empty for nothing.
        """
        with handle_signals(self.mesh.progress), self.fault_handler:
            try:
                while not self._is_over() or self._judge_last_steps():
                    self._run_step()
                self.checkpointer.finish(self.metrics.note, leaving=not self.is_at_end)
                barrier(self.mesh.world)
                self.callbacks.finish()
            except torch.OutOfMemoryError as error:
                memory, device = self.optimizer.count_memory_bytes(), self.mesh.device
                raise explain_out_of_memory(self.mesh.rank, memory, device, self.folder) from error
            finally:
                self.loader.close()
        is_done = self.step >= self.config.train.steps
        early_end = [] if is_done else self._describe_early_end()
        missing = self.metrics.close([*self._step_metrics.noise.summarize(), *early_end])
        if self.fault_handler.exit_signal and not is_done:
            raise SystemExit(exit_status(self.fault_handler.exit_signal))
        return "; ".join([*missing, *self.checkpointer.list_missing()])

    def _describe_early_end(self) -> list[tuple[str, str]]:
        """Return what the summary says about a run that has ended before its last step."""
        number, steps = self.fault_handler.exit_signal, self.config.train.steps
        if number:
            name = signal.Signals(number).name
            rows = [("cut short", f"by {name} after step {self.step} of {steps}")]
        elif self.callbacks.stopping:
            why = self.callbacks.describe_stop()
            rows = [("stopped", f"after step {self.step} of {steps} {why}")]
        elif (place := self.config.data.phase) is not None and self.step >= place.end:
            phase = name_phase(self.config.data, place.number)
            return [("ended", f"{phase} after step {self.step} of {steps}")]
        else:
            rows = [("stopped", f"after step {self.step} of {steps}, by train.stop_after")]
        if self.checkpointer.choose_writer(self.step, leaving=True) is None:
            return [*rows, ("continue with", "nothing: checkpoint.every=0 saves no step")]
        return [*rows, ("continue with", resume_command())]

    def release(self) -> None:
        """Close what this trainer has open before an in-process restart, so that the next trainer
        can continue the run."""
        self.checkpointer.wait_briefly()
        self.metrics.release()

    def _is_over(self) -> bool:
        """Return whether no steps are left, or the run must leave."""
        return self._is_leaving() or self.is_at_end

    def _judge_last_steps(self) -> bool:
        """Write the lines of the last steps, and act on what they say. Returns whether the run has
        gone back, so that steps are run again."""
        return self.fault_handler.judge_steps(self.metrics.write_pending_steps())

    def _is_leaving(self) -> bool:
        """Return whether a signal or a callback ends the run before its last step."""
        return bool(self.fault_handler.exit_signal) or self.callbacks.stopping

    @property
    def is_at_end(self) -> bool:
        """Whether no steps are left, of the run or of its phase."""
        return self.step >= self.config.train.last_step

    def _run_step(self) -> None:
        """Run one step and what follows it: an evaluation, the judgement of finished steps, a
        comparison of replicas, a save."""
        faults, config = self.fault_handler, self.config
        self.mesh.progress.step = self.step + 1
        self.callbacks.before_step(self.step + 1)
        faults.begin(f"step {self.step + 1}")
        self._train_step()
        self._run_evaluations()
        if self._text_sampler is not None and self._is_due(config.train.sample_every):
            faults.begin(f"the samples after step {self.step}")
            with self.metrics.time("sampling"):
                samples = self._text_sampler.sample(self.step)
            self.metrics.add_samples(self.step, samples)
        self.callbacks.end_step()
        faults.begin(f"the end of step {self.step}")
        faults.record_step(self.step)
        if faults.judge_steps(self.metrics.flush(self.step)):
            return
        if self._lock is not None:
            self._lock.check()
        if self._is_due(config.faults.compare_every) and faults.compare_replicas(self.step):
            return
        self.checkpointer.report_failures(self.metrics.note)
        writer = self.checkpointer.choose_writer(self.step, leaving=self._is_leaving())
        if writer is not None:
            # The line of a step is written before its checkpoint is saved. Otherwise a run resumed
            # from the checkpoint could miss the line.
            if faults.judge_steps(self.metrics.write_pending_steps()):
                return
            faults.begin(f"the save after step {self.step}")
            with faults.time_save():
                self._save(writer)

    def _run_evaluations(self) -> None:
        """Evaluate on the validation split and on tasks, if the last step is one of theirs."""
        config, values = self.config, {}
        on_split, tasks = self._is_due(config.train.eval_every), self._task_evaluator
        if on_split:
            self.fault_handler.begin(f"the evaluation after step {self.step}")
            with self.metrics.time("evaluation"):
                values = self._validator.evaluate(self.metrics, self.step)
            self._evaluated = self.step, values.get("eval_loss")
        on_tasks = tasks is not None and self._is_due(config.evaluate.every)
        if tasks is not None and on_tasks:
            self.fault_handler.begin(f"the tasks after step {self.step}")
            with self.metrics.time("evaluation"):
                values |= tasks.evaluate(self.metrics, self.step)
        if on_split or on_tasks:
            self.callbacks.after_evaluation(values)

    def _is_due(self, interval: int) -> bool:
        """Return whether something is due that is done every `interval` steps and at the end, of a
        phase as well; 0 is never."""
        return bool(interval) and (
            self.step % interval == 0 or self.step == self.config.train.last_step
        )

    def _train_step(self) -> None:
        """Run the next step on the next batch, and record its metrics."""
        metrics, device = self.metrics, self.mesh.device
        metrics.start_step()
        with metrics.time("data"):
            batch, valid = self.batches.take_next(self.fault_handler.is_skipped)
            microbatches = [move_to_device(microbatch, device) for microbatch in batch.microbatches]
            if self.step + 1 < self.config.train.last_step:
                self.batches.look_ahead()
        with metrics.time("compute"):
            # Without any valid token all gradients are zero, whatever divides them.
            scale = self.optimizer.loss_scale / (valid or 1.0)
            measured = self._step_metrics.noise.is_due(self.step + 1)
            result = self.train_step.train(microbatches, self.step, scale, measured=measured)
            if self.fault_handler.needs_replay(result.update):
                result = self._replay_step(microbatches, scale, result)
        self.step += 1
        self.fault_handler.add_step(self.step, batch, result.update, result.maxima)
        self._step_metrics.record(self.step, result, batch, valid)

    def _replay_step(
        self, microbatches: Sequence[Microbatch], scale: float | Tensor, first: StepResult
    ) -> StepResult:
        """Run a step again, with checks of every block, and log what both runs show."""
        replay = self.train_step.train(microbatches, self.step, scale, by_block=True)
        self.fault_handler.report_replay(
            self.step + 1,
            microbatches,
            (first.update, first.maxima),
            (replay.update, replay.maxima),
        )
        return replay

    def _save(self, writer: CheckpointWriter | PeerMemoryWriter) -> None:
        """Start a save of the last step."""
        evaluated_step, eval_loss = self._evaluated
        state = TrainState(
            config=self.config,
            data=self.loader.state,
            optimizer=self.optimizer.read_state(),
            loss=self._step_metrics.reduce_loss(),
            grad_norm=self._step_metrics.read_grad_norm(),
            eval_loss=eval_loss if evaluated_step == self.step else None,
            history=self.fault_handler.history.save(),
            routines=self._routines,
            extensions=list_loaded_extensions(),
            callbacks=self.callbacks.state(),
            gradient_noise=self._step_metrics.noise.averages,
            base=self._checkpoint.base,
        )
        self._checkpoint.start_save(
            writer, self.step, state, self.metrics.note, self.fault_handler.time_save
        )

    def _join_islands(self) -> list[str]:
        """Begin or continue with the other islands, maybe at a later step. Returns lines to log."""
        islands, before = self.train_step.islands, self.step
        if islands is not None:
            self.step = islands.join(self.step)
            if self.step != before:
                self.loader.skip(self.step - before)
                return [f"joins the other islands at step {self.step}, with their weights"]
        return []

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
        for line in self._join_islands():
            self.metrics.note(line)
        self.callbacks.load_state(restored.state.callbacks)
        self._step_metrics.noise.averages = restored.state.gradient_noise
        for line in self.checkpointer.take_notes():
            self.metrics.note(line)
        self.checkpointer.forget_memory_copies()
        self._step_metrics.previous_loss = None
        return self.step, restored.state
