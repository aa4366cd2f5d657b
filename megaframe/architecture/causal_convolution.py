"""A causal convolution over a few tokens: what it has."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from megaframe.architecture.spec import Constant, Normal, ParamSpec


@dataclass(frozen=True)
class ConvolutionDescription:
    """A causal convolution of each channel, which tensor ranks divide by the first dim.

    Attributes:
        shape: Dims of channels, and the tokens that a channel sees.
        bias: Whether each channel has one; it starts at 0.
    """

    shape: tuple[int, ...]
    bias: bool = False

    def declare_parameters(self, name: str) -> Iterator[ParamSpec]:
        """Yield the spec of the factors, of which the last one is of the token itself, and of the
        biases."""
        std = 1 / math.sqrt(3 * self.shape[-1])  # that of torch's convolutions
        shape, axes = self.shape, {0: "tensor"}
        yield ParamSpec(f"{name}.gain", shape, Normal(std), role="gain", decay=True, axes=axes)
        if self.bias:
            yield ParamSpec(f"{name}.bias", shape[:-1], Constant(0.0), role="bias", axes=axes)
