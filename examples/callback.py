"""A callback, a loss and a transform of samples from outside: early stopping, the focal loss (Lin
et al. 2017) and fill-in-the-middle (Bavarian et al. 2022).

python pretrain_gpt.py --config configs/demo.yaml "run.extensions=[examples/callback.py]" \
    train.loss=focal train.eval_every=20 "run.callbacks=[{kind: early_stop, patience: 2}]" \
    "data.transforms=[{kind: fill_in_the_middle, prefix: 253, suffix: 254, middle: 255}]"
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from megaframe.config import RunConfig
from megaframe.extensions import (
    Callback,
    CallbackPart,
    DataTransformPart,
    LossPart,
    Registry,
    RunView,
)

if TYPE_CHECKING:  # plans are made without torch
    from torch import Tensor

    from megaframe.data.transforms import Sample
    from megaframe.model.vocabulary import Vocabulary


class EarlyStopConfig(CallbackPart):
    kind: Literal["early_stop"] = "early_stop"
    """End the run when the validation loss no longer improves."""
    patience: Annotated[int, Field(gt=0)] = 3
    """Evaluations in a row that may be no better than the best one."""

    def make_callback(self, config: RunConfig) -> EarlyStop:
        """Return the callback of a run."""
        return EarlyStop(self.patience)


class EarlyStop(Callback):
    """Counts the evaluations since the best one."""

    def __init__(self, patience: int) -> None:
        self.patience, self.best, self.since_best = patience, math.inf, 0

    def after_evaluation(self, run: RunView, values: Mapping[str, float]) -> None:
        """Compare with the best loss so far, and record their ratio."""
        loss = values["eval_loss"]
        self.since_best = 0 if loss < self.best else self.since_best + 1
        self.best = min(self.best, loss)
        run.record("ratio_to_best", loss / self.best)
        if self.since_best >= self.patience:
            run.stop(f"{self.since_best} evaluations were no better than {self.best:.4f}")

    def state(self) -> dict[str, Any]:
        """Return the best loss, and the evaluations since then."""
        return {"best": self.best, "since_best": self.since_best}

    def load_state(self, state: dict[str, Any]) -> None:
        """Continue from there."""
        self.best, self.since_best = state["best"], state["since_best"]


class FocalLossConfig(LossPart):
    kind: Literal["focal"] = "focal"
    """Cross-entropy with less weight on tokens that are predicted well."""
    gamma: Annotated[float, Field(ge=1)] = 2.0
    """How much less: the weight is (1 - p)^gamma where the token has probability p."""

    def compute_losses(self, logits: Tensor, labels: Tensor, vocabulary: Vocabulary) -> Tensor:
        """Return -(1 - p)^gamma log p."""
        log_p = vocabulary.pick(logits, labels) - vocabulary.log_sum_exp(logits)
        return -((-log_p.expm1()) ** self.gamma) * log_p


class FillInTheMiddleConfig(DataTransformPart):
    kind: Literal["fill_in_the_middle"] = "fill_in_the_middle"
    """Move a random part of a sample to its end."""
    rate: Annotated[float, Field(ge=0, le=1)] = 0.5
    """Share of samples that are changed."""
    prefix: Annotated[int, Field(ge=0)]
    """Token before what comes first."""
    suffix: Annotated[int, Field(ge=0)]
    """Token before what comes after the moved part."""
    middle: Annotated[int, Field(ge=0)]
    """Token before the moved part."""

    def transform(self, sample: Sample, random: np.random.Generator) -> Sample:
        """Return prefix, suffix and middle, each after its token. The three tokens that no longer
        fit are left out. A token that has no loss, or a weight, keeps it where it goes."""
        if random.random() >= self.rate:
            return sample
        text = np.append(sample.tokens, sample.next_token)[:-3]
        first, last = np.sort(random.integers(0, len(text) + 1, 2))

        def move(values: NDArray[Any], prefix: float, suffix: float, middle: float) -> NDArray[Any]:
            ends = ([prefix], values[:first], [suffix], values[last:], [middle])
            return np.concatenate((*ends, values[first:last])).astype(values.dtype)

        window = move(text, self.prefix, self.suffix, self.middle)
        given = np.ones(len(text) + 2, np.float32) if sample.weights is None else sample.weights
        # A label says something of the token after it, so nothing does of the first.
        counts = np.append(np.float32(1), np.where(sample.labels < 0, 0, given))[: len(text)]
        weights = move(counts.astype(np.float32), 1, 1, 1)[1:]
        labels = np.where(weights == 0, -100, window[1:])
        kept = None if sample.weights is None else weights
        return replace(sample, tokens=window[:-1], labels=labels, weights=kept)


def register(registry: Registry) -> None:
    """Give all three to megaframe."""
    for part in (EarlyStopConfig, FocalLossConfig, FillInTheMiddleConfig):
        registry.register(part)
