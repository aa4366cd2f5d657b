"""Per-layer embeddings: what the embedding gives each layer for each token besides the stream, as
in Gemma 3n and 4."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from megaframe.architecture.layer import (
    FeedForwardDescription,
    HasParameters,
    SavedActivations,
)
from megaframe.architecture.linear import LinearSpec
from megaframe.architecture.norm import NormDescription
from megaframe.architecture.spec import ParamSpec
from megaframe.config.parallel import ParallelConfig


def name_layer_embedding(block: str) -> str:
    """Return the name of what the embedding hands to a block, from the block's."""
    return f"{block}.embedding"


@dataclass(frozen=True, kw_only=True)
class LayerEmbeddingDescription(FeedForwardDescription):
    """Multiplies a layer's input by a gate of the stream, and adds a projection of it to the
    stream. Every tensor rank computes its own rows.

    Attributes:
        hidden: Width of the stream.
        width: Of the input.
        norm: Of what is added.
        init_std: Standard deviation of the first matrix.
        output_std: That of the second one.
    """

    hidden: int
    width: int
    norm: NormDescription
    init_std: float
    output_std: float

    name = "layer_embedding"

    @property
    def gate(self) -> LinearSpec:
        """From the stream to the gates."""
        return LinearSpec((self.hidden,), (self.width,), self.init_std)

    @property
    def output(self) -> LinearSpec:
        """Back to the stream."""
        return LinearSpec((self.width,), (self.hidden,), self.output_std)

    @property
    def parts(self) -> Mapping[str, HasParameters]:
        """Both products and the norm."""
        return {"gate": self.gate, "output": self.output, "post_norm": self.norm}

    def count_saved(self, parallel: ParallelConfig, recompute: str) -> SavedActivations:
        """Return the gates before and after their activation, what they have multiplied, and what
        is normalised with its statistics. The layer's input is kept for all layers together."""
        return SavedActivations(3 * self.width) + self.norm.saved

    @property
    def keeps_output_gradient(self) -> bool:
        """No: the norm is after its last product."""
        return False

    @property
    def inner_elements(self) -> float:
        """The gates."""
        return self.width

    @property
    def widest(self) -> int:
        """The gates."""
        return self.width


@dataclass(frozen=True)
class InputProjectionSpec(LinearSpec):
    """A product whose weight, like a table, is used at one end of the model only, and is updated as
    tables are."""

    def declare_own_parameters(self, name: str) -> Iterator[ParamSpec]:
        """Yield the spec of the weight."""
        yield from (replace(s, role="embedding") for s in super().declare_own_parameters(name))
