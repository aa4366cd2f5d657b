"""What a model computes, as flat facts: those of the whole model, and those of each of its layers.

A `model` section can say the same in several ways: `model.blocks` or its shorthand, a width that is
given or follows from another, keys that have no effect beside others. Its facts are taken from the
descriptions of its layers, so they are equal for sections that compute the same, and a section is
built from facts in the shortest of its forms. Families read and write facts, and two models are
compared by them.

A fact has the path that its key has in `model` (`norm_eps`, `moe.top_k`) or, for a layer, in a
block of `model.blocks` (`mixer.window`, `feed_forward.ffn`, `norms`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from megaframe.architecture.attention import AttentionDescription
from megaframe.architecture.block import BlockDescription
from megaframe.architecture.compressed_attention import CompressedAttentionDescription
from megaframe.architecture.embedding import get_layer_words
from megaframe.architecture.gated_delta_net import GatedDeltaNetDescription
from megaframe.architecture.gated_short_convolution import GatedShortConvolutionDescription
from megaframe.architecture.layer import MixerDescription
from megaframe.architecture.mamba2 import Mamba2Description
from megaframe.architecture.mla import LatentAttentionDescription
from megaframe.architecture.mlp import MLPDescription
from megaframe.architecture.model_blocks import describe_block
from megaframe.architecture.moe import MoEDescription
from megaframe.architecture.rotary import RotaryDescription
from megaframe.architecture.shared_keys import SharedKeyAttentionDescription
from megaframe.architecture.sparse_attention import SharedIndexerDescription
from megaframe.architecture.window import Chunk
from megaframe.config import ModelConfig
from megaframe.config.compare import TRAINING_ONLY
from megaframe.errors import UserError

_LAYER_PATHS = (
    *("mixer", "second_mixer", "feed_forward", "norms", "parallel", "residual_scale"),
    *("layer_scalar", "laurel_rank"),
)
"""Where the paths of layers' facts begin; all others are of the whole model."""
_SHARED = (
    *("layers", "hidden", "vocab", "norm_eps", "embedding_scale", "embedding_norm"),
    *("tie_embeddings", "init_std", "layer_embeddings"),
)
_ATTENTION = (
    *("heads", "kv_heads", "head_dim", "window", "bias", "score_scale", "softcap", "alibi"),
    "alibi_form",
)
DELTA_NET, SHORT_CONVOLUTION = "gated_delta_net", "gated_short_convolution"
MAMBA2, COMPRESSED = "mamba2", "compressed_attention"
"""Kinds of mixers."""
MAMBA2_INPUTS = ("gate", "inputs", "key", "query", "steps")
"""Parts of the product of Mamba-2's input, in the order of the rows of a group."""
DELTA_NET_SIZES = ("key_heads", "value_heads", "key_dim", "value_dim")
_SCALING: dict[str, tuple[str, ...]] = {
    "none": (),
    "linear": ("factor",),
    "proportional": ("factor", "proportion"),
    "dynamic": ("factor", "original_length"),
    "llama3": ("factor", "original_length", "low_frequency", "high_frequency"),
    "yarn": (
        *("factor", "original_length", "low_frequency", "high_frequency"),
        *("mscale", "mscale_all_dim", "truncate"),
    ),
    "longrope": ("factor", "original_length", "short_factors", "long_factors"),
}
"""The keys that each kind of scaling of rotary positions reads."""
_NO_LOGITS = TRAINING_ONLY - {"model.indexer.dense"} | {"model.positions"}
"""Keys that no logit depends on; how many positions there are is a matter of a text's length."""
_REMEDIES = {
    "model.moe.balance": ", and the bias takes part in the choice of experts; train with "
    "model.moe.balance=sequence, global or none, or export a family whose routers have it",
    "model.indexer.dense": "; train with model.indexer.dense=false",
    "model.latent.norm_eps": "; train with model.latent.norm_eps=1e-6",
}
_ROUNDING = 1e-12
"""Relative distance of two numbers of which one was computed from the other and back."""
_MOST_LAYERS = 2_000


