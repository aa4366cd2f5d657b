"""StepMetrics: what a run records of each training step.

The loss of a step stays on the device. It is summed over all ranks only where a number is needed at
once: for a checkpoint, and to compare the first loss after a load with the last one before it.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from megaframe.architecture.frozen import is_frozen
from megaframe.config import RunConfig
from megaframe.data.loader import Loader, StepBatch
from megaframe.distributed.collectives import all_reduce
from megaframe.distributed.mesh import Mesh
from megaframe.io.output_files import OutputFiles
from megaframe.metrics import MetricsLogger, StepTimer
from megaframe.metrics.expert_load import ExpertLoadMetrics
from megaframe.metrics.gradient_noise import GradientNoise
from megaframe.metrics.run_summary import make_opening_lines
from megaframe.model.model_chunk import list_model_specs
from megaframe.training.train_step import StepResult, TrainStep

_LOSS_JUMP = 1.5
"""A first loss after a load that exceeds the last one before it by this factor gets a warning."""


class StepMetrics:
    """Records the metrics of training steps.

    Attributes:
        logger: Takes the metrics, and writes their lines.
        noise: Measures the noise of gradients.
        previous_loss: The loss in the checkpoint that was loaded, until the first step after it is
            recorded; None if there is nothing to compare.
    """

    def __init__(
        self,
        config: RunConfig,
        mesh: Mesh,
        train_step: TrainStep,
        loader: Loader,
        timer: StepTimer,
        *,
        start_step: int = 0,
        previous_loss: float | None = None,
        files: OutputFiles | None = None,
    ) -> None:
        """Open the sinks of metrics, and print the first lines of the run.

        Args:
            config: The run.
            mesh: This rank's groups.
            train_step: Computes the steps.
            loader: Gives the data of the steps.
            timer: Of the steps.
            start_step: Number of steps that the run has already done.
            previous_loss: The loss of the last of these steps, if it is known.
            files: Those of the run, for the first rank; None to make them.
        """
        self._config, self._mesh = config, mesh
        self._sharded_parameters = train_step.sharded_parameters
        self._optimizer, self._loader = train_step.optimizer, loader
        self.previous_loss = previous_loss
        self.noise = GradientNoise(config, mesh, masked=loader.masks_labels)
        # Of the last step that had one.
        self._loss = torch.full((), math.nan, dtype=torch.float64, device=mesh.device)
        self._is_loss_missing = False
        self._grad_norm: Tensor | None = None
        specs, frozen = list_model_specs(config.model, config.train), config.frozen_patterns
        self._experts: ExpertLoadMetrics | None = None
        # The loads of experts are the gradients of these parameters, which frozen ones have not.
        if any(spec.role == "balance" and not is_frozen(frozen, spec.name) for spec in specs):
            self._experts = ExpertLoadMetrics(
                config.model, config.metrics, specs, mesh.layout.expert
            )
        self.logger = MetricsLogger(
            config,
            mesh,
            specs,
            timer,
            start_step=start_step,
            count_bytes=self._optimizer.count_memory_bytes,
            kernels=train_step.kernels.record(),
            opening=[
                *make_opening_lines(
                    config.train,
                    config.data,
                    mesh,
                    specs,
                    loader.sizes,
                    start_step=start_step,
                    samples_seen=loader.state["samples"],
                ),
                *train_step.describe_kernels(),
                *self.noise.describe(),
            ],
            files=files,
        )
        self.logger.observe_steps(self.noise.add_step)

    def record(self, step: int, result: StepResult, batch: StepBatch, valid: float) -> None:
        """Record the metrics of a step.

        Args:
            step: Its number, counted from 1.
            result: What it computed on this rank.
            batch: What it computed with.
            valid: Sum of the weights of the labels of this island's share of the global batch,
                which divides all losses.
        """
        record, update = self.logger.record, result.update
        for note in self._loader.take_notes():
            self.logger.note(note)
        self._grad_norm = update.grad_norm
        if valid:
            self._record_means(step, result, valid)
        elif not self._is_loss_missing:
            self._is_loss_missing = True
            self.logger.note(
                f"step {step}: no token of the batch has a label (data.mask_eod, data.transforms "
                "or a weight file masks them), so its loss is n/a, as that of any later step "
                "without one"
            )
        # Islands differ: the line has their mean, and whether any of them has skipped the step.
        alone = self._mesh.layout.islands == 1
        record("grad_norm", update.grad_norm, "last" if alone else "mean")
        skipped = (~torch.isfinite(update.grad_norm)).double()
        record("skipped", skipped, "last" if alone else "max")
        record("lr", update.lr, "last")
        record("tokens", batch.samples * self._config.train.seq, "last")
        record("sources", torch.tensor(self._loader.consumed), "last")
        if self._config.train.precision == "fp16":
            record("loss_scale", self._optimizer.loss_scale, "last")
        if update.squared_norms is not None:
            for name, row, how in self.noise.make_records(update.squared_norms, batch.microbatches):
                record(name, row, how)

    def _record_means(self, step: int, result: StepResult, valid: float) -> None:
        """Record what is a mean over the tokens with a label; see `record`."""
        # Summed over all ranks, each of these is the mean over islands.
        valid *= self._mesh.layout.islands
        record, self._loss = self.logger.record, result.loss / valid
        record("loss", self._loss, "sum")
        if self._config.model.mtp_depth:
            record("mtp_loss", result.mtp_loss / valid, "sum")
        indexer = self._config.model.indexer
        if indexer is not None and indexer.loss:
            of_stages = [stage.losses.get("indexer", 0.0) for stage in result.statistics]
            record("indexer_loss", torch.zeros_like(self._loss) + sum(of_stages) / valid, "sum")
        if self._experts is not None:
            loads = self._sharded_parameters.list_expert_loads()
            for name, row, reduction in self._experts.make_records(
                loads, result.statistics, valid, step
            ):
                record(name, row, reduction)
        self._compare_with_previous_loss()

    def reduce_loss(self) -> float:
        """Return the loss of the last step with labels, summed over all ranks; NaN before the first
        one. Collective."""
        loss = float(all_reduce(self._loss.clone(), self._mesh.world).wait())
        # On a GPU, what is computed from an ended transfer is complete too.
        self._mesh.progress.check_not_ended()
        return loss

    def read_grad_norm(self) -> float:
        """Return the norm of the gradients of the last step, NaN before the first one. Waits for
        the device."""
        return math.nan if self._grad_norm is None else float(self._grad_norm)

    def _compare_with_previous_loss(self) -> None:
        """After a load, log a note if the first loss is much larger than the last one before."""
        if self.previous_loss is None:
            return
        previous, self.previous_loss = self.previous_loss, None
        loss = self.reduce_loss()
        if loss > _LOSS_JUMP * previous:
            self.logger.note(
                f"the first loss after the load is {loss:.4f}, the last before it was "
                f"{previous:.4f}: check that data and config are those of the run"
            )
