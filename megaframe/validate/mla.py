"""Checks of a config with latent attention.

Config keys of ordinary attention are refused next to `model.latent` if their value is not the
default, not if they are merely given: a config that was written out in full contains all keys.
"""

from __future__ import annotations

from collections.abc import Iterator

from megaframe.config.model import LatentAttentionConfig, ModelConfig


def latent_mistakes(model: ModelConfig, latent: LatentAttentionConfig) -> Iterator[str]:
    """Yield a message for each mistake in model.latent and in keys that it cannot go with."""
    if model.kv_heads != model.heads:
        yield (
            f"model.kv_heads={model.kv_heads} has no effect with model.latent, which computes keys "
            f"and values for each of model.heads={model.heads}; leave it out"
        )
    if model.head_dim != max(1, model.hidden // model.heads):
        yield (
            f"model.head_dim={model.head_dim} has no effect with model.latent, where a head has "
            f"model.latent.head_dim={latent.head_dim} dims besides model.latent.rotary_dim="
            f"{latent.rotary_dim} rotated ones; leave it out"
        )
    for name, given in (("qk_norm", model.qk_norm), ("qkv_bias", model.qkv_bias)):
        if given:
            yield f"model.{name}=true cannot be combined with model.latent; use model.{name}=false"
    yield from _rotated(model, latent)


def _rotated(model: ModelConfig, latent: LatentAttentionConfig) -> Iterator[str]:
    if model.position != "rotary":
        yield (
            f"model.latent has model.latent.rotary_dim={latent.rotary_dim} rotated dims, but "
            f"model.position={model.position}; use model.position=rotary"
        )
    if latent.rotary_dim % 2:
        near = [width for width in (latent.rotary_dim - 1, latent.rotary_dim + 1) if width]
        yield (
            f"model.latent.rotary_dim={latent.rotary_dim} must be an even number; "
            f"use {' or '.join(map(str, near))}"
        )
    if model.rotary_fraction != 1:
        yield (
            f"model.rotary_fraction={model.rotary_fraction:g} has no effect with model.latent, of "
            f"which model.latent.rotary_dim={latent.rotary_dim} dims are rotated; leave it out"
        )