@dataclass
class Facts:
    """Facts by their paths.

    Attributes:
        shared: Those of the whole model.
        layers: Those of each layer.
    """

    shared: dict[str, Any] = field(default_factory=dict)
    layers: list[dict[str, Any]] = field(default_factory=list)

    def set(self, path: str, value: Any) -> None:
        """Set a fact, that of a layer for all layers."""
        if path.partition(".")[0] not in _LAYER_PATHS:
            self.shared[path] = value
        else:
            self.set_layers(path, [value] * len(self.layers))

    def set_layers(self, path: str, values: Sequence[Any]) -> None:
        """Set a fact of each layer."""
        for layer, value in zip(self.layers, values, strict=True):
            layer[path] = value

    def get(self, path: str) -> Any:
        """Return a fact, that of the first layer that has it; None if there is none."""
        return next((facts[path] for facts in (self.shared, *self.layers) if path in facts), None)

    def list_values(self, path: str) -> list[Any]:
        """Return a fact of each layer, None for layers without it."""
        return [layer.get(path) for layer in self.layers]


def start_facts(layers: int) -> Facts:
    """Return the facts of a model of which only the number of layers is known.

    Raises:
        UserError: If there are more than a model can have.
    """
    if layers > _MOST_LAYERS:
        raise UserError(f"{layers} layers are more than the {_MOST_LAYERS} that a model can have")
    return Facts({"layers": layers}, [{} for _ in range(layers)])


def describe_model(model: ModelConfig) -> Facts:
    """Return the facts of a `model` section, and nothing that changes no logit but the width of
    initial values."""
    blocks = [describe_block(model, layer) for layer in range(model.layers)]
    shared: dict[str, Any] = {name: getattr(model, name) for name in _SHARED}
    shared["norm"], shared["norm_bias"] = model.norm, getattr(blocks[0].norm, "bias", False)
    shared |= {"logit_softcap": model.logit_softcap, "head_bias": model.head_bias}
    activations = (getattr(block.feed_forward, "activation", None) for block in blocks)
    limits = (getattr(activation, "limit", None) for activation in activations)
    shared["activation_limit"] = next((limit for limit in limits if limit is not None), None)
    shared["position"] = "learned" if model.position == "learned" else None
    layers = [_describe_layer(block) for block in blocks]
    layer_words = get_layer_words(model)
    if model.layer_embeddings is not None and layer_words != model.vocab:
        shared["layer_vocab"] = layer_words
    if model.streams is not None:
        shared |= _flatten(model.streams.model_dump(), "streams")
    if model.latent is not None and any(layer["mixer.kind"] == "latent" for layer in layers):
        latent_eps = model.latent.norm_eps or model.norm_eps
        shared |= _flatten({**model.latent.model_dump(), "norm_eps": latent_eps}, "latent")
        if model.indexer is not None:
            indexer = model.indexer.model_dump(exclude={"loss", "dense", "absorb"})
            indexer |= {"dense": True} if model.indexer.dense else {}
            shared |= _flatten(indexer, "indexer")
    experts = [block.feed_forward for block in blocks]
    moe = next((layer for layer in experts if isinstance(layer, MoEDescription)), None)
    if moe is not None:
        shared |= _flatten(_describe_experts(moe), "moe")
    return Facts(shared, layers)


def _describe_experts(layer: MoEDescription) -> dict[str, Any]:
    moe = layer.moe.model_dump(exclude={"first", "every"})
    moe |= {"ffn": layer.width, "activation": layer.activation.name}
    if layer.moe.shared:
        moe["bias"] = layer.bias
    if not layer.moe.normalise:
        moe["normalise_eps"] = 0.0
    if layer.moe.groups == layer.moe.top_groups:  # a token may use them all
        moe |= {"groups": 1, "top_groups": 1, "group_best": 1}
    if layer.moe.balance != "bias":  # only its bias takes part in the choice of experts
        moe["balance"] = "none"
    return moe


