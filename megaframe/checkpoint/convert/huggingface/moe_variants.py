"""More families with experts: rows that derive from families without, with the same few parts."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megaframe.checkpoint.convert.huggingface.dense_families import (
    BIASES,
    ERNIE4_5,
    LLAMA,
    QWEN3,
    list_qwen_types,
)
from megaframe.checkpoint.convert.huggingface.key_pairs import (
    Derived,
    ExpertLayers,
    Key,
    Keys,
    LayerTypes,
    Pair,
    count_dense_first,
    list_experts,
    make_dense_first,
    make_layer_kinds,
    slide_except,
)
from megaframe.checkpoint.convert.huggingface.key_types import Count, Counts, Flag, Size
from megaframe.checkpoint.convert.huggingface.layered_families import EXAONE4
from megaframe.checkpoint.convert.huggingface.model_facts import Facts
from megaframe.checkpoint.convert.huggingface.moe_families import (
    BIASED_ROUTER,
    DEEPSEEK_V3,
    EXPERT_ALIASES,
    EXPERTS,
    MIXTRAL,
    ROUTER,
    SHARED,
    SIGMOID,
    SOFTMAX,
    TOP_K,
    WIDTH,
    Groups,
    LatentWidths,
)
from megaframe.checkpoint.convert.huggingface.rotary_keys import (
    RotaryKeys,
    RotaryKeysOfTypes,
    ScaledRotaryKeys,
    get_head_dim,
    set_share,
)
from megaframe.errors import UserError

_ROUTED: tuple[Key, ...] = (
    Pair("n_routed_experts", "moe.experts", "value"),
    TOP_K,
    WIDTH,
    Pair("n_shared_experts", "moe.shared", "value"),
    Pair("routed_scaling_factor", "moe.scale", "value"),
    Pair("norm_topk_prob", "moe.normalise", "value"),
    Groups(best=2),
)
_GLM_BLOCK = {**BIASED_ROUTER, **EXPERTS, **SHARED}
_PREDICTORS = {
    "predictors": "num_nextn_predict_layers",
    "aliases": {
        "num_local_experts": "n_routed_experts",
        "num_mtp_layers": "num_nextn_predict_layers",
    },
}


@dataclass(frozen=True)
class QueryKeyNorms(Key):
    """Whether queries and keys are normalised."""

    @property
    def types(self) -> Mapping[str, Any]:
        """The key."""
        return {"use_qk_norm": Flag}

    def read(self, config: Mapping[str, Any], facts: Facts) -> None:
        """Set the norms."""
        facts.set("mixer.qk_norm", "head" if config.get("use_qk_norm") else False)

    def write(self, facts: Facts) -> Keys:
        """Return whether they are."""
        return {"use_qk_norm": facts.get("mixer.qk_norm") == "head"}


GLM4_MOE = QWEN3.derive(
    "glm4_moe",
    "Glm4MoeForCausalLM",
    *_ROUTED,
    make_dense_first("first_k_dense_replace", need="value"),
    Pair("attention_bias", "mixer.qkv_bias", default=False),
    Pair("num_key_value_heads", "mixer.kv_heads", "value"),
    Pair("head_dim", "mixer.head_dim"),
    QueryKeyNorms(),
    RotaryKeys(share=0.5),
    without=("sliding_window", "layer_types"),
    own=SIGMOID,
    fixed={"use_mrope": False},
    block=_GLM_BLOCK,
    has_empty_shared=True,
    **_PREDICTORS,
)
SOLAR_OPEN = LLAMA.derive(
    "solar_open",
    "SolarOpenForCausalLM",
    *_ROUTED,
    Pair("num_key_value_heads", "mixer.kv_heads", "value"),
    Pair("head_dim", "mixer.head_dim", "present"),
    Pair("attention_bias", "mixer.qkv_bias", default=False),
    RotaryKeys(base=1e6, share=1.0),
    without=("intermediate_size",),
    own=SIGMOID,
    fixed={"mlp_bias": False, "first_k_dense_replace": 0},
    neutral=("intermediate_size",),
    block=_GLM_BLOCK,
    has_empty_shared=True,
    aliases={"num_local_experts": "n_routed_experts"},
)
GLM4_MOE_LITE = DEEPSEEK_V3.derive(
    "glm4_moe_lite",
    "Glm4MoeLiteForCausalLM",
    Groups(best=2),
    make_layer_kinds(1, "first_k_dense_replace"),
    fixed={"topk_method": "noaux_tc", "scoring_func": "sigmoid"},
    code={},
)
MISTRAL4 = DEEPSEEK_V3.derive(
    "mistral4",
    "Mistral4ForCausalLM",
    LatentWidths(present_heads=True, whole_head=True),
    ScaledRotaryKeys(latent=True),
    own={"moe.score": "softmax", "moe.balance": "sequence"},
    fixed={"scoring_func": "softmax", "topk_method": None},
    block={
        "mlp.gate.e_score_correction_bias": None,
        **dict.fromkeys(EXPERTS),
        "mlp.experts.gate_up_proj": "moe.all_experts.gate moe.all_experts.up",
        "mlp.experts.down_proj": "moe.all_experts.down",
    },
    predictors="",
    aliases={"num_mtp_layers": None},
    also=(),
    code={},
)
DOTS1 = QWEN3.derive(
    "dots1",
    "Dots1ForCausalLM",
    *_ROUTED,
    make_dense_first("first_k_dense_replace", need="value"),
    Pair("head_dim", "mixer.head_dim"),
    LayerTypes(list_qwen_types, need="present", more=(("max_window_layers", Count),)),
    own=SIGMOID,
    fixed={"scoring_func": "noaux_tc", "moe_layer_freq": 1},
    block=_GLM_BLOCK,
    has_empty_shared=True,
    aliases={"num_local_experts": "n_routed_experts"},
)


@dataclass(frozen=True)
class RotaryWidth(Key):
    """The rotated share of a head as a width, which holds if there is no share."""

    @property
    def types(self) -> Mapping[str, Any]:
        """The width."""
        return {"rotary_dim": Size}

    def read(self, config: Mapping[str, Any], facts: Facts) -> None:
        """Set the share, or compare it."""
        width, rope = config.get("rotary_dim"), config.get("rope_parameters") or {}
        if width is None:
            return
        if config.get("partial_rotary_factor", rope.get("partial_rotary_factor")) is None:
            set_share(facts, width / get_head_dim(facts))
        elif width != _find_rotary_width(facts):
            raise UserError(
                f"rotary_dim={width} contradicts partial_rotary_factor, by which it is "
                f"{_find_rotary_width(facts)}"
            )

    def write(self, facts: Facts) -> Keys:
        """Return the width."""
        return {"rotary_dim": _find_rotary_width(facts)}


def _find_rotary_width(facts: Facts) -> int:
    return round(facts.get("mixer.rotary_fraction") * get_head_dim(facts))


@dataclass(frozen=True)
class SoftmaxLayers(Key):
    """Which layers have attention as it is here, as 1 for each; earlier models of MiniMax had
    others. Transformers does not read it."""

    @property
    def types(self) -> Mapping[str, Any]:
        """The list."""
        return {"attn_type_list": Counts}

    def read(self, config: Mapping[str, Any], facts: Facts) -> None:
        """Refuse other layers."""
        kinds = config.get("attn_type_list")
        if kinds is not None and kinds != [1] * len(facts.layers):
            raise UserError(
                f"attn_type_list={reprlib.repr(kinds)} is not supported, only 1 for each of the "
                f"{len(facts.layers)} layers"
            )

    def write(self, facts: Facts) -> Keys:
        """Return nothing."""
        return {}


MINIMAX_M2 = MIXTRAL.derive(
    "minimax_m2",
    "MiniMaxM2ForCausalLM",
    RotaryKeys(base=5e6, share=1.0),
    Pair("num_key_value_heads", "mixer.kv_heads", "value"),
    Pair("head_dim", "mixer.head_dim", "present"),
    RotaryWidth(),
    SoftmaxLayers(),
    without=("sliding_window", "layer_types"),
    own=SIGMOID | {"mixer.qk_norm": "whole"},
    fixed={
        **{"scoring_func": "sigmoid", "use_routing_bias": True, "use_qk_norm": True},
        **{"qk_norm_type": "per_layer", "shared_intermediate_size": 0},
    },
    # Predictors of further tokens are no part of the published weights.
    neutral=("use_mtp", "num_mtp_modules", "mtp_transformer_layers"),
    block={
        "self_attn.q_norm": "attention.query_norm",
        "self_attn.k_norm": "attention.key_norm",
        "block_sparse_moe.e_score_correction_bias": "moe.balance",
    },
    code={
        "AutoConfig": "configuration_minimax_m2.MiniMaxM2Config",
        "AutoModelForCausalLM": "modeling_minimax_m2.MiniMaxM2ForCausalLM",
    },
)


def _find_ernie_experts(config: Mapping[str, Any], layers: int) -> list[bool]:
    end, every = config["moe_layer_end_index"], config.get("moe_layer_interval") or 1
    span = range(config["moe_layer_start_index"], (layers - 1 if end == -1 else end) + 1)
    return [(layer + 1) % every == 0 and layer in span for layer in range(layers)]


def _state_ernie_experts(has_experts: Sequence[bool]) -> Keys:
    numbers = [layer for layer, has in enumerate(has_experts) if has] or [0]
    every = numbers[1] - numbers[0] if len(numbers) > 1 else 1
    span = {"moe_layer_start_index": numbers[0], "moe_layer_end_index": numbers[-1]}
    return {**span, "moe_layer_interval": every}


ERNIE4_5_MOE = ERNIE4_5.derive(
    "ernie4_5_moe",
    "Ernie4_5_MoeForCausalLM",
    Pair("moe_num_experts", "moe.experts", "value"),
    Pair("moe_k", "moe.top_k", "value"),
    Pair("moe_num_shared_experts", "moe.shared", "value"),
    WIDTH,
    ExpertLayers(
        (
            ("moe_layer_start_index", Count),
            ("moe_layer_end_index", int | None),
            ("moe_layer_interval", Size),
        ),
        _find_ernie_experts,
        _state_ernie_experts,
        ("moe_layer_start_index", "moe_layer_end_index"),
    ),
    without=("head_dim",),
    own=SOFTMAX | {"moe.balance": "bias"},
    fixed={"moe_norm_min": 1e-12},
    training=("router_aux_loss_coef",),
    aliases={"num_experts": "moe_num_experts", "num_experts_per_tok": "moe_k"},
    block={
        **{**ROUTER, **EXPERTS, **SHARED},
        "mlp.moe_statics.e_score_correction_bias": "moe.balance_row",
    },
)
HY_V3 = LLAMA.derive(
    "hy_v3",
    "HYV3ForCausalLM",
    Pair("num_experts", "moe.experts", "value"),
    TOP_K,
    WIDTH,
    Pair("num_shared_experts", "moe.shared", "value"),
    Pair("router_scaling_factor", "moe.scale", "value"),
    Pair("num_key_value_heads", "mixer.kv_heads", "value"),
    Pair("head_dim", "mixer.head_dim", "present"),
    RotaryKeys(base=11158840.0),
    make_layer_kinds(1),
    Derived("first_k_dense_replace", Count, lambda facts: count_dense_first(list_experts(facts))),
    Derived("expert_hidden_dim", Size, lambda facts: facts.get("moe.ffn")),
    own=SIGMOID | {"mixer.qk_norm": "head"},
    fixed={"mlp_bias": False, "qk_norm": True, "route_norm": True},
    neutral=("enable_moe_fp32_combine",),
    aliases=EXPERT_ALIASES,
    block={
        "self_attn.q_norm": "attention.query_norm",
        "self_attn.k_norm": "attention.key_norm",
        "mlp.router.gate": "moe.router",
        "mlp.expert_bias": "moe.balance",
        **EXPERTS,
        **{f"mlp.shared_mlp.{name}_proj": f"moe.shared.{name}" for name in ("gate", "up", "down")},
    },
    has_empty_shared=True,
)


@dataclass(frozen=True)
class WidthScale(Key):
    """Whether embeddings are multiplied by the root of their width."""

    @property
    def types(self) -> Mapping[str, Any]:
        """The key."""
        return {"mup_enabled": Flag}

    def read(self, config: Mapping[str, Any], facts: Facts) -> None:
        """Set the factor."""
        scale = facts.get("hidden") ** 0.5 if config.get("mup_enabled") else 1.0
        facts.set("embedding_scale", scale)

    def write(self, facts: Facts) -> Keys:
        """Return whether they are."""
        return {"mup_enabled": facts.get("embedding_scale") != 1.0}


AFMOE = LLAMA.derive(
    "afmoe",
    "AfmoeForCausalLM",
    Pair("num_experts", "moe.experts", "value"),
    TOP_K,
    WIDTH,
    Pair("num_shared_experts", "moe.shared", "value"),
    Pair("route_scale", "moe.scale", "value"),
    Pair("head_dim", "mixer.head_dim", "present"),
    make_dense_first("num_dense_layers", need="value"),
    WidthScale(),
    LayerTypes(
        slide_except("global_attn_every_n_layers", 4),
        full=(("mixer.rotary", False),),
        need="present",
        more=(("global_attn_every_n_layers", Size),),
    ),
    own=SIGMOID | {"mixer.qk_norm": "head", "mixer.output_gate": "element", "norms": "both"},
    fixed={
        **{"mlp_bias": False, "route_norm": True, "score_func": "sigmoid", "n_group": 1},
        **{"topk_group": 1, "num_expert_groups": 1, "num_limited_groups": 1},
    },
    neutral=("load_balance_coeff", "use_grouped_mm"),
    block={
        "post_attention_layernorm": "attention_post_norm",
        "pre_mlp_layernorm": "mlp_norm",
        "post_mlp_layernorm": "mlp_post_norm",
        "self_attn.q_norm": "attention.query_norm",
        "self_attn.k_norm": "attention.key_norm",
        "self_attn.gate_proj": "attention.gate",
        "mlp.router.gate": "moe.router",
        "mlp.expert_bias": "moe.balance",
        **{**EXPERTS, **SHARED},
    },
)
EXAONE_MOE = EXAONE4.derive(
    "exaone_moe",
    "ExaoneMoeForCausalLM",
    Pair("num_experts", "moe.experts", "value"),
    TOP_K,
    WIDTH,
    Pair("num_shared_experts", "moe.shared", "value"),
    Pair("routed_scaling_factor", "moe.scale", "value"),
    Pair("norm_topk_prob", "moe.normalise", "value"),
    Groups(best=2),
    make_layer_kinds(1, "first_k_dense_replace"),
    Derived("is_moe_layer", list[bool] | None, list_experts),
    own=SIGMOID | {"norms": "before"},
    block={
        "input_layernorm": "attention_norm",
        "post_attention_layernorm": "mlp_norm",
        "post_feedforward_layernorm": None,
        **{**ROUTER, **EXPERTS, **SHARED},
        "mlp.e_score_correction_bias": "moe.balance",
    },
    has_empty_shared=True,
)
MELLUM = QWEN3.derive(
    "mellum",
    "MellumForCausalLM",
    Pair("num_experts", "moe.experts", "value"),
    TOP_K,
    WIDTH,
    Pair("norm_topk_prob", "moe.normalise", "value"),
    LayerTypes(lambda config, window: ["full_attention"] * config["num_hidden_layers"]),
    RotaryKeysOfTypes(5e5, 1e4),
    make_layer_kinds(0),
    own=SOFTMAX,
    training=("router_aux_loss_coef",),
    neutral=("mtp_layer_types", "mtp_mlp_layer_types"),
    block={**ROUTER, **EXPERTS},
    predictors="num_nextn_predict_layers",
    aliases={"num_local_experts": "num_experts", "num_mtp_layers": "num_nextn_predict_layers"},
)
_YARN = {
    **{"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0},
    **{"truncate": False, "original_max_position_embeddings": 4096},
}
GPT_OSS = LLAMA.derive(
    "gpt_oss",
    "GptOssForCausalLM",
    Pair("intermediate_size", "moe.ffn", "value"),
    Pair("num_local_experts", "moe.experts", "value"),
    TOP_K,
    Pair("num_key_value_heads", "mixer.kv_heads", "value"),
    Pair("head_dim", "mixer.head_dim", "value"),
    Pair("attention_bias", BIASES, default=True),
    Pair("rms_norm_eps", "norm_eps", default=1e-5),
    LayerTypes(slide_except("", 2), need="present"),
    RotaryKeys(base=150000.0, section=_YARN),
    own={
        **{**SOFTMAX, "moe.expert_bias": True, "moe.router_bias": True, "mixer.sinks": True},
        "feed_forward.activation": "swiglu_clamped",
    },
    fixed={"mlp_bias": False, "swiglu_alpha": 1.702, "swiglu_limit": 7.0},
    training=("router_aux_loss_coef",),
    neutral=("initial_context_length",),
    aliases={"num_experts": "num_local_experts", "experts_per_token": "num_experts_per_tok"},
    block={
        **{f"mlp.{name}_proj": None for name in ("gate", "up", "down")},
        "self_attn.sinks": "attention.sinks",
        "mlp.router": "moe.router",
        "mlp.experts.gate_up_proj": "moe.all_experts.gate_up",
        "mlp.experts.down_proj": "moe.all_experts.down",
    },
    transposed_experts=True,
    packed=True,
)
MOE_VARIANTS = (
    *(GLM4_MOE, SOLAR_OPEN, GPT_OSS, MISTRAL4),
    *(GLM4_MOE_LITE, DOTS1, MINIMAX_M2, ERNIE4_5_MOE, HY_V3, AFMOE, EXAONE_MOE, MELLUM),
)
