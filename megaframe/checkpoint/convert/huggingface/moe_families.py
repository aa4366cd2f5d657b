"""Families with experts, some of them with latent attention."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megaframe.checkpoint.convert.huggingface.dense_families import (
    LLAMA,
    MISTRAL,
    NO_BIASES,
    QWEN3,
)
from megaframe.checkpoint.convert.huggingface.key_pairs import (
    ExpertLayers,
    Key,
    Keys,
    Pair,
    UniformWindow,
    make_dense_first,
)
from megaframe.checkpoint.convert.huggingface.key_types import Count, Counts, Size, Text
from megaframe.checkpoint.convert.huggingface.layered_families import (
    GRANITE,
    GRANITE_SWA,
    OLMO2,
)
from megaframe.checkpoint.convert.huggingface.model_facts import Facts
from megaframe.checkpoint.convert.huggingface.rotary_keys import RotaryKeys
from megaframe.errors import UserError

SOFTMAX = {
    **{"feed_forward.kind": "moe", "moe.score": "softmax", "moe.balance": "sequence"},
    "moe.normalise": True,
}
SIGMOID = {**SOFTMAX, "moe.score": "sigmoid", "moe.balance": "bias"}
EXPERTS = {
    "mlp.experts.{expert}.gate_proj": "moe.experts.gate",
    "mlp.experts.{expert}.up_proj": "moe.experts.up",
    "mlp.experts.{expert}.down_proj": "moe.experts.down",
}
SHARED = {
    f"mlp.shared_experts.{name}_proj": f"moe.shared.{name}" for name in ("gate", "up", "down")
}
ROUTER = {"mlp.gate": "moe.router"}
BIASED_ROUTER = {**ROUTER, "mlp.gate.e_score_correction_bias": "moe.balance"}
TOP_K = Pair("num_experts_per_tok", "moe.top_k", "value")
WIDTH = Pair("moe_intermediate_size", "moe.ffn", "value")
MIXTRAL = MISTRAL.derive(
    "mixtral",
    "MixtralForCausalLM",
    Pair("intermediate_size", "moe.ffn", "value"),
    Pair("num_local_experts", "moe.experts", "value"),
    TOP_K,
    UniformWindow(),
    RotaryKeys(base=1e6),
    own=SOFTMAX,
    training=("router_aux_loss_coef", "router_jitter_noise"),
    aliases={"num_experts": "num_local_experts"},
    block={
        "block_sparse_moe.gate": "moe.router",
        "block_sparse_moe.experts.{expert}.w1": "moe.experts.gate",
        "block_sparse_moe.experts.{expert}.w3": "moe.experts.up",
        "block_sparse_moe.experts.{expert}.w2": "moe.experts.down",
    },
)


def _find_sparse_steps(config: Mapping[str, Any], layers: int) -> list[bool]:
    step, dense = config.get("decoder_sparse_step") or 1, config.get("mlp_only_layers") or []
    return [(layer + 1) % step == 0 and layer not in dense for layer in range(layers)]


def _state_sparse_steps(has_experts: Sequence[bool]) -> Keys:
    dense = [layer for layer, has in enumerate(has_experts) if not has]
    return {"decoder_sparse_step": 1, "mlp_only_layers": dense}


_SPARSE_STEPS = ExpertLayers(
    (("decoder_sparse_step", Size), ("mlp_only_layers", Counts)),
    _find_sparse_steps,
    _state_sparse_steps,
)
QWEN3_MOE = QWEN3.derive(
    "qwen3_moe",
    "Qwen3MoeForCausalLM",
    Pair("num_experts", "moe.experts", "value"),
    TOP_K,
    WIDTH,
    Pair("norm_topk_prob", "moe.normalise", default=False),
    UniformWindow(switch="use_sliding_window"),
    Pair("head_dim", "mixer.head_dim"),
    _SPARSE_STEPS,
    own=SOFTMAX | {"moe.balance": "global"},
    training=("router_aux_loss_coef",),
    neutral=("max_window_layers",),
    aliases={"num_local_experts": "num_experts"},
    block={**ROUTER, **EXPERTS},
)
_METHODS = ("greedy", "group_limited_greedy")
"""DeepSeek-V2's ways to choose experts, without and with groups."""


