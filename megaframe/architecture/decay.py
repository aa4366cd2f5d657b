"""What makes the decays of a state, as Mamba-2 (Dao and Gu 2024) has it: a rate and a step for each
head."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from megaframe.architecture.spec import DrawnByLayer, ParamSpec

_FASTEST_RATES = (0.01, 16.0)
"""Between which the largest rate of a head's decay is drawn."""
_STEPS = (1e-3, 1e-1)
"""And between which, by their logarithms, the steps that rates are multiplied by."""


@dataclass(frozen=True)
class DecayValues(DrawnByLayer):
    """Initial values of what makes the decays of heads.

    Attributes:
        name: Of the parameter; with the seed it fixes the values.
        shape: Of the parameter.
        of_rates: Whether they are logarithms of rates; otherwise softplus of them are steps.
    """

    name: str
    shape: tuple[int, ...]
    of_rates: bool

    def draw(self, seed: int) -> Any:
        """Return the whole parameter, a numpy array."""
        digest = hashlib.sha256(f"{seed}/{self.name}".encode()).digest()
        uniform = np.random.default_rng(int.from_bytes(digest[:8], "little")).random(self.shape)
        if self.of_rates:
            low, high = _FASTEST_RATES
            return np.log(low + (high - low) * uniform)
        low, high = map(math.log, _STEPS)
        return np.log(np.expm1(np.exp(low + (high - low) * uniform)))  # softplus gives the steps


@dataclass(frozen=True)
class DecayDescription:
    """A rate for each head, and a step for it or for each of its channels: g = -exp(rate)
    softplus(x + step).

    Attributes:
        shape: Groups of heads, which tensor ranks divide, heads of each, and channels of a head if
            these have steps.
    """

    shape: tuple[int, ...]

    def declare_parameters(self, name: str) -> Iterator[ParamSpec]:
        """Yield the specs of the logarithms of rates (`A_log` elsewhere) and of the steps
        (`dt_bias`)."""
        for part, shape in (("rate", self.shape[:2]), ("step", self.shape)):
            values = DecayValues(f"{name}.{part}", shape, of_rates=part == "rate")
            axes = {0: "tensor"}
            yield ParamSpec(f"{name}.{part}", shape, values, role="bias", axes=axes)
