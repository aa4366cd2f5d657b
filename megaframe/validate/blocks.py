"""Checks of `model.blocks`: parts that the model describes, keys that it replaces, and for each
block the checks that a model of such blocks has."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

from megaframe.config.blocks import (
    AttentionConfig,
    BlockConfig,
    CompressedAttentionConfig,
    LatentMixerConfig,
    Mamba2Config,
    MLPConfig,
    MoEMixtureConfig,
    NoLayerConfig,
)
from megaframe.config.model import ModelConfig
from megaframe.config.parts import FeedForwardPart
from megaframe.config.section import Section
from megaframe.errors import find_nearest_divisors

_REPLACED = {
    "heads": "heads",
    "kv_heads": "kv_heads",
    "head_dim": "head_dim",
    "rotary_fraction": "rotary_fraction",
    "rotary_scaling": "rotary_scaling",
    "qk_norm": "qk_norm",
    "qkv_bias": "qkv_bias",
}
"""Keys of a block's attention, and the keys of the model that they replace."""


def find_block_mistakes(model: ModelConfig) -> Iterator[str]:
    """Yield a message for each mistake in model.blocks."""
    if model.blocks is None:
        return
    if not model.blocks:
        yield (
            f"model.blocks=[] has 0 blocks to repeat over model.layers={model.layers}; leave it "
            "out, or describe one"
        )
        return
    pattern = sum(block.repeat for block in model.blocks)
    if pattern > model.layers:
        yield (
            f"model.blocks describes {pattern} layers and model.layers={model.layers}; use 1 to "
            f"{model.layers} of them, which are repeated from the first layer on"
        )
    if model.emulate is not None:
        yield "model.blocks has no effect with model.emulate, whose blocks only wait; leave it out"
    if model.window is not None:
        yield (
            "model.window has no effect with model.blocks; say window in the mixer of each block"
        )
    moe = model.moe
    if moe is not None and (moe.first, moe.every) != (0, 1):
        yield (
            f"model.moe.first={moe.first} and model.moe.every={moe.every} have no effect with "
            "model.blocks, which says what each layer has; leave them out"
        )
    for name, kind, section in (("moe", "moe", moe), ("latent", "latent", model.latent)):
        layers_of_kind = [
            number
            for number, block in enumerate(model.blocks)
            if kind in map(_get_kind, (block.mixer, block.second_mixer, block.feed_forward))
        ]
        if layers_of_kind and section is None:
            yield (
                f"model.blocks.{layers_of_kind[0]} has kind: {kind}, and model.{name} is missing; "
                "set its keys, or use another kind"
            )
        if section is not None and not layers_of_kind:
            yield (
                f"model.{name} has no effect, because no block of model.blocks has kind: {kind}; "
                "leave it out"
            )
    for number, block in enumerate(model.blocks):
        place = f"model.blocks.{number}"
        for key, alone in _list_mixers(block).items():
            yield from _find_mixer_mistakes(model, alone, f"{place}.{key}")
        yield from _find_half_mistakes(model, block, place)


def _list_mixers(block: BlockConfig) -> dict[str, BlockConfig]:
    """Return the block, and if there is a second mixer the block with that alone; by the key of the
    mixer."""
    second = block.second_mixer
    if _get_kind(second) == "none":
        return {"mixer": block}
    nothing = NoLayerConfig(kind="none")
    alone = block.model_copy(update={"mixer": second, "second_mixer": nothing})
    return {"mixer": block, "second_mixer": alone}


def _find_mixer_mistakes(model: ModelConfig, block: BlockConfig, place: str) -> Iterator[str]:
    """Yield a message for each mistake in the mixer of a block."""
    mixer = block.mixer
    if isinstance(mixer, Mamba2Config) and mixer.step_min > (mixer.step_max or math.inf):
        yield (
            f"{place}.step_min={mixer.step_min:g} is more than step_max={mixer.step_max:g}; use "
            f"step_min={mixer.step_max:g} or less"
        )
    if isinstance(mixer, CompressedAttentionConfig):
        yield from _find_compression_mistakes(model, mixer, place)
    if not isinstance(mixer, AttentionConfig):
        return
    if mixer.norm_after_rotation:
        alone = make_model_of_block(model, block)
        if not alone.qk_norm or alone.position != "rotary":
            yield (
                f"{place}.norm_after_rotation=true has no effect with qk_norm={alone.qk_norm} and "
                f"position={alone.position}; leave it out, or use qk_norm=head and position=rotary"
            )
    if mixer.keys_as_values and mixer.v_head_dim is not None:
        yield (
            f"{place}.v_head_dim={mixer.v_head_dim} has no effect with keys_as_values=true, whose "
            "values are as wide as keys; leave it out"
        )
    if mixer.attention_chunk and mixer.window:
        yield (
            f"{place}.attention_chunk={mixer.attention_chunk} and window={mixer.window} both say "
            "what a token sees; leave one of them out"
        )
    if mixer.alibi is None and mixer.alibi_form != "exact":
        yield f"{place}.alibi_form={mixer.alibi_form} has no effect without alibi; leave it out"
    if mixer.alibi is not None:
        for other in ("softcap", "query_scale", "sinks"):
            if getattr(mixer, other):
                yield (
                    f"{place}.{other} would change the place of a key that alibi={mixer.alibi:g} "
                    "adds to scores; leave one of them out"
                )