@dataclass(frozen=True)
class Groups(Key):
    """Groups of experts, of which a token may use a few.

    Attributes:
        needed: Whether the keys must have values.
        methods: Whether a key says if there are groups.
        best: Scores that a group's score is the sum of.
        name: The key of how many there are.
    """

    needed: bool = False
    methods: bool = False
    best: int = 1
    name: str = "n_group"

    @property
    def types(self) -> Mapping[str, Any]:
        """The groups, how many a token may use, and the method."""
        method = {"topk_method": Text} if self.methods else {}
        return {self.name: Size, "topk_group": Size, **method}

    @property
    def required(self) -> tuple[str, ...]:
        """The numbers, if they are."""
        return (self.name, "topk_group") if self.needed else ()

    def read(self, config: Mapping[str, Any], facts: Facts) -> None:
        """Set the groups."""
        groups = config.get(self.name) or 1
        top_groups = config.get("topk_group") or (groups if self.methods else 1)
        method = (config.get("topk_method") if self.methods else _METHODS[1]) or _METHODS[0]
        if method not in _METHODS:
            raise UserError(f"topk_method {reprlib.repr(method)} is none of {', '.join(_METHODS)}")
        if method == _METHODS[0]:
            groups, top_groups = 1, 1
        facts.set("moe.groups", groups)
        facts.set("moe.top_groups", top_groups)
        facts.set("moe.group_best", self.best if groups > 1 else 1)

    def write(self, facts: Facts) -> Keys:
        """Return the groups."""
        groups, top_groups = facts.get("moe.groups"), facts.get("moe.top_groups")
        method = {"topk_method": _METHODS[(groups or 1) > 1]} if self.methods else {}
        return {self.name: groups, "topk_group": top_groups, **method}


@dataclass(frozen=True)
class LatentWidths(Key):
    """Keys that follow from the widths of latent attention, and must be what follows.

    Attributes:
        present_heads: Whether the heads of keys and values must be there.
        whole_head: Whether `head_dim` is the width of a whole head, and not of what is rotated.
        unread_head: Whether code does not read it.
    """

    present_heads: bool = False
    whole_head: bool = False
    unread_head: bool = False

    @property
    def types(self) -> Mapping[str, Any]:
        """Heads of keys and values, and widths of heads."""
        return {"num_key_value_heads": Size, "head_dim": Size, "qk_head_dim": Size}

    @property
    def present(self) -> tuple[str, ...]:
        """The heads, if they must be."""
        return ("num_key_value_heads",) if self.present_heads else ()

    def read(self, config: Mapping[str, Any], facts: Facts) -> None:
        """Refuse what does not follow."""
        heads, kv_heads = config["num_attention_heads"], config.get("num_key_value_heads")
        if kv_heads not in (None, heads):
            raise UserError(
                f"num_key_value_heads={kv_heads} is not num_attention_heads={heads}, and latent "
                f"attention has keys and values for every head"
            )
        widths = [config["qk_rope_head_dim"], config["qk_nope_head_dim"]]
        head = sum(widths) if self.whole_head else widths[0]
        for key, width in (("head_dim", head), ("qk_head_dim", sum(widths))):
            if config.get(key, width) != width and not (self.unread_head and key == "head_dim"):
                raise UserError(
                    f"{key}={config[key]} is not the {width} that follows from qk_rope_head_dim="
                    f"{widths[0]} and qk_nope_head_dim={widths[1]}; remove it from config.json"
                )

    def write(self, facts: Facts) -> Keys:
        """Return the heads."""
        return {"num_key_value_heads": facts.get("mixer.heads")}


def _name_code(name: str) -> dict[str, str]:
    return {
        f"Auto{kind}": f"{module}_deepseek.{name}{suffix}"
        for kind, module, suffix in (
            ("Config", "configuration", "Config"),
            ("Model", "modeling", "Model"),
            ("ModelForCausalLM", "modeling", "ForCausalLM"),
        )
    }


