"""Families with gated delta nets, and families whose shared experts have a gate."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megaframe.checkpoint.convert.huggingface.dense_families import QWEN3
from megaframe.checkpoint.convert.huggingface.key_pairs import (
    FULL,
    Key,
    Keys,
    Pair,
    check_layer_types,
)
from megaframe.checkpoint.convert.huggingface.key_types import Heads, Size, Texts
from megaframe.checkpoint.convert.huggingface.model_facts import DELTA_NET, Facts
from megaframe.checkpoint.convert.huggingface.moe_families import QWEN3_MOE, SharedWidth
from megaframe.checkpoint.convert.huggingface.rotary_keys import RotaryKeys, TextRotaryKeys

_LINEAR = "linear_attention"


@dataclass(frozen=True)
class LinearLayers(Key):
    """Which layers have a gated delta net; by default all but every fourth."""

    @property
    def types(self) -> Mapping[str, Any]:
        """The types of layers, and how many there are from one with attention to the next."""
        return {"layer_types": Texts, "full_attention_interval": Size}

    def read(self, config: Mapping[str, Any], facts: Facts) -> None:
        """Set the mixer of each layer."""
        layers, every = len(facts.layers), config.get("full_attention_interval") or 4
        kinds = config.get("layer_types")
        if kinds is None:
            kinds = [_LINEAR if (layer + 1) % every else FULL for layer in range(layers)]
        check_layer_types("layer_types", kinds, layers, (FULL, _LINEAR))
        mixers = [DELTA_NET if kind == _LINEAR else "attention" for kind in kinds]
        facts.set_layers("mixer.kind", mixers)

    def write(self, facts: Facts) -> Keys:
        """Return the type of each layer."""
        mixers = facts.list_values("mixer.kind")
        return {"layer_types": [_LINEAR if mixer == DELTA_NET else FULL for mixer in mixers]}


@dataclass(frozen=True)
class FullLayers(Key):
    """Layers of which none may slide."""

    @property
    def types(self) -> Mapping[str, Any]:
        """The types of layers."""
        return {"layer_types": Texts}

    def read(self, config: Mapping[str, Any], facts: Facts) -> None:
        """Refuse other types."""
        kinds = config.get("layer_types")
        if kinds is not None:
            check_layer_types("layer_types", kinds, len(facts.layers), (FULL,))
        facts.set("mixer.window", None)

    def write(self, facts: Facts) -> Keys:
        """Return nothing."""
        return {}


_SHARED_WIDTH = SharedWidth("shared_expert_intermediate_size", "moe_intermediate_size", True)
_SHARED = {
    **{f"mlp.shared_expert.{name}_proj": f"moe.shared.{name}" for name in ("gate", "up", "down")},
    "mlp.shared_expert_gate": "moe.shared_gate",
}
QWEN2_MOE = QWEN3_MOE.derive(
    "qwen2_moe",
    "Qwen2MoeForCausalLM",
    Pair("num_key_value_heads", "mixer.kv_heads", "value"),
    Pair("qkv_bias", "mixer.qkv_bias", default=True),
    FullLayers(),
    _SHARED_WIDTH,
    without=("sliding_window", "use_sliding_window", "attention_bias"),
    own={"mixer.qk_norm": None, "moe.shared_gate": True},
    fixed={"use_sliding_window": False, "attention_bias": False},
    neutral=("sliding_window",),
    block={"self_attn.q_norm": None, "self_attn.k_norm": None, **_SHARED},
)
_LINEAR_SIZES = (
    Pair("linear_num_key_heads", "mixer.key_heads", "value", type=Heads),
    Pair("linear_num_value_heads", "mixer.value_heads", "value", type=Heads),
    Pair("linear_key_head_dim", "mixer.key_dim", "value", type=Size),
    Pair("linear_value_head_dim", "mixer.value_dim", "value", type=Size),
    Pair("linear_conv_kernel_dim", "mixer.convolution", "value", type=Size),
)
QWEN3_NEXT = QWEN3_MOE.derive(
    "qwen3_next",
    "Qwen3NextForCausalLM",
    Pair("norm_topk_prob", "moe.normalise", default=True),
    Pair("num_key_value_heads", "mixer.kv_heads", "value"),
    Pair("head_dim", "mixer.head_dim", "value"),
    *_LINEAR_SIZES,
    LinearLayers(),
    _SHARED_WIDTH,
    RotaryKeys(share=0.25),
    without=("sliding_window", "use_sliding_window"),
    own={"mixer.output_gate": "element", "moe.shared_gate": True},
    block={
        "self_attn.q_proj": "attention.gated_query",
        "linear_attn.in_proj_qkvz": "delta_net.input",
        "linear_attn.in_proj_ba": "delta_net.small",
        "linear_attn.conv1d": "delta_net.convolution",
        "linear_attn.A_log": "delta_net.rate",
        "linear_attn.dt_bias": "delta_net.step",
        "linear_attn.norm": "delta_net.norm",
        "linear_attn.out_proj": "delta_net.output",
        **_SHARED,
    },
    neutral=("sliding_window", "use_sliding_window"),
    norm_offset=1.0,
    other_models=("mtp.",),
)
_DELTA_NET = {
    name: own for name, own in QWEN3_NEXT.block.items() if name.startswith("linear_attn.")
}
QWEN3_5 = QWEN3.derive(
    "qwen3_5_text",
    "Qwen3_5ForCausalLM",
    Pair("num_key_value_heads", "mixer.kv_heads", "value"),
    Pair("head_dim", "mixer.head_dim", "value"),
    *_LINEAR_SIZES,
    LinearLayers(),
    TextRotaryKeys(share=0.25),
    without=("sliding_window", "use_sliding_window"),
    own={"mixer.output_gate": "element"},
    fixed={"attention_bias": False},
    block={
        "self_attn.q_proj": "attention.gated_query",
        **_DELTA_NET,
        **{"linear_attn.in_proj_qkvz": None, "linear_attn.in_proj_ba": None},
        "linear_attn.in_proj_qkv": "delta_net.qkv",
        "linear_attn.in_proj_z": "delta_net.gate",
        "linear_attn.in_proj_b": "delta_net.strength",
        "linear_attn.in_proj_a": "delta_net.decay",
    },
    # Their layers compute in the type of the model, whatever this type says.
    neutral=("mamba_ssm_dtype", "mtp_num_hidden_layers", "mtp_use_dedicated_embeddings"),
    norm_offset=1.0,
    other_models=("mtp.",),
)
DELTA_NET_FAMILIES = (QWEN2_MOE, QWEN3_NEXT, QWEN3_5)
