"""The character-level run of nanoGPT's README for a CPU, and the text as both contenders read it.

Validation loss is the mean over the whole validation text, in windows of the context length that do
not overlap, so it has no sampling noise. nanoGPT's own estimate is the mean of 20 random batches.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

TRAINING_SHARE = 0.9


@dataclass(frozen=True)
class ShakespeareSettings:
    """Settings from nanoGPT's README (sizes, steps) and its config/train_shakespeare_char.py (the
    rest)."""

    layers: int = 4
    heads: int = 4
    hidden: int = 128
    seq: int = 64
    batch: int = 12
    steps: int = 2000
    learning_rate: float = 1e-3
    min_learning_rate: float = 1e-4
    warmup: int = 100
    beta1: float = 0.9
    beta2: float = 0.99
    weight_decay: float = 0.1
    clip: float = 1.0

    @property
    def tokens_per_step(self) -> int:
        """Characters with a loss in one optimizer step."""
        return self.batch * self.seq


SETTINGS = ShakespeareSettings()


@dataclass(frozen=True)
class Text:
    """Character ids of both splits, and the number of different characters. An id is the rank of
    the character among those that occur."""

    training: NDArray[np.uint16]
    validation: NDArray[np.uint16]
    vocab: int

    @property
    def validation_windows(self) -> int:
        """Number of windows of the context length in `validation`, with a target for each
        character."""
        return (self.validation.size - 1) // SETTINGS.seq


def read_text(path: Path) -> Text:
    """Encode the text like nanoGPT's prepare.py, with the first 90% of its characters for
    training."""
    characters = np.frombuffer(path.read_text(encoding="utf-8").encode("utf-32-le"), np.uint32)
    alphabet, ids = np.unique(characters, return_inverse=True)
    cut = int(characters.size * TRAINING_SHARE)
    narrow = ids.astype(np.uint16)
    return Text(narrow[:cut], narrow[cut:], alphabet.size)


def make_parser(description: str | None) -> argparse.ArgumentParser:
    """Return a parser with the arguments of both contenders."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--text", type=Path, required=True, help="tinyshakespeare's input.txt")
    parser.add_argument("--steps", type=int, default=SETTINGS.steps, help="training steps")
    return parser