_DEEPSEEK_EXPERTS = (
    Pair("n_routed_experts", "moe.experts", "value"),
    TOP_K,
    WIDTH,
)
DEEPSEEK_V3 = LLAMA.derive(
    "deepseek_v3",
    "DeepseekV3ForCausalLM",
    *_DEEPSEEK_EXPERTS,
    Pair("n_shared_experts", "moe.shared", "value"),
    Pair("routed_scaling_factor", "moe.scale", "value"),
    Pair("norm_topk_prob", "moe.normalise", "value"),
    make_dense_first("first_k_dense_replace", need="value"),
    Groups(needed=True, best=2),
    Pair("q_lora_rank", "latent.query_rank", "present"),
    Pair("kv_lora_rank", "latent.kv_rank", "value"),
    Pair("qk_nope_head_dim", "latent.head_dim", "value"),
    Pair("qk_rope_head_dim", "latent.rotary_dim", "value"),
    Pair("v_head_dim", "latent.value_dim", "value"),
    LatentWidths(present_heads=True),
    RotaryKeys(latent=True),
    own=SIGMOID | {"mixer.kind": "latent", "latent.norm_eps": 1e-6},
    fixed={
        **{**NO_BIASES, "scoring_func": "sigmoid", "moe_layer_freq": 1},
        **{"rope_interleave": True, "topk_method": "noaux_tc"},
    },
    training=("aux_loss_alpha",),
    neutral=("ep_size", "seq_aux"),
    aliases={"num_local_experts": "n_routed_experts", "num_mtp_layers": "num_nextn_predict_layers"},
    block={
        **{f"self_attn.{name}_proj": None for name in ("k", "v")},
        "self_attn.q_proj": "latent.query",
        "self_attn.q_a_proj": "latent.query_down",
        "self_attn.q_a_layernorm": "attention.query_norm",
        "self_attn.q_b_proj": "latent.query_up",
        "self_attn.kv_a_proj_with_mqa": "latent.kv_down",
        "self_attn.kv_a_layernorm": "attention.kv_norm",
        "self_attn.kv_b_proj": "attention.kv",
        **{**BIASED_ROUTER, **EXPERTS, **SHARED},
    },
    interleaved=True,
    has_empty_shared=True,
    predictors="num_nextn_predict_layers",
    also=("kimi_k2",),
    code=_name_code("DeepseekV3"),
)


def _refuse_normalised(value: bool) -> bool:
    if value:
        raise UserError("norm_topk_prob=true is not what its code computes")
    return value


DEEPSEEK_V2 = DEEPSEEK_V3.derive(
    "deepseek_v2",
    "DeepseekV2ForCausalLM",
    Pair("n_shared_experts", "moe.shared", "present", default=0),
    Pair("routed_scaling_factor", "moe.scale", default=1.0),
    Pair("norm_topk_prob", "moe.normalise", default=False, to_fact=_refuse_normalised),
    make_dense_first("first_k_dense_replace"),
    Groups(methods=True),
    LatentWidths(),
    own={"moe.score": "softmax", "moe.balance": "sequence"},
    fixed={"scoring_func": "softmax"},
    aliases={"num_experts": "n_routed_experts", "num_local_experts": None},
    block={"mlp.gate.e_score_correction_bias": None},
    code=_name_code("DeepseekV2"),
)
EXPERT_ALIASES = {"num_local_experts": "num_experts"}
_OLMO_EXPERTS: tuple[Key, ...] = (
    Pair("intermediate_size", "moe.ffn", "value"),
    Pair("num_experts", "moe.experts", "value"),
    TOP_K,
    Pair("norm_topk_prob", "moe.normalise", default=False),
)
OLMOE = LLAMA.derive(
    "olmoe",
    "OlmoeForCausalLM",
    *_OLMO_EXPERTS,
    without=("head_dim",),
    own=SOFTMAX | {"mixer.qk_norm": "whole"},
    fixed={"mlp_bias": False, "clip_qkv": None},
    training=("router_aux_loss_coef",),
    aliases=EXPERT_ALIASES,
    block={
        "self_attn.q_norm": "attention.query_norm",
        "self_attn.k_norm": "attention.key_norm",
        **{**ROUTER, **EXPERTS},
    },
)
FLEX_OLMO = OLMO2.derive(
    "flex_olmo",
    "FlexOlmoForCausalLM",
    *_OLMO_EXPERTS,
    RotaryKeys(base=5e5),
    own=SOFTMAX,
    training=("router_aux_loss_coef",),
    aliases=EXPERT_ALIASES,
    block={**ROUTER, **EXPERTS},
)
GRANITE_MOE = GRANITE.derive(
    "granitemoe",
    "GraniteMoeForCausalLM",
    Pair("intermediate_size", "moe.ffn", "value"),
    Pair("num_local_experts", "moe.experts", "value"),
    TOP_K,
    own=SOFTMAX,
    fixed={"mlp_bias": False},
    training=("router_aux_loss_coef",),
    block={
        "block_sparse_moe.router.layer": "moe.router",
        "block_sparse_moe.input_linear.weight": "moe.all_experts.gate moe.all_experts.up",
        "block_sparse_moe.output_linear.weight": "moe.all_experts.down",
    },
)


