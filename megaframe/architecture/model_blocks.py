"""The blocks of a model, as its config describes them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import fields, replace
from functools import lru_cache

from megaframe.architecture.activation import describe_activation
from megaframe.architecture.attention import AttentionDescription
from megaframe.architecture.block import BlockDescription, ScalarDescription
from megaframe.architecture.extension_parts import MAKES_LAYER, describe_part
from megaframe.architecture.laurel import LaurelDescription
from megaframe.architecture.layer import FeedForwardDescription, MixerDescription
from megaframe.architecture.layer_embedding import LayerEmbeddingDescription
from megaframe.architecture.mixers import describe_mixer
from megaframe.architecture.mlp import describe_mlp
from megaframe.architecture.moe import MoEDescription, has_experts
from megaframe.architecture.no_layer import NoFeedForward
from megaframe.architecture.norm import (
    LayerNormDescription,
    NormDescription,
    RMSNormDescription,
)
from megaframe.architecture.shared_keys import SharedKeyAttentionDescription
from megaframe.architecture.sparse_attention import (
    SharedIndexerDescription,
    SparseAttentionDescription,
)
from megaframe.architecture.spec import count_copies
from megaframe.architecture.streams import describe_streams
from megaframe.architecture.window import get_window
from megaframe.config.blocks import (
    AttentionConfig,
    BlockConfig,
    LatentMixerConfig,
    MLPConfig,
    MoEMixtureConfig,
    NoLayerConfig,
)
from megaframe.config.model import ModelConfig
from megaframe.config.parts import FeedForwardPart, NormPart


@lru_cache(maxsize=4096)
def describe_block(model: ModelConfig, layer: int) -> BlockDescription:
    """Return the block of a layer. Predictors' blocks are numbered after the last layer."""
    block, adapters = find_block_config(model, layer), model.adapters
    if adapters is not None and adapters.layers is not None and layer not in adapters.layers:
        adapters = adapters.model_copy(update={"targets": ()})
    # GPT-2's initialisation: outputs into the stream shrink with the number of layers.
    output_std = model.init_std / math.sqrt(_count_halves(model))
    feed_forward = _describe_feed_forward(model, block.feed_forward, output_std)
    mixer, second_mixer = (
        replace(describe_mixer(model, each, output_std), adapters=adapters)
        for each in (block.mixer, block.second_mixer)
    )
    if layer < model.layers:
        mixer = _describe_shared(mixer, layer, find_sources(model))
    return BlockDescription(
        mixer,
        replace(feed_forward, adapters=adapters),
        describe_norm(model),
        block.norms,
        block.parallel,
        block.residual_scale,
        model.dropout > 0,
        second_mixer,
        ScalarDescription() if block.layer_scalar else None,
        _describe_layer_embedding(model, output_std) if layer < model.layers else None,
        describe_streams(model),
        _describe_laurel(model, block.laurel_rank, output_std),
    )


def find_block_config(model: ModelConfig, layer: int) -> BlockConfig:
    """Return what `model.blocks` says of a layer, or what the other keys of `model` mean."""
    if model.blocks is not None:
        pattern = [block for block in model.blocks for _ in range(block.repeat)]
        return pattern[layer % len(pattern)]
    window, moe = get_window(model, layer), model.moe
    return BlockConfig(
        mixer=AttentionConfig(window=window)
        if model.latent is None
        else LatentMixerConfig(kind="latent", window=window),
        feed_forward=MoEMixtureConfig(kind="moe")
        if moe is not None and has_experts(moe, layer)
        else MLPConfig(),
    )


@lru_cache(maxsize=256)
def find_sources(model: ModelConfig) -> tuple[int | None, ...]:
    """Return for each layer the number of the one whose keys and values, or whose choice of keys,
    it uses: the nearest before it that has its own and sees as far. None for layers with their own,
    and for those before which there is none."""
    own: dict[tuple[str, int | None, int | None], int] = {}
    sources: list[int | None] = []
    for layer in range(model.layers):
        mixer = find_block_config(model, layer).mixer
        if not isinstance(mixer, AttentionConfig | LatentMixerConfig):
            sources.append(None)
            continue
        sight = mixer.kind, mixer.window, getattr(mixer, "attention_chunk", None)
        sources.append(own.get(sight) if uses_earlier_layer(mixer) else None)
        if not uses_earlier_layer(mixer):
            own[sight] = layer
    return tuple(sources)


def uses_earlier_layer(mixer: object) -> bool:
    """Return whether a mixer uses keys, or a choice of keys, of an earlier layer."""
    if isinstance(mixer, AttentionConfig):
        return mixer.shared_keys
    return isinstance(mixer, LatentMixerConfig) and mixer.shared_indexer


