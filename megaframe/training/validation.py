"""Evaluation during training: the loss on the validation split, over all ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from megaframe.config import TrainConfig
from megaframe.data.loader import Loader, ValidationBatch
from megaframe.data.microbatch import Microbatch
from megaframe.distributed.collectives import all_reduce
from megaframe.distributed.mesh import Mesh
from megaframe.metrics import MetricsLogger
from megaframe.model.layer_inputs import move_to_device


class Validator:
    """Evaluates a run on its validation split. All ranks call it at the same steps.

    Args:
        config: Of the run.
        mesh: Of the run.
        loader: Gives the batches of the validation split.
        compute_nats: Runs forward passes; returns the summed loss of each microbatch [M], zero on
            ranks that do not have the loss.
    """

    def __init__(
        self,
        train: TrainConfig,
        mesh: Mesh,
        loader: Loader,
        compute_nats: Callable[[Sequence[Microbatch]], Tensor],
    ) -> None:
        self._samples, self._mesh, self._loader = train.eval_samples, mesh, loader
        self._compute_nats = compute_nats
        self._is_loss_missing = False

    def evaluate(self, logger: MetricsLogger, step: int) -> dict[str, float]:
        """Record loss, perplexity and bits per byte on the validation split, and loss and bits per
        byte of each source if there are several. Returns what is recorded, which is the same on all
        ranks."""
        batches = [*self._loader.iterate_validation(self._samples)]
        totals_M3 = self._sum_totals(batches)
        nats, tokens, size = totals_M3.sum(0).tolist()
        if not tokens:
            if not self._is_loss_missing:
                self._is_loss_missing = True
                logger.note(
                    f"step {step}: no evaluation token has a label (data.mask_eod masks those at "
                    "which a document begins), so the validation loss is n/a; nothing is recorded"
                )
            return {}
        # exp(700) is close to the largest number of fp64.
        perplexity = math.exp(min(nats / tokens, 700.0))
        values = {"eval_loss": nats / tokens, "eval_perplexity": perplexity}
        if size:
            values["eval_bits_per_byte"] = nats / math.log(2) / size
        totals_of_source: dict[str, Tensor] = {}
        for (source, _, _), totals in zip(batches, totals_M3, strict=True):
            before = totals_of_source.get(source)
            totals_of_source[source] = totals if before is None else before + totals
        for source, totals in totals_of_source.items() if len(totals_of_source) > 1 else ():
            nats, tokens, size = totals.tolist()
            if tokens:
                values[f"eval_losses/{source}"] = nats / tokens
            if size:
                values[f"eval_bits_per_byte_of/{source}"] = nats / math.log(2) / size
        for name, value in values.items():
            logger.record(name, value, "last")
        return values

    def _sum_totals(self, batches: Sequence[ValidationBatch]) -> Tensor:
        """Return nats, tokens with a label and bytes of text of each microbatch, over all ranks:
        fp64 [M, 3] on the host."""
        device = self._mesh.device
        microbatches = [move_to_device(batch.microbatch, device) for batch in batches]
        totals_M3 = torch.zeros(len(batches), 3, dtype=torch.float64, device=device)
        totals_M3[:, 0] = self._compute_nats(microbatches)
        coordinate = self._mesh.coordinate
        # The ranks of these axes have the same samples, so only one of them counts.
        if coordinate["pipeline"] == coordinate["context"] == coordinate["tensor"] == 0:
            for batch, totals in zip(batches, totals_M3, strict=True):
                totals[1] = batch.microbatch.sum_label_weights()
                totals[2] = batch.text_bytes
        return all_reduce(totals_M3, self._mesh.world).wait().cpu()
