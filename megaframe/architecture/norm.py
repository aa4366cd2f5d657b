"""Norms: their parameters, and what they keep."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from megaframe.architecture.layer import SavedActivations
from megaframe.architecture.spec import Constant, ParamSpec


@dataclass(frozen=True)
class NormDescription:
    """LayerNorm or RMSNorm over the last dim.

    Attributes:
        width: Of the last dim.
        kind: `layernorm` or `rmsnorm`.
        eps: Added to the variance or mean square.
        bias: Whether there is one. Only layernorm can have it.
    """

    width: int
    kind: str
    eps: float
    bias: bool = False

    def declare_parameters(self, name: str) -> Iterator[ParamSpec]:
        """Yield the specs of the gain and, if there is one, of the bias."""
        yield ParamSpec(f"{name}.gain", (self.width,), Constant(1.0), role="gain")
        if self.bias and self.kind == "layernorm":
            yield ParamSpec(f"{name}.bias", (self.width,), Constant(0.0), role="bias")

    @property
    def saved_statistics(self) -> SavedActivations:
        """Numbers per row for the backward pass: one in at least fp32, or two for layernorm, which
        on a CPU are as wide as a value."""
        if self.kind == "layernorm":
            return SavedActivations(values=2)
        return SavedActivations(statistics=1)

    @property
    def saved(self) -> SavedActivations:
        """What a row keeps if its normalised values are kept: these and the statistics."""
        return SavedActivations(values=self.width) + self.saved_statistics