@lru_cache(maxsize=256)
def _count_halves(model: ModelConfig) -> int:
    """Return how often the layers of a model add to the stream."""
    blocks = [find_block_config(model, layer) for layer in range(model.layers)]
    halves = (half for block in blocks for half in (block.mixer, block.feed_forward))
    return max(1, sum(not isinstance(half, NoLayerConfig) for half in halves))


@lru_cache(maxsize=256)
def describe_norm(model: ModelConfig) -> NormDescription:
    """Return the norm of the residual stream. One object for all layers, so that code from outside
    is compiled once."""
    if isinstance(model.norm, NormPart):
        # Torch code for norms derived from ours is known.
        known = (RMSNormDescription, LayerNormDescription)
        needed = "compute(x, *parameters)"
        norm: NormDescription = describe_part(
            model.norm, NormDescription, needed, model, known=known
        )
        return norm
    if model.norm == "rmsnorm":
        return RMSNormDescription(model.hidden, model.norm_eps)
    return LayerNormDescription(model.hidden, model.norm_eps, model.bias)


def list_mixers(model: ModelConfig) -> list[MixerDescription]:
    """Return the mixers of all layers, and of the predictors' blocks after them."""
    blocks = [describe_block(model, n) for n in range(model.layers + model.mtp_depth)]
    return [mixer for block in blocks for mixer in block.mixers or (block.mixer,)]


def count_mixers(model: ModelConfig) -> int:
    """Return how many mixers of the layers keep something of past tokens: all but those that attend
    to the keys and values of another one."""
    blocks = (describe_block(model, layer) for layer in range(model.layers))
    mixers = (mixer for block in blocks for mixer in block.mixers)
    return sum(not isinstance(mixer, SharedKeyAttentionDescription) for mixer in mixers)


def count_kv_copies(model: ModelConfig, tensor: int) -> int:
    """Return how many tensor ranks share each key and value head, or each group of heads: 1 if
    there are enough of them."""
    return max(count_copies(mixer.shared_groups, tensor) for mixer in list_mixers(model))


def _describe_layer_embedding(
    model: ModelConfig, output_std: float
) -> LayerEmbeddingDescription | None:
    if model.layer_embeddings is None:
        return None
    return LayerEmbeddingDescription(
        hidden=model.hidden,
        width=model.layer_embeddings,
        norm=describe_norm(model),
        init_std=model.init_std,
        output_std=output_std,
    )


def _describe_laurel(
    model: ModelConfig, rank: int | None, output_std: float
) -> LaurelDescription | None:
    if rank is None:
        return None
    return LaurelDescription(
        hidden=model.hidden,
        rank=rank,
        norm=describe_norm(model),
        init_std=model.init_std,
        output_std=output_std,
    )


def _describe_feed_forward(
    model: ModelConfig,
    config: MLPConfig | MoEMixtureConfig | NoLayerConfig | FeedForwardPart,
    output_std: float,
) -> FeedForwardDescription:
    if isinstance(config, NoLayerConfig):
        return NoFeedForward()
    if isinstance(config, FeedForwardPart):
        layer: FeedForwardDescription = describe_part(
            config, FeedForwardDescription, MAKES_LAYER, model, output_std
        )
        return layer
    if isinstance(config, MLPConfig):
        return describe_mlp(model, config, output_std)
    moe = model.moe
    assert moe is not None, "a block with experts is refused without model.moe"
    if config.shared is not None:
        moe = moe.model_copy(update={"shared": config.shared})
    return MoEDescription(
        hidden=model.hidden,
        width=moe.ffn or model.ffn,
        activation=describe_activation(model.activation, model.activation_limit),
        bias=model.bias,
        init_std=model.init_std,
        output_std=output_std,
        moe=moe,
        norm=describe_norm(model) if moe.own_norms else None,
        words=(model.vocab or 0) if config.router == "hash" else 0,
    )


def _describe_shared(
    mixer: MixerDescription, layer: int, sources: Sequence[int | None]
) -> MixerDescription:
    """Return a mixer as the layer has it, of whose keys, or whose choice of keys, others may be the
    users."""
    source = sources[layer]
    values = {field.name: getattr(mixer, field.name) for field in fields(mixer)}
    if isinstance(mixer, AttentionDescription):
        if source is not None:
            return SharedKeyAttentionDescription(**values, source=source)
        return replace(mixer, hands_keys=layer in sources)
    if isinstance(mixer, SparseAttentionDescription):
        if source is not None:
            del values["hands_choice"]
            return SharedIndexerDescription(**values, source=source)
        return replace(mixer, hands_choice=layer in sources and not mixer.indexer.dense)
    return mixer
