"""Checks of a model's shape: heads, widths, positions and windows that do not fit together."""

from __future__ import annotations

from collections.abc import Iterator

from megaframe.architecture.windows import window_mistakes
from megaframe.config.model import ModelConfig
from megaframe.errors import nearest_divisors
from megaframe.validate.mla import latent_mistakes


def model_mistakes(model: ModelConfig, seq: int) -> Iterator[str]:
    """Yield a message for each mistake in heads, widths, positions and windows.

    seq: tokens per sample.
    """
    yield from window_mistakes(model)
    if model.heads % model.kv_heads and model.latent is None:
        yield (
            f"model.kv_heads={model.kv_heads} does not divide model.heads={model.heads}; "
            f"use {nearest_divisors(model.heads, model.kv_heads)}"
        )
    if model.latent is not None:
        yield from latent_mistakes(model, model.latent)
    elif model.hidden % model.heads and "head_dim" not in model.model_fields_set:
        yield (
            f"model.heads={model.heads} does not divide model.hidden={model.hidden}; "
            f"use {nearest_divisors(model.hidden, model.heads)}, or set model.head_dim"
        )
    elif model.position == "rotary":
        yield from _rotary(model)
    if model.position == "rotary":
        yield from _scaling(model)
    if model.position == "learned" and model.positions is not None and seq > model.positions:
        yield (
            f"train.seq={seq} is longer than the table of model.positions={model.positions}; "
            f"use train.seq={model.positions} or fewer, or model.positions={seq}"
        )
    if model.position != "rotary" and model.rotary_scaling.kind != "none":
        yield (
            f"model.rotary_scaling.kind={model.rotary_scaling.kind} has no effect with "
            f"model.position={model.position}; use model.rotary_scaling.kind=none"
        )


def _rotary(model: ModelConfig) -> Iterator[str]:
    width = model.rotary_fraction * model.head_dim
    if abs(width - round(width)) > 1e-6 or round(width) % 2:
        below = int(width) // 2 * 2
        valid = [w for w in (below, below + 2) if 0 < w <= model.head_dim]
        fractions = " or ".join(f"{w / model.head_dim:g}" for w in valid)
        mend = f"use {fractions}" if valid else f"use model.head_dim={model.head_dim + 1}"
        yield (
            f"model.rotary_fraction={model.rotary_fraction:g} of model.head_dim={model.head_dim} "
            f"rotates {width:g} dims, which must be an even number; {mend}"
        )


def _scaling(model: ModelConfig) -> Iterator[str]:
    scaling = model.rotary_scaling
    if scaling.kind == "none" and scaling.factor != 1:
        yield (
            f"model.rotary_scaling.factor={scaling.factor:g} has no effect with "
            f"model.rotary_scaling.kind=none; use kind llama3 or yarn, or factor=1"
        )
    if scaling.kind != "none" and scaling.low_frequency >= scaling.high_frequency:
        yield (
            f"model.rotary_scaling.low_frequency={scaling.low_frequency:g} must be less than "
            f"model.rotary_scaling.high_frequency={scaling.high_frequency:g}"
        )
    if scaling.kind != "yarn" and (scaling.mscale, scaling.mscale_all_dim) != (1, 0):
        yield (
            f"model.rotary_scaling.mscale={scaling.mscale:g} and mscale_all_dim="
            f"{scaling.mscale_all_dim:g} have no effect with model.rotary_scaling.kind="
            f"{scaling.kind}; leave them out, or use kind yarn"
        )
    elif scaling.mscale_all_dim and model.latent is None:
        yield (
            f"model.rotary_scaling.mscale_all_dim={scaling.mscale_all_dim:g} needs model.latent; "
            "use 0, or leave it out"
        )
