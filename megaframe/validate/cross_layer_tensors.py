"""Checks of what layers hand to later ones: keys and values, choices of keys, and inputs besides
the stream."""

from __future__ import annotations

from collections.abc import Iterator

from megaframe.architecture.attention import AttentionDescription
from megaframe.architecture.model_blocks import (
    describe_block,
    find_block_config,
    find_sources,
    uses_earlier_layer,
)
from megaframe.config.blocks import AttentionConfig, LatentMixerConfig
from megaframe.config.model import ModelConfig

_OF_KEYS = ("value_norm", "keys_as_values")
"""Keys of a mixer that say how keys and values are made."""


def find_handed_mistakes(model: ModelConfig) -> Iterator[str]:
    """Yield a message for each mistake in `shared_keys`, `shared_indexer` and
    `model.layer_embeddings`."""
    embedded = f"model.layer_embeddings={model.layer_embeddings}"
    if model.layer_embeddings and model.parametrisation == "mup":
        yield (
            f"{embedded} has widths that model.parametrisation=mup does not know; use "
            "model.parametrisation=standard"
        )
    if model.layer_vocab is not None and model.layer_embeddings is None:
        yield (
            f"model.layer_vocab={model.layer_vocab} has no effect without model.layer_embeddings; "
            "leave it out"
        )
    mixers = [find_block_config(model, layer).mixer for layer in range(model.layers)]
    shared = [layer for layer, mixer in enumerate(mixers) if uses_earlier_layer(mixer)]
    if model.mtp_depth and (shared or model.layer_embeddings):
        key = embedded if model.layer_embeddings else _get_key(mixers[shared[0]])
        yield (
            f"model.mtp_depth={model.mtp_depth} predicts with blocks to which nothing is handed, "
            f"and {key} needs it; use model.mtp_depth=0"
        )
    for layer in range(model.layers):
        second_mixer = find_block_config(model, layer).second_mixer
        if uses_earlier_layer(second_mixer):
            yield (
                f"layer {layer}: {_get_key(second_mixer)}=true is for the mixer of a block, not "
                "for its second_mixer; leave it out"
            )
    messages = (_find_mistakes_of_layer(model, layer) for layer in shared)
    yield from dict.fromkeys(message for of_layer in messages for message in of_layer)


def _get_key(mixer: object) -> str:
    return "shared_keys" if isinstance(mixer, AttentionConfig) else "shared_indexer"


def _find_mistakes_of_layer(model: ModelConfig, layer: int) -> Iterator[str]:
    config, place = find_block_config(model, layer).mixer, f"layer {layer}: shared_keys=true"
    source = find_sources(model)[layer]
    if isinstance(config, LatentMixerConfig):
        yield from _find_mistakes_of_choice(model, config, layer, source)
        return
    assert isinstance(config, AttentionConfig), "only attention shares keys"
    for name in _OF_KEYS:
        if getattr(config, name):
            yield f"{place} leaves no key to which {name}=true would apply; leave it out"
    if source is None:
        yield (
            f"{place} needs a layer before it with keys of its own and window={config.window}; use "
            "shared_keys=false, or the window of an earlier layer"
        )
        return
    mixer, other = (describe_block(model, number).mixer for number in (layer, source))
    assert isinstance(mixer, AttentionDescription) and isinstance(other, AttentionDescription)
    sizes = {"kv_heads": "kv_heads", "head_dim": "head_dim", "v_head_dim": "value_dim"}
    for key, name in sizes.items():
        size, needed = getattr(mixer, name), getattr(other, name)
        if size != needed:
            yield f"{place} with {key}={size}, and layer {source}, whose keys it has, {needed}"
    if mixer.qk_norm not in ("none", "head"):
        yield (
            f"{place} normalises queries alone, and qk_norm={mixer.qk_norm} is for queries and "
            "keys; use qk_norm=head or false"
        )
    for number, described in ((layer, mixer), (source, other)):
        if described.alibi is not None:
            yield (
                f"{place} cannot be combined with alibi={described.alibi:g} of layer {number}, "
                "which adds to queries and keys; leave one of them out"
            )


def _find_mistakes_of_choice(
    model: ModelConfig, config: LatentMixerConfig, layer: int, source: int | None
) -> Iterator[str]:
    place = f"layer {layer}: shared_indexer=true"
    if model.indexer is None:
        yield f"{place} needs model.indexer; set it, or use shared_indexer=false"
    elif source is None:
        yield (
            f"{place} needs a layer before it with an indexer of its own and window="
            f"{config.window}; use shared_indexer=false, or the window of an earlier layer"
        )