def _describe_layer(block: BlockDescription) -> dict[str, Any]:
    # The sum of two mixers has no order.
    mixers = sorted(block.mixers, key=lambda mixer: mixer.name == MAMBA2) or [block.mixer]
    facts = _describe_mixer(mixers[0])
    if len(mixers) == 2:
        second = _describe_mixer(mixers[1])
        facts |= {**second, "mixer.kind": facts["mixer.kind"]}
        facts["second_mixer.kind"] = second["mixer.kind"]
    feed_forward = block.feed_forward
    facts["feed_forward.kind"] = feed_forward.name
    if isinstance(feed_forward, MLPDescription):
        facts["feed_forward.ffn"] = feed_forward.width
        facts["feed_forward.activation"] = feed_forward.activation.name
        facts["feed_forward.up_bias"] = feed_forward.up_bias
        facts["feed_forward.down_bias"] = feed_forward.down_bias
        facts["feed_forward.sparsity"] = feed_forward.sparsity
    elif isinstance(feed_forward, MoEDescription):
        facts["feed_forward.shared"] = feed_forward.moe.shared
        facts["feed_forward.router"] = "hash" if feed_forward.words else "scores"
    facts |= {"norms": block.norms, "parallel": block.parallel}
    facts["layer_scalar"] = block.scalar is not None
    facts["laurel_rank"] = None if block.laurel is None else block.laurel.rank
    return {**facts, "residual_scale": block.residual_scale}


def _describe_mixer(mixer: MixerDescription) -> dict[str, Any]:
    facts: dict[str, Any] = {"mixer.kind": mixer.name}
    if isinstance(mixer, AttentionDescription):
        facts |= {f"mixer.{name}": getattr(mixer, name) for name in _ATTENTION}
        if isinstance(mixer.window, Chunk):
            facts |= {"mixer.window": None, "mixer.attention_chunk": mixer.window.size}
        facts |= {"mixer.qk_norm": mixer.qk_norm, "mixer.qkv_bias": mixer.qkv_bias}
        facts |= {"mixer.sinks": mixer.has_sinks, "mixer.output_gate": mixer.output_gate}
        facts["mixer.v_head_dim"] = mixer.value_dim
        for name in ("norm_after_rotation", "value_norm", "keys_as_values"):
            facts[f"mixer.{name}"] = getattr(mixer, name)
        facts["mixer.shared_keys"] = isinstance(mixer, SharedKeyAttentionDescription)
        facts["mixer.rotary"] = mixer.rotary is not None
        if mixer.rotary is not None:
            facts |= _describe_rotary(mixer.rotary)
            facts["mixer.rotary_fraction"] = mixer.rotary.width / mixer.head_dim
    elif isinstance(mixer, LatentAttentionDescription):
        facts |= {"mixer.kind": "latent", "mixer.rotary": mixer.rotary is not None}
        facts["mixer.shared_indexer"] = isinstance(mixer, SharedIndexerDescription)
        facts |= {f"mixer.{name}": getattr(mixer, name) for name in ("heads", "window", "bias")}
        facts |= {} if mixer.rotary is None else _describe_rotary(mixer.rotary)
    elif isinstance(mixer, CompressedAttentionDescription):
        facts |= _describe_compressed_attention(mixer)
    elif isinstance(mixer, GatedDeltaNetDescription):
        facts["mixer.kind"] = DELTA_NET
        facts |= {f"mixer.{name}": getattr(mixer, name) for name in DELTA_NET_SIZES}
        facts |= {"mixer.convolution": mixer.taps, "mixer.strongest": mixer.strongest}
        facts |= {"mixer.norm_eps": mixer.norm_eps, "mixer.gate": mixer.gate_function}
        ranks = {"decay_rank": mixer.decay_rank, "gate_rank": mixer.gate_rank}
        facts |= {f"mixer.{name}": rank for name, rank in ranks.items() if rank}
    elif isinstance(mixer, Mamba2Description):
        facts |= _flatten(_describe_mamba2(mixer), "mixer.mamba2")
    elif isinstance(mixer, GatedShortConvolutionDescription):
        facts |= {"mixer.convolution": mixer.taps, "mixer.bias": mixer.bias}
    if mixer.query_scale is not None:
        facts |= _flatten(mixer.query_scale.model_dump(), "mixer.query_scale")
    return facts


