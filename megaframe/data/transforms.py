"""Transforms of samples from outside (`data.transforms`).

Each gets whole samples, before context ranks divide them and before labels further ahead are taken,
and random numbers that depend only on the seed, the number of the sample in the training order and
the transform's place in the list. So a sample is the same on every rank that reads it, however far
ahead it is read, and after a resume.

Shape suffixes: N samples, S tokens of a sample.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from megaframe.config.part_calls import describe_failure
from megaframe.config.parts import DataTransformPart
from megaframe.data.microbatch import IGNORE
from megaframe.errors import UserError

Tokens = NDArray[np.int64]


@dataclass(frozen=True)
class Sample:
    """A sample of the training order. Arrays are [S], of int64 but for weights.

    Attributes:
        tokens: The inputs.
        labels: The next token of each, or -100 where there is no loss (`IGNORE`, as torch and
            Hugging Face have it; -1 means the same).
        documents: The number of each token's document within the sample. Positions and attention
            that restart at documents keep their places, whatever a transform does.
        next_token: The token after the last one, also where that has no label.
        number: Number of the sample in the training order, or in the validation samples.
        weights: Weight of each label, float32; None if no source of the run has weights other than
            0 and 1. Where one is 0, there is no loss.
    """

    tokens: Tokens
    labels: Tokens
    documents: Tokens
    next_token: int
    number: int
    weights: NDArray[np.float32] | None = None


class SampleTransforms:
    """The transforms of one split.

    Args:
        parts: The transforms in order, with their place in `data.transforms`.
        seed: Of their random numbers.
        vocab: Token ids and labels that are not below this, and negative ones, are refused.
    """

    def __init__(
        self, parts: Sequence[tuple[int, DataTransformPart]], seed: int, vocab: int
    ) -> None:
        self._parts, self._seed, self._vocab = parts, seed, vocab

    def __bool__(self) -> bool:
        return bool(self._parts)

    def apply(
        self,
        tokens_NS: Tokens,
        labels_NS: Tokens,
        documents_NS: Tokens,
        next_N: Tokens,
        samples_N: Tokens,
        weights_NS: NDArray[np.float32] | None = None,
    ) -> None:
        """Change tokens, labels and their weights in place.

        Args:
            tokens_NS: The inputs.
            labels_NS: Their labels.
            documents_NS: The number of each token's document within its sample.
            next_N: The token after each sample.
            samples_N: Number of each sample in the training order.
            weights_NS: Weights of the labels; None if all are 1.

        Raises:
            UserError: A transform fails, or returns no sample of the same length and vocabulary.
        """
        for row, number in enumerate(samples_N.tolist()):
            sample = Sample(
                tokens_NS[row].copy(),
                labels_NS[row].copy(),
                documents_NS[row],
                int(next_N[row]),
                number,
                None if weights_NS is None else weights_NS[row].copy(),
            )
            for place, part in self._parts:
                sample = self._transform(place, part, sample)
            tokens_NS[row], labels_NS[row] = sample.tokens, sample.labels
            if weights_NS is not None:
                weights_NS[row] = sample.weights

    def _transform(self, place: int, part: DataTransformPart, sample: Sample) -> Sample:
        name = f"data.transforms[{place}]={part.name}: sample {sample.number}"
        try:
            result = part.transform(sample, make_generator(self._seed, sample.number, place))
        except Exception as error:
            raise UserError(f"{name}: {describe_failure(part, error)}") from error
        if not isinstance(result, Sample):
            raise UserError(f"{name}: transform returns {type(result).__name__}, not a Sample")
        for key in ("tokens", "labels"):
            values, length = getattr(result, key), len(sample.tokens)
            if not isinstance(values, np.ndarray) or values.dtype != np.int64:
                raise UserError(f"{name}: its {key} are no array of int64")
            if values.shape != (length,):
                shape = list(values.shape)
                raise UserError(
                    f"{name}: its {key} have shape {shape}; return [{length}], as many as before"
                )
        labels = np.where(result.labels == -1, IGNORE, result.labels)
        if sample.weights is not None:
            labels = np.where(_check_weights(name, result, len(labels)) == 0, IGNORE, labels)
        self._check_range(name, "tokens", result.tokens)
        self._check_range(name, "labels", labels, ignored=IGNORE)
        weights = sample.weights if sample.weights is None else result.weights
        return replace(sample, tokens=result.tokens, labels=labels, weights=weights)

    def _check_range(self, name: str, key: str, values: Tokens, ignored: int | None = None) -> None:
        """Raise `UserError` for a value outside of the vocabulary that is not `ignored`."""
        wrong = (values < 0) | (values >= self._vocab)
        if ignored is not None:
            wrong &= values != ignored
        if wrong.any():
            at = int(wrong.argmax())
            unless = "" if ignored is None else f", and {ignored} for no loss"
            raise UserError(
                f"{name}: {key}[{at}] is {values[at]}, but model.vocab={self._vocab} allows "
                f"0 to {self._vocab - 1}{unless}"
            )


def _check_weights(name: str, sample: Sample, length: int) -> NDArray[np.float32]:
    """Return the weights of a changed sample. Raises `UserError` if they are none."""
    weights = sample.weights
    if not isinstance(weights, np.ndarray) or weights.dtype != np.float32:
        raise UserError(f"{name}: its weights are no array of float32")
    if weights.shape != (length,) or not ((weights >= 0) & (weights < np.inf)).all():
        raise UserError(f"{name}: its weights are not {length} finite numbers of 0 or more")
    return weights


def make_generator(seed: int, number: int, place: int) -> np.random.Generator:
    """Return the random numbers of one transform of one sample: those of a counter-based generator
    (Salmon et al. 2011) whose key is seed and sample, and whose counter begins at the transform."""
    key, counter = np.array([seed, number], np.uint64), np.array([0, 0, 0, place], np.uint64)
    return np.random.Generator(np.random.Philox(key=key, counter=counter))
