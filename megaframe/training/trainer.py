"""Trainer: the training loop: batch, step, record, evaluate, save; all else is elsewhere."""

from __future__ import annotations

import math
import signal
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megaframe.architecture.pipeline import summarize_pipeline
from megaframe.checkpoint import (
    Checkpoint,
    CheckpointWriter,
    Slice,
    StorePath,
    find_checkpoint,
    locate_checkpoint,
    open_checkpoint,
)
from megaframe.checkpoint.lock import RunLock
from megaframe.checkpoint.manager import CheckpointManager
from megaframe.checkpoint.stores.peer_memory import PeerMemoryWriter
from megaframe.checkpoint.train_state import (
    TrainState,
    check_same_run,
    describe_missing_state,
    describe_resumption,
    read_train_state,
    select_saved,
)
from megaframe.config import RunConfig, dump
from megaframe.data.loader import Loader
from megaframe.data.microbatch import IGNORE, Microbatch
from megaframe.data.tokenizer import load_tokenizer
from megaframe.data_parallel.bucket import COMPRESSION_PREFIX
from megaframe.distributed.collectives import all_reduce, barrier
from megaframe.distributed.device import copy_to_device
from megaframe.distributed.mesh import Mesh, ranks_on_this_node
from megaframe.errors import UnreadableFile, UserError
from megaframe.io.run_files import CONFIG_FILE, METRICS_FILE
from megaframe.metrics import MetricsLogger, StepTimer
from megaframe.metrics.expert_load import ExpertLoadMetrics
from megaframe.metrics.memory import explain_out_of_memory
from megaframe.metrics.run_summary import opening_lines
from megaframe.metrics.sinks import set_metrics_aside
from megaframe.model.model_chunk import model_specs
from megaframe.resilience.downtime import DowntimeLedger, last_saved
from megaframe.resilience.recovery import FaultHandler
from megaframe.resilience.signals import (
    LauncherProcess,
    exit_status,
    handle_signals,
    resume_command,
)
from megaframe.training.autotune import tune
from megaframe.training.batches import Batches
from megaframe.training.initialize_from import match_weights
from megaframe.training.train_step import StepResult, TrainStep
from megaframe.validate.invariance import layout_dependence_note
from megaframe.validate.run import find_warnings

_JUMP = 1.5
"""A first loss after a load that exceeds the last one before it by this factor gets a warning."""


