"""Attention as a config describes it: widths of heads, windows, and its division over context
ranks."""

from __future__ import annotations

from megaframe.config.model import LatentAttentionConfig, ModelConfig
from megaframe.config.parallel import ParallelConfig


def head_widths(model: ModelConfig) -> tuple[int, int]:
    """Return the width of a query or key head, and that of a value head."""
    latent = model.latent
    if latent is None:
        return model.head_dim, model.head_dim
    return latent.rotary_dim + latent.head_dim, latent.value_dim


def latent_width(latent: LatentAttentionConfig) -> int:
    """Return the elements of a token's latents, including the rotated part of its keys."""
    return (latent.query_rank or 0) + latent.kv_rank + latent.rotary_dim


def windows(model: ModelConfig) -> tuple[int | None, ...]:
    """Return the pattern of windows that repeats over the layers from the first one.

    It is `model.window`, where a single number is a pattern of one. A window is in tokens; None
    means everything before the token.
    """
    return model.window if isinstance(model.window, tuple) else (model.window,)


def window_of(model: ModelConfig, layer: int) -> int | None:
    """Return the window of a layer. Predictors' blocks are numbered after the last layer."""
    pattern = windows(model)
    return pattern[layer % len(pattern)]


def mean_keys(seq: int, window: int | None) -> float:
    """Return the mean number of keys that a query attends to, causally and at most `window`.

    It is the mean of min(position, window) as a continuous function: seq / 2 without a window, and
    close to `window` for a much longer sequence. Counting whole keys (a query sees itself) would
    give at most half a key more.
    """
    reach = min(window or seq, seq)
    return reach - reach * reach / (2 * seq)


def exchanging_ranks(parallel: ParallelConfig) -> int:
    """Return how many neighbours on the context axis exchange heads for tokens.

    The groups of such neighbours form a ring.
    """
    if parallel.context_kind == "ring":
        return 1
    if parallel.context_kind == "all_to_all":
        return parallel.context
    return parallel.context_heads or 1
