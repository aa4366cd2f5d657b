"""Adapters: products of low rank that are added to frozen matrices (LoRA, Hu et al. 2021), and
magnitudes of the rows of the sums (DoRA, Liu et al. 2024).

Which matrices have one follows from patterns in the config (`model.adapters`). Matrices that lie in
one weight, such as queries, keys and values, have separate adapters, as they do in models that keep
them apart.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megaframe.architecture.frozen import is_frozen
from megaframe.config.adapters import AdaptersConfig

InputKind = Literal["stream", "computed", "kept"]
"""What a product multiplies: the layer's input, which a norm of the block may make; what a norm or
activation of the layer makes, which is computed again where these are recomputed; or what the layer
keeps."""


@dataclass(frozen=True)
class Adapter:
    """scale B A, which is added to one matrix of a weight.

    Attributes:
        name: Of the matrix, if the weight is several.
        rank: Outputs of A and inputs of B.
        scale: Factor of the product.
        dropout: Probability with which an input of A is 0 in training.
        dora: Whether the rows of the sum have trained norms.
        dim: Dim of the weight along which it is several matrices,
        start: where this one begins along it,
        size: and its size there.
        inputs: What it multiplies.
        target: Name of the matrix within a block, which patterns are compared with.
    """

    name: str = ""
    rank: int = 0
    scale: float = 1.0
    dropout: float = 0.0
    dora: bool = False
    dim: int = 0
    start: int = 0
    size: int = 0
    inputs: InputKind = "kept"
    target: str = ""

    def name_factors(self, linear: str) -> tuple[str, str]:
        """Return the names of A and B, given that of the linear layer."""
        prefix = self._name(linear)
        return f"{prefix}.a", f"{prefix}.b"

    def name_magnitude(self, linear: str) -> str:
        """Return the name of the magnitudes, given that of the linear layer."""
        return f"{self._name(linear)}.magnitude"

    def _name(self, linear: str) -> str:
        return ".".join(filter(None, (linear, "adapters", self.name)))


def is_target(config: AdaptersConfig, matrix: str) -> bool:
    """Return whether a matrix has an adapter.

    Args:
        config: The section `model.adapters`.
        matrix: Its name within a block, such as `attention.qkv.query`.
    """
    return any(matches(pattern, matrix) for pattern in config.targets)


def matches(pattern: str, matrix: str) -> bool:
    """Return whether a pattern is one of a matrix's name, or of what follows any of its dots."""
    return is_frozen([pattern, f"*.{pattern}"], matrix)
