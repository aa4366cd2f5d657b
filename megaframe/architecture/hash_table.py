"""The table of a router that chooses experts by tokens (Hash layers, Roller et al. 2021)."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from megaframe.architecture.spec import DrawnByLayer, ParamSpec

DIGIT = 128
"""Base of the two digits of an expert's number, which are exact in every type of weights. So the
number of experts may be its square, which is the most that a config may have."""


@dataclass(frozen=True)
class RandomExperts(DrawnByLayer):
    """Different experts for each token. Each choice of all words goes to all experts equally often.

    Attributes:
        name: Of the table; with the seed it fixes the values.
        words: Of the vocabulary.
        top_k: Experts of a word.
        experts: Number of experts.
    """

    name: str
    words: int
    top_k: int
    experts: int

    def draw(self, seed: int) -> Any:
        """Return the whole table, a numpy array."""
        digest = hashlib.sha256(f"{seed}/{self.name}".encode()).digest()
        random = np.random.default_rng(int.from_bytes(digest[:8], "little"))
        first = random.permutation(self.words)[:, None]
        longest = max(1, (self.experts - 1) // max(1, self.top_k - 1))
        step = random.integers(1, longest, (self.words, 1), endpoint=True)
        experts = (first + step * np.arange(self.top_k)) % self.experts
        return np.stack(np.divmod(experts, DIGIT), -1)


@dataclass(frozen=True)
class HashTableDescription:
    """The experts of each word of the vocabulary, as digits.

    Attributes:
        words: Of the vocabulary.
        top_k: Experts of a word.
        experts: Number of experts.
    """

    words: int
    top_k: int
    experts: int

    def declare_parameters(self, name: str) -> Iterator[ParamSpec]:
        """Yield the spec of the table. It is never trained, and as small as what every rank has
        whole."""
        shape, values = (self.words, self.top_k, 2), RandomExperts(name, *self._sizes)
        yield ParamSpec(name, shape, values, role="table")

    @property
    def _sizes(self) -> tuple[int, int, int]:
        return self.words, self.top_k, self.experts
