"""Products in 8 bits (`train.fp8`): which matrices are multiplied so, and what shares a scale."""

from __future__ import annotations

from typing import Any, Literal

Number = Any
"""A whole number, or a numpy array of them."""
Scaling = Literal["tensor", "row", "block"]
BLOCK = 128
"""Number of elements along the summed dimension that share a scale. In a weight, so many rows share
it too."""
STEP = 16
"""torch's scaled product takes only dims that are multiples of this."""


def get_width_step(scaling: Scaling) -> int:
    """Return of what the dims of a matrix must be multiples for its products to be in 8 bits."""
    return BLOCK if scaling == "block" else STEP


def count_scales(scaling: Scaling, rows: Number, terms: Number, *, matrix: bool = False) -> Number:
    """Return the number of scales of an operand.

    Args:
        scaling: What shares a scale.
        rows, terms: Its sizes; `terms` are summed over.
        matrix: It is a weight; otherwise it is rows of tokens.
    """
    if scaling == "tensor":
        return 1
    if scaling == "row":
        return rows
    return -(-rows // (BLOCK if matrix else 1)) * -(-terms // BLOCK)
