"""What mixes the tokens of a layer, from the config."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from megaframe.architecture.attention import AttentionDescription
from megaframe.architecture.compressed_attention import (
    CompressedAttentionDescription,
    CompressedIndexerDescription,
    CompressorDescription,
)
from megaframe.architecture.extension_parts import MAKES_LAYER, describe_part
from megaframe.architecture.gated_delta_net import GatedDeltaNetDescription
from megaframe.architecture.gated_short_convolution import GatedShortConvolutionDescription
from megaframe.architecture.layer import MixerDescription
from megaframe.architecture.mamba2 import Mamba2Description
from megaframe.architecture.mla import LatentAttentionDescription
from megaframe.architecture.no_layer import NoMixer
from megaframe.architecture.parametrisation import compute_score_multiplier
from megaframe.architecture.rotary import compute_scores_factor, describe_rotary
from megaframe.architecture.sparse_attention import (
    IndexerDescription,
    SparseAttentionDescription,
)
from megaframe.architecture.window import Chunk
from megaframe.config.blocks import (
    AttentionConfig,
    CompressedAttentionConfig,
    GatedDeltaNetConfig,
    GatedShortConvolutionConfig,
    LatentMixerConfig,
    Mamba2Config,
    NoLayerConfig,
    get_qk_norm_form,
)
from megaframe.config.model import ModelConfig
from megaframe.config.parts import MixerPart


def describe_mixer(
    model: ModelConfig,
    config: (
        AttentionConfig
        | LatentMixerConfig
        | CompressedAttentionConfig
        | GatedDeltaNetConfig
        | GatedShortConvolutionConfig
        | Mamba2Config
        | NoLayerConfig
        | MixerPart
    ),
    output_std: float,
) -> MixerDescription:
    """Return what a config's mixer is made of.

    Args:
        model: The section, whose keys are defaults.
        config: Of the mixer.
        output_std: Standard deviation of the initial matrices into the stream.
    """
    if isinstance(config, NoLayerConfig):
        return NoMixer()
    if isinstance(config, MixerPart):
        mixer: MixerDescription = describe_part(
            config, MixerDescription, MAKES_LAYER, model, output_std
        )
        return mixer
    if isinstance(config, GatedDeltaNetConfig):
        return _describe_gated_delta_net(model, config, output_std)
    if isinstance(config, GatedShortConvolutionConfig):
        return _describe_gated_short_convolution(model, config, output_std)
    if isinstance(config, Mamba2Config):
        return _describe_mamba2(model, config, output_std)
    if isinstance(config, CompressedAttentionConfig):
        return _describe_compressed_attention(model, config, output_std)
    if isinstance(config, LatentMixerConfig):
        return _describe_latent_attention(model, config, output_std)
    return _describe_attention(model, config, output_std)


def _describe_attention(
    model: ModelConfig, config: AttentionConfig, output_std: float
) -> AttentionDescription:
    head_dim = config.head_dim or model.head_dim
    is_rotated = model.position == "rotary" if config.rotary is None else config.rotary
    rotated = round((config.rotary_fraction or model.rotary_fraction) * head_dim) * is_rotated
    qk_norm = get_qk_norm_form(model.qk_norm if config.qk_norm is None else config.qk_norm)
    return AttentionDescription(
        hidden=model.hidden,
        heads=config.heads or model.heads,
        window=Chunk(config.attention_chunk) if config.attention_chunk else config.window,
        bias=model.bias if config.bias is None else config.bias,
        norm_eps=model.norm_eps,
        score_scale=config.score_scale or compute_score_multiplier(model) / math.sqrt(head_dim),
        rotary=describe_rotary(model, rotated, config.rotary_base, config.rotary_scaling),
        query_scale=config.query_scale,
        init_std=model.init_std,
        output_std=output_std,
        kv_heads=config.kv_heads or model.kv_heads,
        head_dim=head_dim,
        value_dim=config.v_head_dim or head_dim,
        qk_norm=qk_norm,
        qkv_bias=model.qkv_bias if config.qkv_bias is None else config.qkv_bias,
        norm_after_rotation=config.norm_after_rotation and rotated > 0 and qk_norm != "none",
        value_norm=config.value_norm,
        keys_as_values=config.keys_as_values,
        softcap=config.softcap,
        alibi=config.alibi,
        alibi_form=config.alibi_form,
        has_sinks=config.sinks,
        output_gate=config.output_gate,
    )


def _describe_latent_attention(
    model: ModelConfig, config: LatentMixerConfig, output_std: float
) -> LatentAttentionDescription:
    latent = model.latent
    assert latent is not None, "a block with latent attention is refused without model.latent"
    width, indexer = latent.head_dim + latent.rotary_dim, model.indexer
    describe: Callable[..., LatentAttentionDescription] = LatentAttentionDescription
    if indexer is not None and latent.query_rank:
        described = IndexerDescription(
            hidden=model.hidden,
            query_rank=latent.query_rank,
            init_std=model.init_std,
            **indexer.model_dump(exclude={"absorb"}),
        )
        absorbs = indexer.absorb is True
        describe = partial(SparseAttentionDescription, indexer=described, absorbs=absorbs)
    return describe(
        hidden=model.hidden,
        heads=model.heads,
        window=config.window,
        bias=model.bias,
        norm_eps=latent.norm_eps or model.norm_eps,
        score_scale=compute_scores_factor(model)
        * compute_score_multiplier(model)
        / math.sqrt(width),
        rotary=describe_rotary(model, latent.rotary_dim * (model.position == "rotary")),
        query_scale=config.query_scale,
        init_std=model.init_std,
        output_std=output_std,
        query_rank=latent.query_rank,
        kv_rank=latent.kv_rank,
        head_dim=latent.head_dim,
        shared_dim=latent.rotary_dim,
        value_dim=latent.value_dim,
    )


def _describe_compressed_attention(
    model: ModelConfig, config: CompressedAttentionConfig, output_std: float
) -> CompressedAttentionDescription:
    head_dim = config.head_dim or model.head_dim
    share = config.rotary_fraction or model.rotary_fraction
    rotated = round(share * head_dim) * (model.position == "rotary")
    keys, compressor, indexer = config.compression, None, None
    if keys is not None:
        compressor = CompressorDescription(
            hidden=model.hidden,
            width=head_dim,
            tokens=keys.tokens,
            overlap=keys.overlap,
            norm_eps=model.norm_eps,
            init_std=model.init_std,
        )
        if keys.indexer is not None:
            indexer = CompressedIndexerDescription(
                query_rank=config.query_rank,
                heads=keys.indexer.heads,
                top_k=keys.indexer.top_k,
                compressor=replace(compressor, width=keys.indexer.head_dim),
            )
    return CompressedAttentionDescription(
        hidden=model.hidden,
        heads=config.heads or model.heads,
        head_dim=head_dim,
        query_rank=config.query_rank,
        output_groups=config.output_groups,
        output_rank=config.output_rank,
        bias=model.bias,
        norm_eps=model.norm_eps,
        score_scale=compute_score_multiplier(model) / math.sqrt(head_dim),
        init_std=model.init_std,
        output_std=output_std,
        window=config.window,
        rotary=describe_rotary(model, rotated, config.rotary_base, config.rotary_scaling),
        compressor=compressor,
        indexer=indexer,
    )


def _describe_gated_short_convolution(
    model: ModelConfig, config: GatedShortConvolutionConfig, output_std: float
) -> GatedShortConvolutionDescription:
    return GatedShortConvolutionDescription(
        hidden=model.hidden,
        taps=config.convolution,
        bias=model.bias if config.bias is None else config.bias,
        init_std=model.init_std,
        output_std=output_std,
    )


def _describe_gated_delta_net(
    model: ModelConfig, config: GatedDeltaNetConfig, output_std: float
) -> GatedDeltaNetDescription:
    key_heads, key_dim = config.key_heads or model.heads, config.key_dim or model.head_dim
    return GatedDeltaNetDescription(
        hidden=model.hidden,
        key_heads=key_heads,
        value_heads=config.value_heads or key_heads,
        key_dim=key_dim,
        value_dim=config.value_dim or key_dim,
        taps=config.convolution,
        chunk=config.chunk,
        strongest=2.0 if config.negative_eigenvalues else 1.0,
        norm_eps=config.norm_eps or model.norm_eps,
        init_std=model.init_std,
        output_std=output_std,
        decay_rank=config.decay_rank or 0,
        gate_rank=config.gate_rank or 0,
        gate_function=config.gate,
    )


def _describe_mamba2(
    model: ModelConfig, config: Mamba2Config, output_std: float
) -> Mamba2Description:
    bias = model.bias if config.bias is None else config.bias
    return Mamba2Description(
        hidden=model.hidden,
        heads=config.heads or model.heads,
        head_dim=config.head_dim or model.head_dim,
        groups=config.groups,
        state_dim=config.state_dim,
        taps=config.convolution,
        convolution_bias=config.convolution_bias,
        steps=(config.step_min, config.step_max),
        norm_place=config.norm,
        norm_eps=model.norm_eps,
        input_bias=bias if config.input_bias is None else config.input_bias,
        output_bias=bias,
        chunk=config.chunk,
        init_std=model.init_std,
        output_std=output_std,
    )
