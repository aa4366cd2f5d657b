"""The gradient noise scale of a run, measured while it trains (McCandlish et al. 2018, An Empirical
Model of Large-Batch Training, appendix A.1).

The gradient of a batch of B tokens has the expected squared norm |G|^2 + tr(Sigma) / B. So the
squared norms of the gradients of small batches and of the whole one give |G|^2 and tr(Sigma)
without bias, and their ratio is the noise scale, at which a larger batch begins to be wasted. A
ratio of two noisy numbers has a bias, so both are averaged over steps before they are divided.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megaframe.config import RunConfig
from megaframe.config.batch_advice import BatchSettings, advise_batch
from megaframe.config.registry import get_part_name
from megaframe.data.microbatch import Microbatch
from megaframe.data_parallel.small_batches import (
    SmallBatches,
    SquaredNorms,
    count_data_ranks_of_experts,
    list_kinds,
)
from megaframe.distributed.mesh import Mesh
from megaframe.metrics.metrics_logger import StepValues
from megaframe.metrics.records import ReduceType

_LATEST = 0.01
"""Least weight of a new measurement in the averages, which are then those of the last 100."""
_DECAY_POWER = 3
"""Until then the n-th measurement has a weight in proportion to about n^3: polynomial-decay
averaging (Shamir and Zhang 2013), which forgets the first steps, whose gradients are the largest,
and still averages over four tenths of all measurements."""
_SMALL, _WHOLE, _TOKENS = (f"agreed/gradient_noise/{name}" for name in ("small", "whole", "tokens"))


@dataclass(frozen=True)
class NoiseAverages:
    """Averages over the measurements of a run, which weigh later ones more.

    Attributes:
        squared_norm: Estimates of |G|^2, that of the gradient of an infinite batch.
        variance: Estimates of tr(Sigma), the variance of the gradient of one token, summed over all
            parameters.
        measurements: Their number.
    """

    squared_norm: float = 0.0
    variance: float = 0.0
    measurements: int = 0

    def add(self, squared_norm: float, variance: float) -> NoiseAverages:
        """Return the averages with one more measurement."""
        share = max(_LATEST, (_DECAY_POWER + 1) / (self.measurements + 1 + _DECAY_POWER))
        return NoiseAverages(
            self.squared_norm + share * (squared_norm - self.squared_norm),
            self.variance + share * (variance - self.variance),
            self.measurements + 1,
        )

    @property
    def critical_batch(self) -> float | None:
        """The noise scale tr(Sigma) / |G|^2 in tokens; None as long as there is too much noise for
        a positive estimate."""
        known = self.squared_norm > 0 and self.variance > 0
        return self.variance / self.squared_norm if known else None


def estimate_noise(
    kinds: Sequence[SmallBatches], small: Sequence[float], whole: Sequence[float], tokens_DM: Tensor
) -> tuple[float, float] | None:
    """Return estimates of |G|^2 and of tr(Sigma) per token, which have no bias.

    With n_i of N tokens in small batch i, the gradient of the mean loss consists of parts g_i with
    E|g_i|^2 = (n_i/N)^2 |G|^2 + n_i/N^2 tr(Sigma), and that of the whole has |G|^2 + tr(Sigma)/N.
    The two equations are solved for the sum over i.

    Args:
        kinds: Kinds of small batches, over each of which some parameters are measured.
        small: For each kind, the sum of |g_i|^2 over its small batches.
        whole: For each kind, the squared norm of the sum of these.
        tokens_DM: Tokens with a label of each data rank and microbatch, [D, M].

    Returns:
        None if all tokens are in one small batch.
    """
    total, squared_norm = float(tokens_DM.sum()), 0.0
    for kind, small_square, whole_square in zip(kinds, small, whole, strict=True):
        if whole_square == small_square == 0:  # no parameters
            continue
        share = float((kind.sum_tokens(tokens_DM) / total).square().sum()) if total else 1.0
        if share >= 1:
            return None
        squared_norm += (whole_square - small_square) / (1 - share)
    return squared_norm, total * (math.fsum(whole) - squared_norm)


class GradientNoise:
    """Records what is measured of steps, and keeps the averages. All ranks do the same.

    Attributes:
        averages: Over the measured steps whose values are known.
    """

    def __init__(self, config: RunConfig, mesh: Mesh, *, masked: bool) -> None:
        """Prepare to measure.

        Args:
            config: The run.
            mesh: Its ranks.
            masked: Whether some tokens may have no label, or one with a weight, which then counts
                as so many tokens.
        """
        self._config, self._every = config, config.metrics.gradient_noise_every
        self._kinds = list_kinds(mesh.layout, config.parallel.zero)
        self._masked = masked
        self._layout, self._index = mesh.layout, mesh.coordinate["data"]
        # Ranks that have the same samples count them once.
        self._counts = not any(mesh.coordinate[a] for a in ("tensor", "context", "pipeline"))
        self.averages = NoiseAverages()

    def describe(self) -> list[str]:
        """Return lines for the start of the run: what is not measured."""
        has_experts = self._every and self._config.model.moe is not None
        if not has_experts or count_data_ranks_of_experts(self._layout) is not None:
            return []
        return [
            "gradient noise is measured without experts: all data ranks send them their tokens, so "
            "that no two parts of their gradients are independent"
        ]

    def is_due(self, step: int) -> bool:
        """Return whether a step, counted from 1, is measured."""
        return bool(self._every) and step % self._every == 0

    def make_records(
        self, norms: SquaredNorms, microbatches: Sequence[Microbatch]
    ) -> Iterator[tuple[str, Tensor, ReduceType]]:
        """Yield the records of a step, as `MetricsLogger.record` takes them.

        Args:
            norms: This rank's part of what was measured.
            microbatches: This data rank's.
        """
        yield _SMALL, norms.small, "sum"
        yield _WHOLE, norms.whole, "sum"
        if self._masked:
            tokens_DM = torch.zeros(self._layout.data, len(microbatches), dtype=torch.float64)
            if self._counts:
                counts = [m.sum_label_weights().cpu() for m in microbatches]
                tokens_DM[self._index] = torch.stack(counts)
            yield _TOKENS, tokens_DM.flatten(), "sum"

    def add_step(self, values: StepValues) -> dict[str, float]:
        """Add a step to the averages, if it was measured. Returns what its line is to have.

        Args:
            values: Those of the step, from all ranks.
        """
        if _SMALL not in values or not math.isfinite(values["grad_norm"]):
            return {}
        estimates = estimate_noise(
            self._kinds, values[_SMALL], values[_WHOLE], self._arrange_tokens(values)
        )
        if estimates is None:
            return {}
        self.averages = self.averages.add(*estimates)
        names = ("squared_norm", "variance")
        line = {f"gradient_noise/{n}": x for n, x in zip(names, estimates, strict=True)}
        if (critical := self.averages.critical_batch) is not None:
            line["gradient_noise/critical_batch"] = critical
        return line

    def _arrange_tokens(self, values: StepValues) -> Tensor:
        """Return the tokens with a label of each data rank and microbatch, [D, M]."""
        if _TOKENS in values:
            counts = torch.tensor(values[_TOKENS], dtype=torch.float64)
            return counts.unflatten(0, (self._layout.data, -1))
        each, ranks = self._config.train.microbatch * self._config.train.seq, self._layout.data
        microbatches = round(values["tokens"]) // (each * ranks)
        return torch.full((ranks, microbatches), float(each), dtype=torch.float64)

    def summarize(self) -> list[tuple[str, str]]:
        """Return rows of a name and a text for the summary of the run: the critical batch, and what
        follows for the batch and the learning rate."""
        if not self._every or not self.averages.measurements:
            return []
        train, optim = self._config.train, self._config.optim
        settings = BatchSettings(train.global_batch, train.seq, get_part_name(optim.name), optim.lr)
        return [("critical batch", advise_batch(settings, self.averages.critical_batch))]
