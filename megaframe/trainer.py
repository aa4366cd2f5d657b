"""Trainer: the loop of a run. Batch, step, record, evaluate, save; everything else is elsewhere."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megaframe.checkpoint import Slice, Writer, find, given, open_checkpoint
from megaframe.comm import all_reduce, barrier
from megaframe.config import RunConfig, dump
from megaframe.data.loader import Loader
from megaframe.data.tokenizer import load_tokenizer
from megaframe.engine import Outcome
from megaframe.errors import UserError
from megaframe.mesh import Mesh, ranks_on_this_node
from megaframe.meter import Meter, StepTimer
from megaframe.meter.experts import ExpertMeter
from megaframe.microbatch import IGNORE, Microbatch
from megaframe.optim.bucket import UNSENT
from megaframe.optim.health import first_sick
from megaframe.pipeline import Pipeline
from megaframe.plan.experts import dropping
from megaframe.plan.nodes import crossing
from megaframe.plan.schedules import pipeline_summary
from megaframe.run_state import RunState, new_state, read_state, without_missing
from megaframe.stage import model_specs
from megaframe.warm_start import starting_parts

_MAX_SKIPPED = 20
"""Steps in a row whose gradients are not finite, after which a run gives up."""
_JUMP = 1.5
"""Factor between the last loss before a load and the first after it that is worth a warning."""
_FREE_KEYS = {"dropout", "init_std"}
"""Keys of the model section that may change when a run resumes: no weight depends on them."""


class NotFinite(RuntimeError):
    """Gradients stayed non-finite for many steps; the weights are those of the last good one."""


class Trainer:
    """One rank's part in one run. notes: what is to be said at its start. Raises `UserError` for
    whatever of the config cannot work."""

    def __init__(self, config: RunConfig, mesh: Mesh, notes: Sequence[str] = ()) -> None:
        self.config, self.mesh = config, mesh
        _set_determinism(config)
        self.folder = Path(config.run.dir)
        self.step = self._skipped = 0
        self._loss = torch.zeros((), dtype=torch.float64)
        self._last: Outcome | None = None
        self._loss_before: float | None = None
        self._dropped = False
        self._new_state: list[str] = []
        timer = StepTimer()
        self.pipeline = Pipeline(config, mesh, timer.time)
        self.optimizer = self.pipeline.optimizer
        data = mesh.group("data")
        self.loader = Loader(config, data.index, data.size)
        self._token_bytes = _token_bytes(config, mesh.device)
        self._restore_or_initialise()
        barrier(mesh.world)  # all have seen the run folder as it was before any rank writes to it
        specs = model_specs(config)
        self.meter = Meter(config, mesh, specs, timer, start_step=self.step)
        self._experts: ExpertMeter | None = None
        if config.model.moe is not None:
            self._experts = ExpertMeter(config, specs, mesh.layout.expert)
        for line in (*notes, *pipeline_summary(config, self.pipeline.schedule)):
            self.meter.note(line)
        if self._dropped:
            self.meter.note(
                "what compression had not sent yet is dropped: it belongs to another layout"
            )
        for line in self._new_state:
            self.meter.note(line)
        if config.optim.offload and mesh.device.type == "cpu":
            self.meter.note("optim.offload=true does nothing on a CPU: all memory is the host's")
        node = config.parallel.node_size or ranks_on_this_node()
        for warning in (crossing(config, mesh.layout, node), dropping(config.model)):
            if warning is not None:
                self.meter.note(f"warning: {warning}")
        self.writer = self._make_writer()
        if mesh.rank == 0:
            (self.folder / "config.yaml").write_text(dump(config), encoding="utf-8")

    def run(self) -> None:
        """Train until `train.steps`, evaluating and saving on the way."""
        try:
            while self.step < self.config.train.steps:
                self._train_step()
                if self._due(self.config.train.eval_every):
                    with self.meter.time("evaluation"):
                        self._evaluate()
                self.meter.flush(self.step)
                if self.writer is not None and self._due(self.config.checkpoint.every):
                    # Before its checkpoint, or a run resumed from that would miss the line.
                    self.meter.settle()
                    with self.meter.time("checkpoint"):
                        self._save(self.writer)
            if self._last is not None:
                self._judge(self._last, self.step)
            if self.writer is not None:
                self.writer.wait()
            barrier(self.mesh.world)
        finally:
            self.loader.close()
        self.meter.close()

    def _due(self, every: int) -> bool:
        """Whether something done every so many steps, and at the end, is to be done now."""
        return bool(every) and (self.step % every == 0 or self.step == self.config.train.steps)

    def _train_step(self) -> None:
        meter, device = self.meter, self.mesh.device
        meter.start_step()
        with meter.time("data"):
            batch = self.loader.next()
            microbatches = [_move(microbatch, device) for microbatch in batch.microbatches]
        with meter.time("communication"):
            valid = self._valid_tokens(batch.microbatches)
        with meter.time("compute"):
            scale = self.optimizer.loss_scale / valid
            outcome = self.pipeline.train(microbatches, self.step, scale)
        self.step += 1
        self._loss = outcome.loss / valid
        update = outcome.update
        meter.record("loss", self._loss, "sum")
        if self.config.model.mtp_depth:
            meter.record("mtp_loss", outcome.ahead / valid, "sum")
        if self._experts is not None:
            loads = self.optimizer.loads()
            for name, row, how in self._experts.records(loads, outcome.tallies, valid, self.step):
                meter.record(name, row, how)
        meter.record("grad_norm", update.grad_norm, "last")
        meter.record("skipped", (~torch.isfinite(update.grad_norm)).double(), "last")
        meter.record("lr", update.lr, "last")
        meter.record("tokens", batch.samples * self.config.train.seq, "last")
        if self.config.train.precision == "fp16":
            meter.record("loss_scale", self.optimizer.loss_scale, "last")
        before, self._last = self._last, outcome
        if before is not None:
            self._judge(before, self.step - 1)
        self._compare_with_before()

    def _valid_tokens(self, microbatches: Iterable[Microbatch]) -> int:
        """Tokens with a loss in the global batch, the one normaliser of the step; at least 1."""
        counts = torch.stack([(m.labels_BS != IGNORE).sum() for m in microbatches])
        return max(1, int(all_reduce(counts.sum(), self.mesh.aside).wait()))

    def _judge(self, outcome: Outcome, step: int) -> None:
        """Report a step that updated nothing. It is done while the next one runs, for which nothing
        has to wait."""
        if outcome.update.finite():
            self._skipped = 0
            return
        self._skipped += 1
        names = self.optimizer.sick(outcome.update)
        what = ", ".join(names[:3]) + (" ..." if len(names) > 3 else "")
        stages = len(self.pipeline.rank_of)
        where = first_sick(outcome.signs, stages, self.mesh.world, self.mesh.device)
        text = f"step {step}: gradients of {what} are not finite ({where}); nothing was updated"
        self.meter.note(text)
        if self._skipped == _MAX_SKIPPED:
            self.meter.flush(self.step)
            self.meter.close()
            raise NotFinite(f"{text}, as in the {_MAX_SKIPPED - 1} steps before")

    def _compare_with_before(self) -> None:
        """Report a loss that jumped after a load."""
        if self._loss_before is not None:
            before, self._loss_before = self._loss_before, None
            now = self._global_loss()
            if now > _JUMP * before:
                self.meter.note(
                    f"the first loss after the load is {now:.4f}, the last before it was "
                    f"{before:.4f}: look whether data and config are those of the run"
                )

    def _global_loss(self) -> float:
        """Loss of the last step over all ranks."""
        return float(all_reduce(self._loss.clone(), self.mesh.world).wait())

    def _evaluate(self) -> None:
        """Record loss, perplexity and bits per byte on the validation split."""
        totals = torch.zeros(3, dtype=torch.float64, device=self.mesh.device)
        microbatches = [
            _move(microbatch, self.mesh.device)
            for microbatch in self.loader.evaluation(self.config.train.eval_samples)
        ]
        totals[0] = self.pipeline.evaluate(microbatches)
        place = self.mesh.coordinate
        if place["pipeline"] == place["context"] == place["tensor"] == 0:
            for microbatch in microbatches:
                valid = microbatch.labels_BS != IGNORE
                totals[1] += valid.sum()
                if self._token_bytes is not None:
                    totals[2] += self._token_bytes[microbatch.labels_BS[valid]].sum()
        totals = all_reduce(totals, self.mesh.world).wait()
        nats, tokens, size = totals.tolist()
        self.meter.record("eval_loss", nats / tokens, "last")
        self.meter.record("eval_perplexity", math.exp(min(nats / tokens, 700.0)), "last")
        if size:
            self.meter.record("eval_bits_per_byte", nats / math.log(2) / size, "last")

    def _make_writer(self) -> Writer | None:
        if not self.config.checkpoint.every:
            return None
        return Writer(
            self.folder / "checkpoints",
            rank=self.mesh.rank,
            world=self.mesh.layout.world,
            store=self.mesh.store,
            keep=self.config.checkpoint.keep,
            timeout=self.config.parallel.timeout,
        )

    def _save(self, writer: Writer) -> None:
        state = RunState(
            config=self.config.model_dump(mode="json"),
            data=self.loader.state,
            optimizer=self.optimizer.state(),
            loss=self._global_loss(),
            grad_norm=float(self._last.update.grad_norm) if self._last else math.nan,
        )
        slices = [*self._slices(owned_only=True), *self._unsent()]
        writer.save(self.step, slices, state.model_dump(mode="json"))

    def _slices(self, *, owned_only: bool) -> list[Slice]:
        """This rank's pieces of everything in a checkpoint."""
        return [
            Slice(name, spec.shape, box.offset, tensor)
            for name, spec, box, tensor in self.optimizer.tensors(owned=owned_only)
        ]

    def _unsent(self) -> list[Slice]:
        """What compression on this rank hands on from step to step."""
        return [
            Slice(name, tuple(tensor.shape), (0,), tensor)
            for name, tensor in self.optimizer.unsent()
        ]

    def _restore_or_initialise(self) -> None:
        wanted = self.config.checkpoint.resume
        path = find(self.folder / "checkpoints", wanted) if wanted else None
        if path is None:
            self._refuse_to_overwrite()
            self.optimizer.draw(self.config.run.seed)
            self._start_warm()
            self.optimizer.begin()
            return
        with open_checkpoint(path) as checkpoint:
            state = read_state(checkpoint)
            _check_same_model(state.config, self.config, path)
            slices = self._slices(owned_only=False)
            unsent = [part for part in self._unsent() if part.name in checkpoint.tensors]
            checkpoint.load([*without_missing(slices, checkpoint.tensors), *unsent])
            self._new_state = list(new_state(slices, checkpoint.tensors))
            self._dropped = not unsent and any(n.startswith(UNSENT) for n in checkpoint.tensors)
            self.step = checkpoint.step
        self.optimizer.load_state(state.optimizer)
        self.loader.load(state.data)
        self._loss_before = state.loss

    def _start_warm(self) -> None:
        wanted = self.config.checkpoint.weights
        if not wanted:
            return
        with open_checkpoint(given(Path(wanted), "checkpoint.weights")) as checkpoint:
            saved = read_state(checkpoint).config
            weights = (one for one in self.optimizer.tensors() if one[0] == one[1].name)
            checkpoint.load(starting_parts(weights, checkpoint, saved, self.config))

    def _refuse_to_overwrite(self) -> None:
        """A fresh start must not destroy another run's records."""
        metrics = self.folder / "metrics.jsonl"
        if self.config.checkpoint.resume is None and metrics.exists():
            raise UserError(
                f"run.dir={self.folder} already holds a run; continue it with "
                "checkpoint.resume=latest, or give another run.dir"
            )


