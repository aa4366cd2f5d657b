"""The MLP: what a dense feed-forward layer is made of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from megaframe.architecture.layer import FeedForwardDescription, HasParameters, SavedActivations
from megaframe.architecture.limits import Limit
from megaframe.architecture.linear import LinearSpec
from megaframe.config.parallel import ParallelConfig

GATED = ("swiglu", "geglu", "swiglu_clamped")
"""Activations of two inputs, gate and up. Their layers have a first product twice as wide."""


@dataclass(frozen=True, kw_only=True)
class MLPDescription(FeedForwardDescription):
    """hidden -> width -> hidden. With a gated activation, gate and up are one weight [2, width,
    hidden].

    Attributes:
        hidden: Width of the stream.
        width: Inner width.
        activation: As in `model.activation`.
        bias: Whether both products have one.
        init_std: Standard deviation of the first matrix.
        output_std: That of the second one.
    """

    hidden: int
    width: int
    activation: str
    bias: bool
    init_std: float
    output_std: float

    name = "mlp"

    @property
    def limits(self) -> tuple[Limit, ...]:
        """The width."""
        return (Limit("tensor", self.width, f"model.ffn={self.width}", even=False),)

    @property
    def gated(self) -> bool:
        """Whether the activation has two inputs."""
        return self.activation in GATED

    @property
    def up(self) -> LinearSpec:
        """The first product. Gate and up are separate along dim 0, so that a tensor shard of dim 1
        has the same outputs of both."""
        if not self.gated:
            return LinearSpec((self.hidden,), (self.width,), self.init_std, split=0, bias=self.bias)
        return LinearSpec(
            (self.hidden,),
            (2, self.width),
            self.init_std,
            split=1,
            bias=self.bias,
            fused={0: (1, 1)},
        )

    @property
    def down(self) -> LinearSpec:
        """The second product."""
        return LinearSpec((self.width,), (self.hidden,), self.output_std, split=1, bias=self.bias)

    @property
    def parts(self) -> Mapping[str, HasParameters]:
        """Both products."""
        return {"up": self.up, "down": self.down}

    def count_saved(self, parallel: ParallelConfig, recompute: str) -> SavedActivations:
        """Return the values before the activation, and those after it unless recomputed."""
        after = self.width * (recompute != "selective")
        return SavedActivations(self.up.results + after)

    @property
    def inner_elements(self) -> float:
        """Elements per token that the activation reads and writes, in units of one read and one
        write."""
        return self.width * (1.5 if self.gated else 1.0)

    @property
    def widest(self) -> int:
        """The outputs of the first product."""
        return self.up.results
