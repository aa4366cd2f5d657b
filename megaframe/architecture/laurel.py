"""Learned augmented residuals (LAuReL, Menghani et al. 2024), as in Gemma 3n."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from megaframe.architecture.layer import (
    FeedForwardDescription,
    HasParameters,
    SavedActivations,
)
from megaframe.architecture.linear import LinearSpec
from megaframe.architecture.norm import NormDescription
from megaframe.config.parallel import ParallelConfig


@dataclass(frozen=True, kw_only=True)
class LaurelDescription(FeedForwardDescription):
    """Adds to the stream, beside the mixers of a block, their input and the norm of what two
    products of low rank make of it. Every tensor rank computes its own rows.

    Attributes:
        hidden: Width of the stream.
        rank: Width between the products.
        norm: Of what they make.
        init_std: Standard deviation of the first matrix.
        output_std: That of the second one.
    """

    hidden: int
    rank: int
    norm: NormDescription
    init_std: float
    output_std: float

    name = "laurel"
    keeps_normed_input = True

    @property
    def left(self) -> LinearSpec:
        """From the stream."""
        return LinearSpec((self.hidden,), (self.rank,), self.init_std)

    @property
    def right(self) -> LinearSpec:
        """Back to the stream."""
        return LinearSpec((self.rank,), (self.hidden,), self.output_std)

    @property
    def parts(self) -> Mapping[str, HasParameters]:
        """Both products and the norm."""
        return {"left": self.left, "right": self.right, "post_norm": self.norm}

    def count_saved(self, parallel: ParallelConfig, recompute: str) -> SavedActivations:
        """Return what is between the products, and what is normalised with its statistics."""
        return SavedActivations(self.rank) + self.norm.saved

    @property
    def keeps_output_gradient(self) -> bool:
        """No: the norm is after its last product."""
        return False

    @property
    def inner_elements(self) -> float:
        """What is between the products."""
        return self.rank

    @property
    def widest(self) -> int:
        """What is between the products."""
        return self.rank
