"""Rotary positions: how many dims of a head are rotated, and the factors of YaRN."""

from __future__ import annotations

import math

from megaframe.config.model import ModelConfig, RotaryScalingConfig


def count_rotated_dims(model: ModelConfig) -> int:
    """Return how many leading dims of a head are rotated, 0 without rotary positions."""
    if model.position != "rotary":
        return 0
    if model.latent is not None:
        return model.latent.rotary_dim
    return round(model.head_dim * model.rotary_fraction)


def compute_scores_factor(model: ModelConfig) -> float:
    """Return the factor of attention scores beside 1 / sqrt(D). With YaRN in latent attention it is
    the square of the factor on all dims of queries and keys (DeepSeek-V2, section 3.1.4, and its
    code)."""
    scaling = model.rotary_scaling
    if model.latent is None or scaling.kind != "yarn":
        return 1.0
    return compute_yarn_mscale(scaling, scaling.mscale_all_dim) ** 2


def compute_yarn_mscale(scaling: RotaryScalingConfig, mscale: float) -> float:
    """Return YaRN's factor 0.1 m ln(factor) + 1 (Peng et al. 2023)."""
    return 0.1 * mscale * math.log(scaling.factor) + 1.0
