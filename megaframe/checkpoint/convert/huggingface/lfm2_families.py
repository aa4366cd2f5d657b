"""LFM2 (Liquid AI 2025): gated short convolutions in most layers, dense or with experts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import Field

from megaframe.checkpoint.convert.huggingface.dense_families import LLAMA, QK_NORMS
from megaframe.checkpoint.convert.huggingface.key_pairs import (
    FULL,
    SLIDING,
    Derived,
    Key,
    Keys,
    Pair,
    check_layer_types,
    choose,
    find_window,
    make_dense_first,
)
from megaframe.checkpoint.convert.huggingface.key_types import Counts, Flag, Size, Texts
from megaframe.checkpoint.convert.huggingface.model_facts import SHORT_CONVOLUTION, Facts
from megaframe.checkpoint.convert.huggingface.moe_families import SIGMOID, TOP_K, WIDTH
from megaframe.checkpoint.convert.huggingface.rotary_keys import RotaryKeys, RotaryKeysOfTypes
from megaframe.errors import UserError

_CONVOLUTION = "conv"
_MOST = 1 << 24
_Width = Annotated[int, Field(ge=1, le=_MOST)]
"""May be missing, and not null. It bounds no tensor, because another width follows from it."""


@dataclass(frozen=True)
class ConvolutionLayers(Key):
    """Which layers have a convolution and which have attention, and the keys of convolutions.

    Attributes:
        indices: The key of the numbers of the layers with attention, which holds if there are no
            types of layers; empty if these must be there.
        taps: Tokens that a convolution sees if no key says it.
        slides: Whether layers with attention may slide.
    """

    indices: str = ""
    taps: int = 3
    slides: bool = False

    @property
    def types(self) -> Mapping[str, Any]:
        """The types of layers, and the keys of convolutions."""
        indices = {self.indices: Counts} if self.indices else {}
        window = {"sliding_window": Size} if self.slides else {}
        convolution = {"conv_L_cache": Size, "conv_bias": Flag}
        return {"layer_types": Texts, **convolution, **indices, **window}

    @property
    def required(self) -> tuple[str, ...]:
        """The types of layers, if nothing else says them."""
        return () if self.indices else ("layer_types",)

    def read(self, config: Mapping[str, Any], facts: Facts) -> None:
        """Set the mixer of each layer."""
        layers, kinds = len(facts.layers), config.get("layer_types")
        if kinds is None:
            indices = config.get(self.indices)
            full = {*range(layers)} if indices is None else {*indices}
            kinds = [FULL if layer in full else _CONVOLUTION for layer in range(layers)]
        known, window = (FULL, _CONVOLUTION), config.get("sliding_window")
        check_layer_types("layer_types", kinds, layers, (*known, *(SLIDING,) * self.slides))
        if window is None and SLIDING in kinds:
            raise UserError(
                f"layer_types has {SLIDING} layers, and there is no sliding_window for them"
            )
        convolution = {
            "mixer.kind": SHORT_CONVOLUTION,
            "mixer.convolution": config.get("conv_L_cache") or self.taps,
            "mixer.bias": bool(config.get("conv_bias")),
        }
        attention = {"mixer.kind": "attention", "mixer.bias": False, "mixer.qkv_bias": False}
        for layer, kind in zip(facts.layers, kinds, strict=True):
            layer.update(convolution if kind == _CONVOLUTION else attention)
            layer["mixer.window"] = window if kind == SLIDING else None

    def write(self, facts: Facts) -> Keys:
        """Return the type of each layer, and the keys of the first convolution."""
        mixers = facts.list_values("mixer.kind")
        full = [layer for layer, mixer in enumerate(mixers) if mixer != SHORT_CONVOLUTION]
        first = next((layer for layer in facts.layers if "mixer.convolution" in layer), {})
        windows = facts.list_values("mixer.window")
        kinds = [
            _CONVOLUTION if mixer == SHORT_CONVOLUTION else FULL if window is None else SLIDING
            for mixer, window in zip(mixers, windows, strict=True)
        ]
        return {
            "layer_types": kinds,
            **({"sliding_window": find_window(facts)} if self.slides else {}),
            "conv_L_cache": first.get("mixer.convolution", self.taps),
            "conv_bias": first.get("mixer.bias", False),
            **({self.indices: full} if self.indices else {}),
        }


@dataclass(frozen=True)
class AdjustedWidth(Key):
    """The width of MLPs, which code may make of another one: two thirds of it, times a factor,
    rounded up to a multiple."""

    @property
    def types(self) -> Mapping[str, Any]:
        """The width under both of its names, and how it is adjusted."""
        return {
            **{"intermediate_size": _Width, "block_ff_dim": _Width, "block_multiple_of": _Width},
            "block_ffn_dim_multiplier": Annotated[float, Field(gt=0, le=_MOST)],
            "block_auto_adjust_ff_dim": bool,
        }

    def read(self, config: Mapping[str, Any], facts: Facts) -> None:
        """Set the width."""
        # Of two widths code takes this one.
        width = config.get("block_ff_dim", config.get("intermediate_size"))
        if width is None:
            raise UserError("intermediate_size is missing")
        if config.get("block_auto_adjust_ff_dim", True):
            multiple = config.get("block_multiple_of", 256)
            width = int(config.get("block_ffn_dim_multiplier", 1.0) * int(2 * width / 3))
            width = multiple * ((width + multiple - 1) // multiple)
        facts.set("feed_forward.ffn", width)

    def write(self, facts: Facts) -> Keys:
        """Return the width, not to be adjusted."""
        return {
            **{"intermediate_size": facts.get("feed_forward.ffn"), "block_multiple_of": 256},
            **{"block_ffn_dim_multiplier": 1.0, "block_auto_adjust_ff_dim": False},
        }


LFM2 = LLAMA.derive(
    "lfm2",
    "Lfm2ForCausalLM",
    AdjustedWidth(),
    Pair("norm_eps", "norm_eps", default=1e-5),
    Pair("num_key_value_heads", "mixer.kv_heads", "value"),
    Pair("tie_word_embeddings", "tie_embeddings", default=True),
    ConvolutionLayers("full_attn_idxs"),
    RotaryKeys(base=1e6),
    *(
        Derived(name, Size, lambda facts: facts.get("hidden"))
        for name in ("block_dim", "conv_dim", "conv_dim_out")
    ),
    Derived("num_heads", Size, lambda facts: facts.get("mixer.heads")),
    Derived("block_norm_eps", float | None, lambda facts: facts.get("norm_eps")),
    without=("rms_norm_eps", "attention_bias", "mlp_bias"),
    own={"mixer.qk_norm": "head"},
    # Code always rotates and always has gates; the others are for training.
    neutral=(
        *("use_pos_enc", "block_use_swiglu", "block_use_xavier_init", "conv_use_xavier_init"),
        *("block_mlp_init_scale", "block_out_init_scale"),
    ),
    aliases={"tie_embedding": "tie_word_embeddings"},
    ends={"model.norm": None, "model.embedding_norm": "head.norm"},
    block={
        **{"input_layernorm": None, "post_attention_layernorm": None, "self_attn.o_proj": None},
        **{f"mlp.{name}_proj": None for name in ("gate", "up", "down")},
        "operator_norm": "attention_norm",
        "ffn_norm": "mlp_norm",
        "self_attn.q_layernorm": "attention.query_norm",
        "self_attn.k_layernorm": "attention.key_norm",
        "self_attn.out_proj": "attention.output",
        "conv.in_proj": "gated_short_convolution.input",
        "conv.conv": "gated_short_convolution.convolution",
        "conv.out_proj": "gated_short_convolution.output",
        "feed_forward.w1": "mlp.gate",
        "feed_forward.w3": "mlp.up",
        "feed_forward.w2": "mlp.down",
    },
)
LFM2_MOE = LFM2.derive(
    "lfm2_moe",
    "Lfm2MoeForCausalLM",
    Pair("intermediate_size", "feed_forward.ffn", "value", otherwise="moe.ffn"),
    Pair("num_experts", "moe.experts", "value"),
    TOP_K,
    WIDTH,
    Pair("routed_scaling_factor", "moe.scale", default=1.0),
    Pair("norm_topk_prob", "moe.normalise", default=True),
    make_dense_first("num_dense_layers", need="value"),
    ConvolutionLayers(),
    own=SIGMOID | {"moe.normalise_eps": lambda facts: 1e-6 * bool(facts.get("moe.normalise"))},
    fixed={"use_expert_bias": True},
    aliases={"num_local_experts": "num_experts"},
    block={
        "feed_forward.gate": "moe.router",
        "feed_forward.expert_bias": "moe.balance",
        "feed_forward.experts.{expert}.w1": "moe.experts.gate",
        "feed_forward.experts.{expert}.w3": "moe.experts.up",
        "feed_forward.experts.{expert}.w2": "moe.experts.down",
    },
)
_ROPE_OF_LFM3 = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.5},
}
LFM3 = LLAMA.derive(
    "lfm3",
    "Lfm3ForCausalLM",
    Pair("norm_eps", "norm_eps", default=1e-5),
    Pair("num_key_value_heads", "mixer.kv_heads", "value"),
    Pair("head_dim", "mixer.head_dim", "value"),
    Pair("tie_word_embeddings", "tie_embeddings", default=True),
    ConvolutionLayers(taps=7, slides=True),
    RotaryKeysOfTypes(1e6, 1e6, reads_outside=False, proportional=True, sections=_ROPE_OF_LFM3),
    choose("use_sandwich_norm", "norms", {True: "both", False: "before"}, default=True, type=bool),
    choose(
        "use_attention_gate",
        "mixer.output_gate",
        {True: "head", False: "none"},
        default=True,
        type=bool,
    ),
    without=("rms_norm_eps", "attention_bias", "mlp_bias", "rope_theta", "rope_scaling"),
    own={"mixer.qk_norm": "head"},
    aliases={"rms_norm_eps": "norm_eps"},
    ends={"model.norm": None, "model.embedding_norm": "head.norm"},
    block={
        **{name: own for name, own in LFM2.block.items() if "self_attn" not in name},
        **{"input_layernorm": None, "post_attention_layernorm": None, **QK_NORMS},
        **{f"mlp.{name}_proj": None for name in ("gate", "up", "down")},
        "self_attn.gate_proj": "attention.gate",
        "post_operator_norm": "attention_post_norm",
        "post_ffn_norm": "mlp_post_norm",
    },
)
LFM2_FAMILIES = (LFM2, LFM2_MOE, LFM3)