def _describe_compressed_attention(mixer: CompressedAttentionDescription) -> dict[str, Any]:
    names = ("heads", "head_dim", "query_rank", "window", "output_groups", "output_rank", "bias")
    facts: dict[str, Any] = {f"mixer.{name}": getattr(mixer, name) for name in names}
    facts["mixer.rotary"] = mixer.rotary is not None
    if mixer.rotary is not None:
        facts |= _describe_rotary(mixer.rotary)
        facts["mixer.rotary_fraction"] = mixer.rotary.width / mixer.head_dim
    if mixer.compressor is not None:
        keys = {"tokens": mixer.compressor.tokens, "overlap": mixer.compressor.overlap}
        facts |= _flatten(keys, "mixer.compression")
    if mixer.indexer is not None:
        sizes = {"heads": mixer.indexer.heads, "top_k": mixer.indexer.top_k}
        sizes["head_dim"] = mixer.indexer.compressor.width
        facts |= _flatten(sizes, "mixer.compression.indexer")
    return facts


def _describe_mamba2(mixer: Mamba2Description) -> dict[str, Any]:
    names = ("heads", "head_dim", "groups", "state_dim", "convolution_bias", "input_bias")
    facts = {name: getattr(mixer, name) for name in names}
    smallest, largest = mixer.steps
    facts |= {"convolution": mixer.taps, "norm": mixer.norm_place, "bias": mixer.output_bias}
    return {**facts, "step_min": smallest, "step_max": largest}


def _describe_rotary(rotary: RotaryDescription) -> dict[str, Any]:
    names = _SCALING[rotary.scaling.kind]
    scaling = {name: getattr(rotary.scaling, name) for name in ("kind", *names)}
    return {"mixer.rotary_base": rotary.base, **_flatten(scaling, "mixer.rotary_scaling")}


def find_differences(before: Facts, after: Facts) -> list[str]:
    """Return a line for each fact that a conversion would change, of the first layer for which it
    would."""
    if before.shared.get("moe.balance") == "none":  # a family whose routers have biases gets zeros
        after = Facts({**after.shared, "moe.balance": "none"}, after.layers)
    lines: dict[str, str] = {}
    pairs = [("model.", before.shared, after.shared)]
    if len(before.layers) == len(after.layers):
        layers = enumerate(zip(before.layers, after.layers, strict=True))
        pairs += [(f"layer {number}: ", *both) for number, both in layers]
    for start, old, new in pairs:
        for path in {**old, **new}:
            same = _are_same(old.get(path), new.get(path))
            if f"model.{path}" not in _NO_LOGITS and path not in lines and not same:
                remedy = _REMEDIES.get(f"model.{path}", "")
                change = f"{path}={old.get(path)!r} would become {new.get(path)!r}{remedy}"
                lines[path] = f"{start}{change}"
    return list(lines.values())


def _flatten(values: Mapping[str, Any], name: str) -> dict[str, Any]:
    return {f"{name}.{key}": value for key, value in values.items()}


def _are_same(value: Any, other: Any) -> bool:
    if isinstance(value, float) and isinstance(other, float):
        return math.isclose(value, other, rel_tol=_ROUNDING, abs_tol=_ROUNDING)
    return bool(value == other)
