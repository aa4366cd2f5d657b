"""Factors of queries that grow with their positions, so that scores stay apart in long samples."""

from __future__ import annotations

import torch
from torch import Tensor

from megaframe.config.blocks import QueryScaleConfig


def compute_query_scales(scale: QueryScaleConfig, positions: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the factor of each token's queries, [S, 1, 1] or [B, S, 1, 1].

    Args:
        scale: Says how it grows.
        positions: Position of each token, int64 [S] or [B, S].
        dtype: Type of the activations.
    """
    lengths = (positions + scale.first).div(scale.length, rounding_mode="floor").double()
    return (1.0 + scale.rate * lengths.log1p()).to(dtype)[..., None, None]
