"""Families with gated delta nets, and families whose shared experts have a gate."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
from megaframe.checkpoint.convert.huggingface.key_types import Flag, Heads, Size, Texts
from megaframe.checkpoint.convert.huggingface.layered_families import OLMO2
from megaframe.checkpoint.convert.huggingface.model_facts import DELTA_NET, Facts
from megaframe.checkpoint.convert.huggingface.moe_families import EXPERTS, QWEN3_MOE, SharedWidth
from megaframe.checkpoint.convert.huggingface.rotary_keys import (
    OptionalRotaryKeys,
    RotaryKeys,
    TextRotaryKeys,
)

LINEAR = "linear_attention"


@dataclass(frozen=True)
class LinearLayers(Key):
    """Which layers have a gated delta net; by default all but every fourth.

    Attributes:
        interval: The key of how many layers there are from one with attention to the next; empty if
            there is none, and the types must be given.
        linear: Facts of layers that have a delta net.
    """

    interval: str = "full_attention_interval"
    linear: tuple[tuple[str, Any], ...] = ()

    @property
    def types(self) -> Mapping[str, Any]:
        """The types of layers, and the interval."""
        return {"layer_types": Texts, **({self.interval: Size} if self.interval else {})}

    @property
    def required(self) -> Sequence[str]:
        """The types, if they are."""
        return () if self.interval else ("layer_types",)

    def read(self, config: Mapping[str, Any], facts: Facts) -> None:
        """Set the mixer of each layer."""
        layers, every = len(facts.layers), config.get(self.interval) or 4
        kinds = config.get("layer_types")
        if kinds is None:
            kinds = [LINEAR if (layer + 1) % every else FULL for layer in range(layers)]
        check_layer_types("layer_types", kinds, layers, (FULL, LINEAR))
        mixers = [DELTA_NET if kind == LINEAR else "attention" for kind in kinds]
        facts.set_layers("mixer.kind", mixers)
        for layer, mixer in zip(facts.layers, mixers, strict=True):
            layer.update(self.linear if mixer == DELTA_NET else ())

    def write(self, facts: Facts) -> Keys:
        """Return the type of each layer, and the interval if it says the same, by which SGLang
        goes."""
        mixers = facts.list_values("mixer.kind")
        is_full = [mixer != DELTA_NET for mixer in mixers]
        every = [*is_full, True].index(True) + 1
        regular = [(layer + 1) % every == 0 for layer in range(len(mixers))] == is_full
        interval = {self.interval: every} if self.interval and regular else {}
        return {"layer_types": [FULL if full else LINEAR for full in is_full], **interval}


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
_APART = {
    **{"linear_attn.in_proj_qkvz": None, "linear_attn.in_proj_ba": None},
    "linear_attn.in_proj_qkv": "delta_net.qkv",
    "linear_attn.in_proj_z": "delta_net.gate",
    "linear_attn.in_proj_b": "delta_net.strength",
    "linear_attn.in_proj_a": "delta_net.decay",
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
        **_APART,
    },
    # Their layers compute in the type of the model, whatever this type says.
    neutral=("mamba_ssm_dtype", "mtp_num_hidden_layers", "mtp_use_dedicated_embeddings"),
    norm_offset=1.0,
    other_models=("mtp.",),
)
QWEN3_5_MOE = QWEN3_NEXT.derive(
    "qwen3_5_moe_text",
    "Qwen3_5MoeForCausalLM",
    TextRotaryKeys(share=0.25),
    without=("norm_topk_prob", "mlp_only_layers", "decoder_sparse_step", "intermediate_size"),
    fixed={"attention_bias": False, "mlp_only_layers": []},
    neutral=QWEN3_5.neutral,
    block={
        **_APART,
        **dict.fromkeys((*EXPERTS, "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")),
        "mlp.experts.gate_up_proj": "moe.all_experts.gate moe.all_experts.up",
        "mlp.experts.down_proj": "moe.all_experts.down",
    },
    other_names=(
        {
            "block": {
                **{"mlp.experts.gate_up_proj": None, "mlp.experts.down_proj": None},
                **EXPERTS,
            },
        },
    ),
)
_HEADS = ("query", "key", "value")
OLMO_HYBRID = OLMO2.derive(
    "olmo_hybrid",
    "OlmoHybridForCausalLM",
    *_LINEAR_SIZES,
    Pair(
        "linear_allow_neg_eigval",
        "mixer.strongest",
        default=True,
        to_fact=lambda has: 2.0 if has else 1.0,
        to_key=lambda strongest: strongest == 2.0,
        type=Flag,
    ),
    LinearLayers("", (("norms", "before"),)),
    OptionalRotaryKeys(),
    without=("head_dim",),
    own={"mixer.norm_eps": 1e-5},
    neutral=(
        *("linear_a_log_min", "linear_a_log_max", "linear_dt_min", "linear_dt_max"),
        "linear_dt_init_floor",
    ),
    block={
        "attention_layer_norm": "attention_norm",
        "feedforward_layer_norm": "mlp_norm",
        **{f"linear_attn.{name[0]}_proj": f"delta_net.{name}" for name in _HEADS},
        **{f"linear_attn.{name[0]}_conv1d": f"delta_net.convolution.{name}" for name in _HEADS},
        "linear_attn.g_proj": "delta_net.gate",
        "linear_attn.b_proj": "delta_net.strength",
        "linear_attn.a_proj": "delta_net.decay",
        "linear_attn.A_log": "delta_net.rate",
        "linear_attn.dt_bias": "delta_net.step",
        "linear_attn.o_norm": "delta_net.norm",
        "linear_attn.o_proj": "delta_net.output",
    },
    # transformers saves the norm after attention under the name of one before an MLP.
    other_names=(
        {
            "block": {
                "post_attention_layernorm": None,
                "feedforward_layer_norm": "mlp_norm or attention_post_norm",
            },
        },
    ),
    other_models=("mtp.",),
)
DELTA_NET_FAMILIES = (QWEN2_MOE, QWEN3_NEXT, QWEN3_5, QWEN3_5_MOE, OLMO_HYBRID)
