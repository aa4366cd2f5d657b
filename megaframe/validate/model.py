"""Checks of the model's shape: heads, widths, positions, windows, latent attention and its indexer,
and predictors.

Config keys of ordinary attention are refused next to `model.latent` if their value is not the
default, not if they are merely given: a config that was written out in full contains all keys.
"""

from __future__ import annotations

from collections.abc import Iterator

from megaframe.architecture.window import list_windows
from megaframe.config.data import DataConfig
from megaframe.config.model import LatentAttentionConfig, ModelConfig
from megaframe.config.registry import get_part_name
from megaframe.config.schema import TrainConfig
from megaframe.errors import find_nearest_divisors
from megaframe.validate.blocks import check_each_block

TOKENIZERS = ("sentencepiece", "hf", "tiktoken")


def find_model_mistakes(model: ModelConfig, seq: int) -> Iterator[str]:
    """Yield a message for each mistake in heads, widths and positions.

    Args:
        model: The model to check.
        seq: Tokens per sample.
    """
    yield from check_each_block(model, _find_shape_mistakes)
    yield from find_indexer_mistakes(model)
    feed_forwards = [block.feed_forward for block in model.blocks or ()]
    activations = (getattr(feed_forward, "activation", None) for feed_forward in feed_forwards)
    if model.activation_limit is not None and "swiglu" not in (model.activation, *activations):
        yield (
            f"model.activation_limit={model.activation_limit:g} has no effect with "
            f"model.activation={get_part_name(model.activation)}; leave it out, or use swiglu"
        )
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


def _find_shape_mistakes(model: ModelConfig) -> Iterator[str]:
    """Yield a message for each mistake in heads, widths and their rotation."""
    if model.heads % model.kv_heads and model.latent is None:
        yield (
            f"model.kv_heads={model.kv_heads} does not divide model.heads={model.heads}; "
            f"use {find_nearest_divisors(model.heads, model.kv_heads)}"
        )
    if model.latent is not None:
        yield from find_latent_mistakes(model, model.latent)
    elif model.hidden % model.heads and "head_dim" not in model.model_fields_set:
        yield (
            f"model.heads={model.heads} does not divide model.hidden={model.hidden}; "
            f"use {find_nearest_divisors(model.hidden, model.heads)}, or set model.head_dim"
        )
    elif model.position == "rotary":
        yield from _find_rotary_mistakes(model)
    if model.position == "rotary":
        yield from _find_rotary_scaling_mistakes(model)


def _find_rotary_mistakes(model: ModelConfig) -> Iterator[str]:
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


