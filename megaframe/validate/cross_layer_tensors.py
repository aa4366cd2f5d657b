"""Checks of what layers hand to later ones: keys and values, and inputs besides the stream."""

from __future__ import annotations

from collections.abc import Iterator

from megaframe.architecture.attention import AttentionDescription
from megaframe.architecture.block import describe_block, find_block_config, find_key_sources
from megaframe.config.blocks import AttentionConfig
from megaframe.config.model import ModelConfig

_OF_KEYS = ("value_norm", "keys_as_values")
"""Keys of a mixer that say how keys and values are made."""


def find_handed_mistakes(model: ModelConfig) -> Iterator[str]:
    """Yield a message for each mistake in `shared_keys` and in `model.layer_embeddings`."""
    embedded = f"model.layer_embeddings={model.layer_embeddings}"
    if model.layer_embeddings and model.parametrisation == "mup":
        yield (
            f"{embedded} has widths that model.parametrisation=mup does not know; use "
            "model.parametrisation=standard"
        )
    shared = [n for n in range(model.layers) if _shares(find_block_config(model, n).mixer)]
    if model.mtp_depth and (shared or model.layer_embeddings):
        key = embedded if model.layer_embeddings else "shared_keys"
        yield (
            f"model.mtp_depth={model.mtp_depth} predicts with blocks to which nothing is handed, "
            f"and {key} needs it; use model.mtp_depth=0"
        )
    for layer in range(model.layers):
        if _shares(find_block_config(model, layer).second_mixer):
            yield (
                f"layer {layer}: shared_keys=true is for the mixer of a block, not for its "
                "second_mixer; leave it out"
            )
    messages = (_find_mistakes_of_layer(model, layer) for layer in shared)
    yield from dict.fromkeys(message for of_layer in messages for message in of_layer)


def _shares(mixer: object) -> bool:
    return isinstance(mixer, AttentionConfig) and mixer.shared_keys


def _find_mistakes_of_layer(model: ModelConfig, layer: int) -> Iterator[str]:
    config, place = find_block_config(model, layer).mixer, f"layer {layer}: shared_keys=true"
    source = find_key_sources(model)[layer]
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