@dataclass(frozen=True)
class SharedWidth(Key):
    """The width of the shared experts, which are as many as it has widths of one.

    Attributes:
        name: The key.
        one: The key of the width of one expert.
        is_needed: Whether it must be there, and there must be a shared expert.
    """

    name: str = "shared_intermediate_size"
    one: str = "intermediate_size"
    is_needed: bool = False

    @property
    def types(self) -> Mapping[str, Any]:
        """The key."""
        return {self.name: Count}

    @property
    def required(self) -> tuple[str, ...]:
        """The key, if it is needed."""
        return (self.name,) * self.is_needed

    def read(self, config: Mapping[str, Any], facts: Facts) -> None:
        """Set the number of shared experts."""
        width, one = config.get(self.name) or 0, config[self.one]
        if width % one or (self.is_needed and not width):
            raise UserError(
                f"{self.name}={width} is no multiple of {self.one}={one}, and shared experts are "
                "as wide as others"
            )
        facts.set("moe.shared", width // one)

    def write(self, facts: Facts) -> Keys:
        """Return the width."""
        width = (facts.get("moe.shared") or 0) * (facts.get("moe.ffn") or 0)
        return {self.name: width}


_SHARED_MLP = {
    "shared_mlp.input_linear": "moe.shared.gate moe.shared.up",
    "shared_mlp.output_linear": "moe.shared.down",
}
GRANITE_MOE_SHARED = GRANITE_MOE.derive(
    "granitemoeshared", "GraniteMoeSharedForCausalLM", SharedWidth(), block=_SHARED_MLP
)
GRANITE_MOE_SWA = GRANITE_SWA.derive(
    "granitemoe_swa",
    "GraniteMoeSWAForCausalLM",
    Pair("intermediate_size", "moe.ffn", "value"),
    Pair("num_local_experts", "moe.experts", "value"),
    Pair("tie_word_embeddings", "tie_embeddings", default=False),
    Pair("num_key_value_heads", "mixer.kv_heads"),
    TOP_K,
    SharedWidth(),
    own=SOFTMAX,
    fixed={"mlp_bias": False},
    training=("router_aux_loss_coef",),
    block={
        **_SHARED_MLP,
        "block_sparse_moe.router": "moe.router",
        "block_sparse_moe.experts.gate_up_proj": "moe.all_experts.gate moe.all_experts.up",
        "block_sparse_moe.experts.down_proj": "moe.all_experts.down",
    },
)
MOE_FAMILIES = (
    *(MIXTRAL, QWEN3_MOE, DEEPSEEK_V2, DEEPSEEK_V3, OLMOE, FLEX_OLMO),
    *(GRANITE_MOE, GRANITE_MOE_SHARED, GRANITE_MOE_SWA),
)