def _find_rotary_scaling_mistakes(model: ModelConfig) -> Iterator[str]:
    scaling = model.rotary_scaling
    if scaling.kind == "none" and scaling.factor != 1:
        yield (
            f"model.rotary_scaling.factor={scaling.factor:g} has no effect with "
            f"model.rotary_scaling.kind=none; use another kind, or "
            "factor=1"
        )
    width = model.rotary_fraction * model.head_dim
    width = width if model.latent is None else model.latent.rotary_dim
    if scaling.kind == "dynamic" and round(width) < 4:
        yield (
            f"model.rotary_scaling.kind=dynamic has no larger base for {width:g} rotated dims; "
            "rotate 4 or more, or use kind linear"
        )
    turning = int(scaling.proportion * round(width) // 2)
    if scaling.kind == "proportional" and width and not turning:
        yield (
            f"model.rotary_scaling.proportion={scaling.proportion:g} of {width:g} dims rotates no "
            f"pair; use {2 / width:g} or more, or kind linear"
        )
    if scaling.kind != "proportional" and scaling.proportion != 1:
        yield (
            f"model.rotary_scaling.proportion={scaling.proportion:g} has no effect with "
            f"model.rotary_scaling.kind={scaling.kind}; leave it out, or use kind proportional"
        )
    low, high = scaling.low_frequency, scaling.high_frequency
    # Both may change from one pair to the next, as in Kimi-K2 and Llama 4 Scout.
    if scaling.kind in ("yarn", "llama3") and low > high:
        yield (
            f"model.rotary_scaling.low_frequency={low:g} must be at most "
            f"model.rotary_scaling.high_frequency={high:g}"
        )
    if scaling.kind == "longrope":
        yield from _find_longrope_mistakes(model)
    elif scaling.short_factors or scaling.long_factors:
        yield (
            "model.rotary_scaling.short_factors and long_factors have no effect with "
            f"model.rotary_scaling.kind={scaling.kind}; leave them out, or use kind longrope"
        )
    if scaling.kind != "yarn" and not scaling.truncate:
        yield (
            "model.rotary_scaling.truncate=false has no effect with model.rotary_scaling.kind="
            f"{scaling.kind}; leave it out, or use kind yarn"
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


def _find_longrope_mistakes(model: ModelConfig) -> Iterator[str]:
    scaling, latent = model.rotary_scaling, model.latent
    width = model.rotary_fraction * model.head_dim if latent is None else latent.rotary_dim
    pairs = round(width) // 2
    for name in ("short_factors", "long_factors"):
        if (count := len(getattr(scaling, name))) != pairs:
            yield (
                f"model.rotary_scaling.{name} has {count} factors for the {pairs} pairs of "
                f"dimensions that are rotated; give {pairs}"
            )
    if scaling.original_length < 2:
        yield (
            f"model.rotary_scaling.original_length={scaling.original_length} has no logarithm to "
            "divide by; use 2 or more"
        )


def find_indexer_mistakes(model: ModelConfig) -> Iterator[str]:
    """Yield a message for each mistake in model.indexer."""
    indexer, latent = model.indexer, model.latent
    if indexer is None:
        return
    if latent is None or not latent.query_rank:
        missing = "model.latent" if latent is None else "model.latent.query_rank"
        yield (
            "model.indexer chooses keys of latent attention by its latent of queries, and "
            f"{missing} is missing; set it, or leave model.indexer out"
        )
    elif model.position == "rotary" and indexer.head_dim < latent.rotary_dim:
        yield (
            f"model.indexer.head_dim={indexer.head_dim} is less than the model.latent.rotary_dim="
            f"{latent.rotary_dim} dims that are rotated; use {latent.rotary_dim} or more"
        )
    if indexer.dense and not indexer.loss:
        yield (
            "model.indexer.dense=true lets attention see all keys, and model.indexer.loss=0 trains "
            "nothing to choose them; use a larger loss, or leave one of the keys out"
        )
    if indexer.loss and model.adapters is not None:
        yield (
            f"model.indexer.loss={indexer.loss:g} has no effect with model.adapters, beside which "
            "the indexer is frozen; use model.indexer.loss=0"
        )


def find_latent_mistakes(model: ModelConfig, latent: LatentAttentionConfig) -> Iterator[str]:
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
    for name, value in (("qk_norm", model.qk_norm), ("qkv_bias", model.qkv_bias)):
        if value:
            yield (
                f"model.{name}={str(value).lower()} cannot be combined with model.latent; use "
                f"model.{name}=false"
            )
    yield from _find_latent_rotary_mistakes(model, latent)


def _find_latent_rotary_mistakes(
    model: ModelConfig, latent: LatentAttentionConfig
) -> Iterator[str]:
    if model.position == "learned":
        yield (
            f"model.latent has model.latent.rotary_dim={latent.rotary_dim} rotated dims, but "
            f"model.position={model.position}; use model.position=rotary, or none to rotate nothing"
        )
    if latent.rotary_dim % 2 and model.position == "rotary":
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


def find_window_mistakes(model: ModelConfig) -> Iterator[str]:
    """Yield a message if `model.window` is not a pattern for the layers."""
    pattern = list_windows(model)
    if not pattern:
        yield (
            "model.window=[] has 0 entries to repeat over model.layers="
            f"{model.layers}; use null for no window, or 1 to {model.layers} entries"
        )
    elif len(pattern) > model.layers:
        yield (
            f"model.window has {len(pattern)} entries for model.layers={model.layers}; use 1 to "
            f"{model.layers} of them, which are repeated from the first layer on"
        )


def find_mtp_mistakes(model: ModelConfig, train: TrainConfig) -> Iterator[str]:
    """Yield a message for each mistake in multi-token prediction."""
    depth = model.mtp_depth
    if depth and model.emulate is not None:
        yield (
            f"model.mtp_depth={depth} predicts with blocks, and those of model.emulate have no "
            "weights; use model.mtp_depth=0"
        )
    if depth >= train.seq:
        yield (
            f"model.mtp_depth={depth} looks past the end of every sample of train.seq={train.seq} "
            f"tokens; use {train.seq - 1} or less"
        )
    default = type(train).model_fields["mtp_weight"].default
    if not depth and train.mtp_weight != default:
        yield (
            f"train.mtp_weight={train.mtp_weight:g} has no effect with model.mtp_depth=0; leave it "
            "out, or use model.mtp_depth=1"
        )


def find_vocabulary_mistakes(model: ModelConfig, data: DataConfig) -> Iterator[str]:
    """Yield a message if `model.vocab` and `data.tokenizer` are missing, or the latter is no
    tokenizer."""
    tokenizer = data.tokenizer
    if tokenizer is None:
        if model.vocab is None:
            yield "model.vocab and data.tokenizer are both missing; set one of them"
        return
    kind, _, path = tokenizer.partition(":")
    if tokenizer != "bytes" and (kind not in TOKENIZERS or not path):
        yield (
            f"data.tokenizer={tokenizer} is not of the form KIND:PATH; use "
            f"{', '.join(f'{kind}:PATH' for kind in TOKENIZERS)} or bytes"
        )
