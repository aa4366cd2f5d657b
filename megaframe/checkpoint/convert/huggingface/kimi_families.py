"""Kimi Linear (Moonshot AI 2025): Kimi delta attention, and latent attention without rotation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ConfigDict

from megaframe.checkpoint.convert.huggingface.delta_net_families import LINEAR
from megaframe.checkpoint.convert.huggingface.dense_families import LLAMA
from megaframe.checkpoint.convert.huggingface.key_pairs import (
    FULL,
    Derived,
    Key,
    Keys,
    Pair,
    check_layer_types,
    make_layer_kinds,
)
from megaframe.checkpoint.convert.huggingface.key_types import Counts, Heads, Size, Texts
from megaframe.checkpoint.convert.huggingface.model_facts import DELTA_NET, Facts
from megaframe.checkpoint.convert.huggingface.moe_families import (
    DEEPSEEK_V3,
    MIXTRAL,
    SIGMOID,
    WIDTH,
    Groups,
)
from megaframe.errors import UserError


class _LinearKeys(BaseModel):
    """The section `linear_attn_config`."""

    model_config = ConfigDict(strict=True, extra="forbid")

    head_dim: Size = None
    num_heads: Heads = None
    short_conv_kernel_size: Size = None
    full_attn_layers: Counts = None
    kda_layers: Counts = None


_SECTION = {
    "linear_head_dim": "head_dim",
    "linear_num_heads": "num_heads",
    "linear_conv_kernel_dim": "short_conv_kernel_size",
}
"""Keys, and their names in the section, which win."""
_WIDTHS = ("key_dim", "value_dim", "decay_rank", "gate_rank")
"""Facts of a delta net that are the width of its heads."""


@dataclass(frozen=True)
class KimiLayers(Key):
    """Which layers have Kimi delta attention, and its sizes. A section of the publisher's has them
    too, with layers counted from 1."""

    @property
    def types(self) -> Mapping[str, Any]:
        """The sizes, the types of layers, and the section."""
        sizes = {"linear_head_dim": Size, "linear_num_heads": Heads, "linear_conv_kernel_dim": Size}
        return {**sizes, "layer_types": Texts, "linear_attn_config": _LinearKeys | None}

    def read(self, config: Mapping[str, Any], facts: Facts) -> None:
        """Set the mixer of each layer."""
        section = config.get("linear_attn_config") or {}
        sizes = {key: section.get(name) or config.get(key) for key, name in _SECTION.items()}
        if missing := [key for key, value in sizes.items() if value is None]:
            raise UserError(f"{missing[0]} is missing")
        kinds = self._find_kinds(config, section, len(facts.layers))
        check_layer_types("layer_types", kinds, len(facts.layers), (FULL, LINEAR))
        facts.set_layers("mixer.kind", ["latent" if k == FULL else DELTA_NET for k in kinds])
        for name in ("key_heads", "value_heads"):
            facts.set(f"mixer.{name}", sizes["linear_num_heads"])
        for name in _WIDTHS:
            facts.set(f"mixer.{name}", sizes["linear_head_dim"])
        facts.set("mixer.convolution", sizes["linear_conv_kernel_dim"])

    def _find_kinds(
        self, config: Mapping[str, Any], section: Mapping[str, Any], layers: int
    ) -> list[str]:
        """Return the types of layers as code finds them."""
        if (kinds := config.get("layer_types")) is not None:
            return list(kinds)
        full, linear = section.get("full_attn_layers"), section.get("kda_layers")
        if full is None or linear is None:
            return [FULL if layer and layer % 4 == 0 else LINEAR for layer in range(layers)]
        if sorted([*full, *linear]) != [*range(1, layers + 1)]:
            raise UserError(
                f"linear_attn_config: full_attn_layers={full} and kda_layers={linear} are not all "
                f"of the layers 1 to {layers}, each once"
            )
        return [FULL if layer + 1 in full else LINEAR for layer in range(layers)]

    def write(self, facts: Facts) -> Keys:
        """Return the keys and the section."""
        linear = [kind == DELTA_NET for kind in facts.list_values("mixer.kind")]
        values = (facts.get(f"mixer.{name}") for name in ("key_dim", "key_heads", "convolution"))
        sizes = {key: value or 1 for key, value in zip(_SECTION, values, strict=True)}
        section = {
            **{name: sizes[key] for key, name in _SECTION.items()},
            "full_attn_layers": [n + 1 for n, is_linear in enumerate(linear) if not is_linear],
            "kda_layers": [n + 1 for n, is_linear in enumerate(linear) if is_linear],
        }
        kinds = [LINEAR if is_linear else FULL for is_linear in linear]
        return {**sizes, "layer_types": kinds, "linear_attn_config": section}


_HEADS = ("query", "key", "value")
_MLP = ("gate", "up", "down")
_LATENT = {*("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")}
KIMI_LINEAR = LLAMA.derive(
    "kimi_linear",
    "KimiLinearForCausalLM",
    *(key for key in DEEPSEEK_V3.keys if _LATENT & {*key.types}),
    Derived("num_key_value_heads", Size, lambda facts: facts.get("mixer.heads")),
    KimiLayers(),
    Pair("num_experts", "moe.experts", "value"),
    Pair("num_experts_per_token", "moe.top_k", "value"),
    WIDTH,
    Pair("num_shared_experts", "moe.shared", "value"),
    Pair("routed_scaling_factor", "moe.scale", "value"),
    Pair("moe_renormalize", "moe.normalise", "value"),
    Groups(best=2, name="num_expert_group"),
    make_layer_kinds(1, "first_k_dense_replace"),
    without=("head_dim", "rope_parameters", "tie_word_embeddings"),
    own=SIGMOID | {"mixer.rotary": False, "mixer.gate": "sigmoid", "latent.norm_eps": 1e-6},
    fixed={
        **{"mlp_bias": False, "attention_bias": False, "tie_word_embeddings": False},
        **{"moe_router_activation_func": "sigmoid", "moe_layer_freq": 1, "mla_use_nope": True},
    },
    # Code computes the widths of heads from others, and rotates nothing.
    neutral=(
        *("head_dim", "qk_head_dim", "rope_theta", "rope_scaling", "rope_parameters"),
        "use_grouped_topk",
    ),
    aliases={
        **{"n_group": "num_expert_group", "norm_topk_prob": "moe_renormalize"},
        **{"num_local_experts": "num_experts", "num_experts_per_tok": "num_experts_per_token"},
        **{"n_shared_experts": "num_shared_experts", "max_position_embeddings": "model_max_length"},
    },
    positions="model_max_length",
    block={
        **{name: own for name, own in DEEPSEEK_V3.block.items() if own.startswith("latent.")},
        **{f"self_attn.{name[0]}_proj": f"delta_net.{name}" for name in _HEADS},
        **{f"self_attn.{name[0]}_conv1d": f"delta_net.convolution.{name}" for name in _HEADS},
        "self_attn.q_proj": "delta_net.query or latent.query",
        "self_attn.q_a_layernorm": "attention.query_norm",
        "self_attn.kv_a_layernorm": "attention.kv_norm",
        "self_attn.kv_b_proj": "attention.kv",
        "self_attn.f_a_proj": "delta_net.decay_down",
        "self_attn.f_b_proj": "delta_net.decay_up",
        "self_attn.g_a_proj": "delta_net.gate_down",
        "self_attn.g_b_proj": "delta_net.gate_up",
        "self_attn.b_proj": "delta_net.strength",
        "self_attn.A_log": "delta_net.rate_of_4_dims",
        "self_attn.dt_bias": "delta_net.step",
        "self_attn.o_norm": "delta_net.norm",
        "self_attn.o_proj": "delta_net.output or attention.output",
        **{name: own for name, own in MIXTRAL.block.items() if own.startswith("moe.")},
        "block_sparse_moe.gate.e_score_correction_bias": "moe.balance",
        **{f"block_sparse_moe.shared_experts.{n}_proj": f"moe.shared.{n}" for n in _MLP},
    },
    # transformers saves dense layers under the name of those with experts.
    other_names=(
        {
            "block": {
                **{f"mlp.{name}_proj": None for name in _MLP},
                **{f"block_sparse_moe.{name}_proj": f"mlp.{name}" for name in _MLP},
            },
        },
    ),
    has_empty_shared=True,
    predictors="num_nextn_predict_layers",
    code={
        "AutoConfig": "configuration_kimi.KimiLinearConfig",
        "AutoModel": "modeling_kimi.KimiLinearModel",
        "AutoModelForCausalLM": "modeling_kimi.KimiLinearForCausalLM",
    },
)
KIMI_FAMILIES = (KIMI_LINEAR,)
