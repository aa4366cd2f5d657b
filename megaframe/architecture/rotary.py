"""Rotary positions: how many dims of a head are rotated, and the factors of YaRN."""

from __future__ import annotations

import math
from dataclasses import dataclass

from megaframe.config.blocks import RotaryScalingConfig
from megaframe.config.model import ModelConfig


@dataclass(frozen=True)
class RotaryDescription:
    """Tables of cosines and sines, which all heads that rotate alike share.

    Attributes:
        width: How many leading dims of a head are rotated, D.
        base: Of the wavelengths: pair i turns by base^(-2i/D) per position.
        scaling: Of frequencies to longer contexts.
    """

    width: int
    base: float
    scaling: RotaryScalingConfig


def describe_rotary(
    model: ModelConfig,
    width: int,
    base: float | None = None,
    scaling: RotaryScalingConfig | None = None,
) -> RotaryDescription | None:
    """Return the tables for heads with `width` rotated dims, None if there are none.

    Args:
        model: Has the base and the scaling.
        width: Rotated dims of a head.
        base: Base of the wavelengths in place of `model.rotary_base`.
        scaling: In place of `model.rotary_scaling`.
    """
    if not width:
        return None
    return RotaryDescription(width, base or model.rotary_base, scaling or model.rotary_scaling)


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