def resolve(config: RunConfig) -> RunConfig:
    """The config with `model.vocab` taken from the tokenizer where it was left out.

    Raises `UserError` when there is no tokenizer either, or when it has more ids than the model.
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


def _check_same_model(saved: dict[str, dict[str, Any]], config: RunConfig, path: Path) -> None:
    """Refuse a checkpoint whose model, or whose cut of the data into samples, is another."""
    now = config.model_dump(mode="json")
    keys = [("model", key) for key in now["model"] if key not in _FREE_KEYS]
    keys += [("train", "seq"), ("data", "split")]
    other = [
        f"  {section}.{key}: {saved[section].get(key)} there, {now[section][key]} here"
        for section, key in keys
        if saved[section].get(key) != now[section][key]
    ]
    if other:
        raise UserError(f"{path} is a checkpoint of another run:\n" + "\n".join(other))


def _move(microbatch: Microbatch, device: torch.device) -> Microbatch:
    if device.type == "cpu":
        return microbatch
    moved: dict[str, Any] = {
        name: value.to(device, non_blocking=True)
        for name, value in vars(microbatch).items()
        if isinstance(value, Tensor)
    }
    return replace(microbatch, **moved)


def _token_bytes(config: RunConfig, device: torch.device) -> Tensor | None:
    """Bytes of text that each token stands for, int64 [vocab]; None without a tokenizer."""
    if config.data.tokenizer is None or not config.train.eval_every:
        return None
    counts = torch.from_numpy(load_tokenizer(config.data.tokenizer).token_bytes())
    table = torch.zeros(config.model.vocab or len(counts), dtype=torch.int64)
    table[: len(counts)] = counts
    return table.to(device)


def _set_determinism(config: RunConfig) -> None:
    if config.run.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