class Trainer:
    """One rank's part of one run.

    notes: lines to log when the run starts.
    launcher: the launcher of this process, as seen at the start of the process, which may be
    earlier than the start of this trainer.
    lock: the locks of the run's folders, held by the first rank.
    Raises `UserError` for anything in the config that cannot work.
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
        self.step = 0
        self._loss = torch.zeros((), dtype=torch.float64)
        self._last: StepResult | None = None
        self._loss_before: float | None = None
        self._dropped = False
        self._differences: list[str] = []
        timer = StepTimer.for_device(mesh.device)
        self.train_step = TrainStep(
            config,
            mesh,
            timer.time,
            lambda text: self.meter.note_from_rank(text),
            trace=timer.time_action,
        )
        self.sharded_parameters = self.train_step.sharded_parameters
        self.optimizer = self.train_step.optimizer
        data = mesh.group("data")
        self.loader = Loader(config, data.index, data.size)
        self.batches = Batches(self.loader, mesh.data_control_group, masked=config.data.mask_eod)
        self._token_bytes = _token_bytes(config, mesh.device)
        self.checkpointer = CheckpointManager(config, mesh)
        source = self.checkpointer.open_newest()
        state = self._restore_or_initialise(source)
        barrier(mesh.world)  # all have seen the run folder as it was before any rank writes to it
        aside = None
        if state is None and mesh.rank == 0:
            aside = set_metrics_aside(self.folder / METRICS_FILE)
        recorded = None if state is None else state.routines
        self._routines, chosen = tune(config, recorded, mesh)
        specs = model_specs(config)
        self.meter = MetricsLogger(
            config,
            mesh,
            specs,
            timer,
            start_step=self.step,
            held=self.optimizer.memory_bytes,
            kernels=self.train_step.kernels.record(),
            opening=[
                *opening_lines(config, mesh, specs, self.loader.sizes),
                *self.train_step.describe_kernels(),
            ],
        )
        self._experts: ExpertLoadMetrics | None = None
        if config.model.moe is not None:
            self._experts = ExpertLoadMetrics(config, specs, mesh.layout.expert)
        summary = [*summarize_pipeline(config, self.train_step.schedule)]
        for line in (*summary[:1], *notes):
            self.meter.note(line)
        settings = mesh.nccl_settings if mesh.layout.world > 1 else None
        for line in (*summary[1:], *chosen, *(settings.lines if settings else ())):
            self.meter.detail(line)
        for line in settings.warnings if settings else ():
            self.meter.note(line)
        if self._dropped:
            self.meter.note(
                "the residual of gradient compression is dropped: it belongs to another layout"
            )
        if aside is not None:
            kept, lines = aside
            self.meter.note(
                f"started from scratch, because no checkpoint had been saved; the {lines} lines of "
                f"the previous start are in {kept}"
            )
        for line in (*self._differences, *self.checkpointer.take_notes()):
            self.meter.note(line)
        if self._at_end():
            self.meter.note(
                f"the run is finished: step {self.step} of train.steps={config.train.steps}; to "
                "train longer, raise train.steps"
            )
        if config.optim.offload and mesh.device.type == "cpu":
            self.meter.note("optim.offload=true has no effect on a CPU")
        if config.train.offload and mesh.device.type == "cpu":
            self.meter.note("train.offload=true only copies on a CPU")
        node = config.parallel.node_size or ranks_on_this_node()
        for warning in find_warnings(config, mesh.layout, node):
            self.meter.note(warning)
        for line in layout_dependence_note(config):
            self.meter.note(line)
        self.checkpointer.create_writers(source, ledger.record_save)
        self.fault_handler = FaultHandler(
            config,
            mesh,
            self.optimizer,
            self.sharded_parameters.buckets,
            len(self.train_step.rank_of),
            self.meter,
            ledger,
            self._go_back,
            launcher or LauncherProcess(),
        )
        self.fault_handler.start_after(self.step, state)
        if mesh.rank == 0:
            (self.folder / CONFIG_FILE).write_text(dump(config), encoding="utf-8")

    def run(self) -> None:
        """Train until `train.steps`, with evaluations and saves in between. If a signal asks the
        run to leave earlier, saves a checkpoint and raises `SystemExit`."""
        with handle_signals(self.mesh.progress), self.fault_handler:
            try:
                while not self._finished():
                    self._one_step()
                self.checkpointer.finish(self.meter.note, leaving=not self._at_end())
                barrier(self.mesh.world)
            except torch.OutOfMemoryError as error:
                held, device = self.optimizer.memory_bytes(), self.mesh.device
                raise explain_out_of_memory(self.mesh.rank, held, device, self.folder) from error
            finally:
                self.loader.close()
        self.meter.close([] if self._at_end() else self._cut_short())
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
        self.meter.release()

    def _finished(self) -> bool:
        """Return whether the run is over: no steps are left, or it must leave, and the fault
        handler asks for no step to be run again."""
        over = self.fault_handler.exit_signal or self._at_end()
        return bool(over) and not self.fault_handler.judge_steps(self.meter.settle())

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
            with self.meter.time("evaluation"):
                self._evaluate()
        faults.begin(f"the end of step {self.step}")
        faults.record_step(self.step)
        if faults.judge_steps(self.meter.flush(self.step)):
            return
        if self._lock is not None:
            self._lock.check()
        if self._due(config.faults.compare_every) and faults.replicas_differ(self.step):
            return
        self.checkpointer.report_failures(self.meter.note)
        writer = self.checkpointer.writer_due(self.step, leaving=bool(faults.exit_signal))
        if writer is not None:
            # The line of a step is written before its checkpoint is saved. Otherwise a run resumed
            # from the checkpoint could miss the line.
            if faults.judge_steps(self.meter.settle()):
                return
            faults.begin(f"the save after step {self.step}")
            with faults.time_save():
                self._save(writer)

    def _due(self, every: int) -> bool:
        """Return whether something is due that is done every `every` steps and at the end; 0 is
        never."""
        return bool(every) and (self.step % every == 0 or self.step == self.config.train.steps)

    def _train_step(self) -> None:
        meter, device = self.meter, self.mesh.device
        meter.start_step()
        with meter.time("data"):
            batch, valid = self.batches.next(self.fault_handler.skips)
            microbatches = [_move(microbatch, device) for microbatch in batch.microbatches]
            if self.step + 1 < self.config.train.steps:
                self.batches.look_ahead()
        with meter.time("compute"):
            scale = self.optimizer.loss_scale / valid
            result = self.train_step.train(microbatches, self.step, scale)
            if self.fault_handler.needs_replay(result.update):
                result = self._replay(microbatches, scale, result)
        self.step += 1
        self.fault_handler.add_step(self.step, batch, result.update, result.maxima)
        self._loss = result.loss / valid
        update = result.update
        meter.record("loss", self._loss, "sum")
        if self.config.model.mtp_depth:
            meter.record("mtp_loss", result.mtp_loss / valid, "sum")
        if self._experts is not None:
            loads = self.sharded_parameters.expert_loads()
            for name, row, how in self._experts.records(loads, result.statistics, valid, self.step):
                meter.record(name, row, how)
        meter.record("grad_norm", update.grad_norm, "last")
        meter.record("skipped", (~torch.isfinite(update.grad_norm)).double(), "last")
        meter.record("lr", update.lr, "last")
        meter.record("tokens", batch.samples * self.config.train.seq, "last")
        meter.record("sources", torch.tensor(self.loader.consumed), "last")
        if self.config.train.precision == "fp16":
            meter.record("loss_scale", self.optimizer.loss_scale, "last")
        self._last = result
        self._compare_with_before()

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
                self.meter.note(
                    f"the first loss after the load is {now:.4f}, the last before it was "
                    f"{before:.4f}: check that data and config are those of the run"
                )

    def _global_loss(self) -> float:
        """Return the loss of the last step, summed over all ranks."""
        loss = float(all_reduce(self._loss.clone(), self.mesh.world).wait())
        # On a GPU, what is computed from an ended transfer is complete too.
        self.mesh.progress.check_not_ended()
        return loss

    def _evaluate(self) -> None:
        """Record loss, perplexity and bits per byte on the validation split, and the loss of each
        source if there are several."""
        batches = [*self.loader.evaluation(self.config.train.eval_samples)]
        microbatches = [_move(microbatch, self.mesh.device) for _, microbatch in batches]
        totals_M3 = torch.zeros(len(batches), 3, dtype=torch.float64, device=self.mesh.device)
        totals_M3[:, 0] = self.train_step.evaluate(microbatches)
        place = self.mesh.coordinate
        if place["pipeline"] == place["context"] == place["tensor"] == 0:
            for microbatch, totals in zip(microbatches, totals_M3, strict=True):
                valid = microbatch.labels_BS != IGNORE
                totals[1] = valid.sum()
                if self._token_bytes is not None:
                    totals[2] = self._token_bytes[microbatch.labels_BS[valid]].sum()
        totals_M3 = all_reduce(totals_M3, self.mesh.world).wait().cpu()
        nats, tokens, size = totals_M3.sum(0).tolist()
        if not tokens:
            self.meter.note(
                f"step {self.step}: no evaluation token has a label (data.mask_eod masks those at "
                "which a document begins); nothing is recorded"
            )
            return
        self.meter.record("eval_loss", nats / tokens, "last")
        self.meter.record("eval_perplexity", math.exp(min(nats / tokens, 700.0)), "last")
        if size:
            self.meter.record("eval_bits_per_byte", nats / math.log(2) / size, "last")
        of_source: dict[str, Tensor] = {}
        for (source, _), row in zip(batches, totals_M3, strict=True):
            of_source[source] = of_source[source] + row if source in of_source else row
        for source, row in of_source.items() if len(of_source) > 1 else ():
            nats, tokens, _ = row.tolist()
            if tokens:
                self.meter.record(f"eval_losses/{source}", nats / tokens, "last")

    def _save(self, writer: CheckpointWriter | PeerMemoryWriter) -> None:
        state = TrainState(
            config=self.config,
            data=self.loader.state,
            optimizer=self.optimizer.state(),
            loss=self._global_loss(),
            grad_norm=float(self._last.update.grad_norm) if self._last else math.nan,
            history=self.fault_handler.history.state(),
            routines=self._routines,
        )
        slices, unsent = self._slices(owned_only=True), self._unsent()
        part = self.step, [*slices, *unsent], state.model_dump(mode="json")
        self.checkpointer.start_save(writer, *part, self.meter.note)
        if unsent or self.config.parallel.serial:  # residuals change before the update
            writer.wait_for_copy()
        else:
            self.optimizer.delay_update(partial(self._until_copied, writer))

    def _until_copied(self, writer: CheckpointWriter | PeerMemoryWriter) -> None:
        with self.fault_handler.time_save():
            writer.wait_for_copy()

    def _slices(self, *, owned_only: bool) -> list[Slice]:
        """Return this rank's pieces of weights and optimizer state in a checkpoint. owned_only:
        only those that this rank saves."""
        return [
            Slice(name, spec.shape, box.offset, tensor)
            for name, spec, box, tensor in self.optimizer.tensors(owned=owned_only)
        ]

    def _unsent(self) -> list[Slice]:
        """Return what gradient compression on this rank keeps from step to step."""
        return [
            Slice(name, tuple(tensor.shape), (0,), tensor)
            for name, tensor in self.sharded_parameters.compression_state()
        ]

    def _restore_or_initialise(self, source: Checkpoint | None) -> TrainState | None:
        if source is None:
            if self.config.checkpoint.resume is None:
                self._refuse_to_overwrite()
            else:
                self._refuse_to_begin_again()
            self.sharded_parameters.initialize_weights(self.config.run.seed)
            self._start_warm()
            self.optimizer.begin()
            return None
        return self._restore(source)

    def _go_back(
        self, choose: Callable[[StorePath], StorePath | None]
    ) -> tuple[int, TrainState] | None:
        """Wait for saves in progress, then continue from the checkpoint that `choose` picks in the
        folder of checkpoints. Returns its step and state, or None if it picks none."""
        self.checkpointer.wait_for_saves(self.meter.note)
        path = choose(self.checkpointer.root)
        if path is None:
            return None
        state = self._restore(open_checkpoint(path))
        for line in self.checkpointer.take_notes():
            self.meter.note(line)
        self.checkpointer.forget_memory_copies()
        self._loss_before = None
        return self.step, state

    def _restore(self, source: Checkpoint) -> TrainState:
        """Continue from a checkpoint, at the start or in the middle of a run. If a rank cannot read
        it, all ranks use the newest earlier one that all can read."""
        self.sharded_parameters.wait_for_values()
        wrong = ""
        try:
            state = self._load(source)
        except UnreadableFile as error:
            wrong = str(error)
        wrong = self.checkpointer.agree_on_error(wrong)
        if wrong:
            return self._restore(self.checkpointer.open_previous(source, wrong))
        self.optimizer.load_state(state.optimizer)
        self._differences += self.loader.load(state.data)
        self._loss_before = state.loss
        return state

    def _load(self, source: Checkpoint) -> TrainState:
        """Load this rank's tensors from a checkpoint. Returns the rest of the checkpoint's state.
        Raises `UnreadableFile` if this rank cannot read it, and `UserError` if it is of another
        run."""
        with source as checkpoint:
            state = read_train_state(checkpoint)
            check_same_run(state.config, self.config, checkpoint.path)
            slices = self._slices(owned_only=False)
            unsent = [part for part in self._unsent() if part.name in checkpoint.tensors]
            alone = {(part.name, part.box) for part in self._slices(owned_only=True)}
            checkpoint.load([*select_saved(slices, checkpoint.tensors), *unsent], alone)
            self._differences = [
                *describe_resumption(state.config, self.config, checkpoint.step, str(checkpoint)),
                *describe_missing_state(slices, checkpoint.tensors),
            ]
            self._dropped = not unsent and any(
                n.startswith(COMPRESSION_PREFIX) for n in checkpoint.tensors
            )
            self.step = checkpoint.step
        return state

    def _start_warm(self) -> None:
        wanted = self.config.checkpoint.weights
        if not wanted:
            return
        with open_checkpoint(locate_checkpoint(wanted, "checkpoint.weights")) as checkpoint:
            saved = read_train_state(checkpoint).config
            weights = (one for one in self.optimizer.tensors() if one[0] == one[1].name)
            checkpoint.load(match_weights(weights, checkpoint, saved, self.config))

    def _refuse_to_begin_again(self) -> None:
        """Raise `UserError` if this run has saved a checkpoint, because none was found to resume
        from. Only a run that never saved one, for example because it was killed before, may start
        from scratch."""
        found = last_saved(self.folder)
        if found is not None:
            reached, saved = found
            raise UserError(
                f"run.dir={self.folder} holds a run up to step {reached} whose last checkpoint was "
                f"of step {saved}, and there is none in {self.checkpointer.root}: bring its "
                f"checkpoints back there, give another run.dir, or delete {self.folder} to start "
                "from scratch"
            )

    def _refuse_to_overwrite(self) -> None:
        """Raise `UserError` if a fresh start would overwrite another run's records or
        checkpoints."""
        key = self.config.checkpoint
        if (self.folder / METRICS_FILE).exists():
            raise UserError(
                f"run.dir={self.folder} already holds a run; continue it with "
                "checkpoint.resume=latest, or give another run.dir"
            )
        home = self.checkpointer.root
        if key.folder is not None and key.every and find_checkpoint(home, "latest") is not None:
            raise UserError(
                f"checkpoint.folder={home} already holds checkpoints; continue from them with "
                "checkpoint.resume=latest, or give another folder"
            )


def resolve_vocab(config: RunConfig) -> RunConfig:
    """Return the config with `model.vocab` taken from the tokenizer if it was left out.

    Raises `UserError` if there is no tokenizer either, or if it has more ids than `model.vocab`.
    """
    model, name = config.model, config.data.tokenizer
    if name is None:
        if model.vocab is None:
            raise UserError("model.vocab is not set and there is no data.tokenizer to take it from")
        return config
    size = load_tokenizer(name).vocab_size
    if model.vocab is None:
        return config.model_copy(update={"model": model.model_copy(update={"vocab": size})})
    if size > model.vocab:
        raise UserError(
            f"model.vocab={model.vocab} is smaller than the {size} ids of data.tokenizer={name}; "
            f"use {size} or more, or leave model.vocab out"
        )
    return config


def _move(microbatch: Microbatch, device: torch.device) -> Microbatch:
    """Return the microbatch with its tensors on a device."""
    moved: dict[str, Any] = {
        name: copy_to_device(value, device)
        for name, value in vars(microbatch).items()
        if isinstance(value, Tensor)
    }
    return replace(microbatch, **moved)


def _token_bytes(config: RunConfig, device: torch.device) -> Tensor | None:
    """Return the bytes of text that each token represents, int64 [vocab]. None without a tokenizer
    or without evaluations."""
    if config.data.tokenizer is None or not config.train.eval_every:
        return None
    counts = torch.from_numpy(load_tokenizer(config.data.tokenizer).token_bytes())
    table = torch.zeros(config.model.vocab or len(counts), dtype=torch.int64)
    table[: len(counts)] = counts
    return table.to(device)