def _find_compression_mistakes(
    model: ModelConfig, mixer: CompressedAttentionConfig, place: str
) -> Iterator[str]:
    """Yield a message for each mistake in attention to compressed keys."""
    heads, groups = mixer.heads or model.heads, mixer.output_groups
    if heads % groups:
        yield (
            f"{place}.output_groups={groups} does not divide heads={heads}; use "
            f"{find_nearest_divisors(heads, groups)}"
        )
    indexer = None if mixer.compression is None else mixer.compression.indexer
    share = mixer.rotary_fraction or model.rotary_fraction
    rotated = round(share * (mixer.head_dim or model.head_dim)) * (model.position == "rotary")
    if indexer is not None and indexer.head_dim < rotated:
        yield (
            f"{place}.compression.indexer.head_dim={indexer.head_dim} is less than the {rotated} "
            f"dims that are rotated; use {rotated} or more"
        )


def _find_half_mistakes(model: ModelConfig, block: BlockConfig, place: str) -> Iterator[str]:
    """Yield a message for each mistake in how the halves of a block fit each other and the
    model."""
    feed_forward, halves = block.feed_forward, ("mixer", "feed_forward")
    if isinstance(feed_forward, FeedForwardPart) and model.activation == "xielu":
        yield (
            "model.activation=xielu has slopes that are trained, for which "
            f"{place}.feed_forward={feed_forward.name} has no place; use "
            "model.activation=relu2, or say activation in the MLPs of model.blocks"
        )
    second = _get_kind(block.second_mixer)
    if second != "none" and _get_kind(block.mixer) == "none":
        yield (
            f"{place}.second_mixer={second} has no first one beside it; say it in {place}.mixer, "
            "which is none"
        )
    absent = [half for half in halves if _get_kind(getattr(block, half)) == "none"]
    if len(absent) == 2:
        yield (
            f"{place}.mixer=none and {place}.feed_forward=none leave nothing in the block; use "
            "another kind for one of them, or leave it out"
        )
    elif absent and block.parallel != "none":
        yield (
            f"{place}.parallel={block.parallel} has no effect with {place}.{absent[0]}=none; leave "
            "it out, or use parallel=none"
        )
    own_norms = _get_kind(feed_forward) == "moe" and model.moe is not None and model.moe.own_norms
    if own_norms and (block.norms in ("after", "none") or block.parallel != "none"):
        yield (
            f"model.moe.own_norms=true puts norms before experts, and {place} has norms="
            f"{block.norms} and parallel={block.parallel}; use norms=before or both and "
            "parallel=none, or model.moe.own_norms=false"
        )
    if block.parallel == "one_norm" and block.norms in ("after", "none"):
        yield (
            f"{place}.parallel=one_norm has no norm to share with norms={block.norms}; use "
            "parallel=two_norms, or norms=before or both"
        )


def _get_kind(section: Section) -> object:
    return getattr(section, "kind", None)


def check_each_block(
    model: ModelConfig, check: Callable[[ModelConfig], Iterator[str]]
) -> Iterator[str]:
    """Yield the messages of a check of the whole model, or with `model.blocks` for a model of each
    of its blocks, each message once."""
    if model.blocks is None:
        yield from check(model)
        return
    reported: set[str] = set()
    for number, block in enumerate(model.blocks):
        for alone in _list_mixers(block).values():
            for message in check(make_model_of_block(model, alone)):
                if message not in reported:
                    reported.add(message)
                    yield f"model.blocks.{number}: {message}"


def make_model_of_block(model: ModelConfig, block: BlockConfig) -> ModelConfig:
    """Return a model all of whose blocks are like this one, without `model.blocks`."""
    changes: dict[str, object] = {"blocks": None, "window": getattr(block.mixer, "window", None)}
    mixer, feed_forward = block.mixer, block.feed_forward
    if not isinstance(mixer, LatentMixerConfig):
        changes["latent"] = None
    if isinstance(mixer, AttentionConfig | CompressedAttentionConfig):
        for key, replaced in _REPLACED.items():
            if getattr(mixer, key, None) is not None:
                changes[replaced] = getattr(mixer, key)
    if isinstance(mixer, CompressedAttentionConfig):
        changes["kv_heads"] = 1
    if isinstance(mixer, AttentionConfig) and mixer.rotary is not None:
        changes["position"] = "rotary" if mixer.rotary else "none"
    if not isinstance(feed_forward, MoEMixtureConfig):
        changes["moe"] = None
    if isinstance(feed_forward, MLPConfig):
        changes["ffn"] = feed_forward.ffn or model.ffn
    return model.model_copy(update=changes)
