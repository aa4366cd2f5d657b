"""The character-level run of nanoGPT's README for a CPU, and the text as both sides read it.

Validation loss is the mean over the whole validation text in windows of the context that do not
overlap, so that it has no sampling noise; nanoGPT's own estimate is the mean of 20 random batches.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

TRAINING_SHARE = 0.9


@dataclass(frozen=True)
class Settings:
    """README of nanoGPT (sizes, steps) over its config/train_shakespeare_char.py (the rest)."""

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


SETTINGS = Settings()


@dataclass(frozen=True)
class Text:
    """Character ids (rank of the character among those that occur) of both splits, and how many
    characters there are."""

    training: NDArray[np.uint16]
    validation: NDArray[np.uint16]
    vocab: int

    @property
    def validation_windows(self) -> int:
        """Windows of the context, and a target for each of their characters, in `validation`."""
        return (self.validation.size - 1) // SETTINGS.seq


def read_text(path: Path) -> Text:
    """Encode the text as nanoGPT's prepare.py does: the first 90% of its characters train."""
    characters = np.frombuffer(path.read_text(encoding="utf-8").encode("utf-32-le"), np.uint32)
    alphabet, ids = np.unique(characters, return_inverse=True)
    cut = int(characters.size * TRAINING_SHARE)
    narrow = ids.astype(np.uint16)
    return Text(narrow[:cut], narrow[cut:], alphabet.size)


def parser(description: str | None) -> argparse.ArgumentParser:
    """The arguments that both contenders take."""
    arguments = argparse.ArgumentParser(description=description)
    arguments.add_argument("--text", type=Path, required=True, help="tinyshakespeare's input.txt")
    arguments.add_argument("--steps", type=int, default=SETTINGS.steps, help="training steps")
    return arguments
