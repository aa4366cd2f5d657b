"""Norms: their parameters, and what they keep."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from megaframe.architecture.layer import SavedActivations
from megaframe.architecture.spec import Constant, ParamSpec


@dataclass(frozen=True)
class NormDescription(ABC):
    """A norm over the last dim. It keeps its input for the backward pass.

    Attributes:
        width: Of the last dim.
    """

    width: int

    recomputes = True
    """Whether `train.recompute=selective` computes it again in the backward pass of the product
    after it; if not, its result is kept."""

    @abstractmethod
    def declare_parameters(self, name: str) -> Iterator[ParamSpec]:
        """Yield the specs of all parameters, of the roles `gain` and `bias`. Their gradients are
        summed over all ranks that have rows.

        Args:
            name: Dotted path of the norm in the model.
        """

    @property
    @abstractmethod
    def saved_statistics(self) -> SavedActivations:
        """What a row keeps for the backward pass besides the input and the result."""

    def compute(self, x: Any, *parameters: Any) -> Any:
        """Return the norm of x in torch code, for a description from outside. Norms of our own are
        known to `megaframe.model.norm`, because nothing here imports torch.

        Args:
            x: Rows, [..., width].
            parameters: The values of what `declare_parameters` yields.
        """
        raise NotImplementedError

    @property
    def saved(self) -> SavedActivations:
        """What a row keeps if its normalised values are kept: these and the statistics."""
        return SavedActivations(values=self.width) + self.saved_statistics


@dataclass(frozen=True)
class LayerNormDescription(NormDescription):
    """LayerNorm, of mean and variance (Ba et al. 2016).

    Attributes:
        eps: Added to the variance.
        bias: Whether there is one.
    """

    eps: float
    bias: bool = False

    def declare_parameters(self, name: str) -> Iterator[ParamSpec]:
        """Yield the specs of the gain and, if there is one, of the bias."""
        yield ParamSpec(f"{name}.gain", (self.width,), Constant(1.0), role="gain")
        if self.bias:
            yield ParamSpec(f"{name}.bias", (self.width,), Constant(0.0), role="bias")

    @property
    def saved_statistics(self) -> SavedActivations:
        """Two numbers, which on a CPU are as wide as a value."""
        return SavedActivations(values=2)


@dataclass(frozen=True)
class RMSNormDescription(NormDescription):
    """RMSNorm, of the root mean square (Zhang and Sennrich 2019).

    Attributes:
        eps: Added to the mean square.
    """

    eps: float

    def declare_parameters(self, name: str) -> Iterator[ParamSpec]:
        """Yield the spec of the gain."""
        yield ParamSpec(f"{name}.gain", (self.width,), Constant(1.0), role="gain")

    @property
    def saved_statistics(self) -> SavedActivations:
        """One number in at least fp32."""
        return SavedActivations(statistics=1)
