"""Families like Llama whose layers differ, or that have norms and factors in other places."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import Field

from megaframe.checkpoint.convert.huggingface.dense_families import LLAMA, NO_BIASES, QK_NORMS
from megaframe.checkpoint.convert.huggingface.key_pairs import (
    FULL,
    SLIDING,
    Key,
    Keys,
    LayerTypes,
    Pair,
    choose,
    slide_except,
)
from megaframe.checkpoint.convert.huggingface.key_types import Counts, Factor, Size
from megaframe.checkpoint.convert.huggingface.model_facts import Facts
from megaframe.checkpoint.convert.huggingface.rotary_keys import RotaryKeys, RotaryKeysOfTypes
from megaframe.errors import UserError


def _read_rope_types(config: Mapping[str, Any], layers: int) -> list[bool]:
    rotated, every = config.get("no_rope_layers"), config.get("no_rope_layer_interval") or 4
    if rotated is None:
        return [(layer + 1) % every != 0 for layer in range(layers)]
    if len(rotated) != layers:
        raise UserError(
            f"no_rope_layers has {len(rotated)} layers, and num_hidden_layers is {layers}"
        )
    return [bool(value) for value in rotated]


@dataclass(frozen=True)
class RotatedLayers(Key):
    """Which layers rotate queries and keys, as 0 and 1 for each."""

    @property
    def types(self) -> Mapping[str, Any]:
        """The list, and how many layers there are from one that does not to the next."""
        return {"no_rope_layers": Counts, "no_rope_layer_interval": Size}

    def read(self, config: Mapping[str, Any], facts: Facts) -> None:
        """Set for each layer whether it does."""
        facts.set_layers("mixer.rotary", _read_rope_types(config, len(facts.layers)))

    def write(self, facts: Facts) -> Keys:
        """Return the list."""
        return {"no_rope_layers": [int(bool(value)) for value in facts.list_values("mixer.rotary")]}


def _list_smollm_types(config: Mapping[str, Any], window: int | None) -> Sequence[str]:
    rotated = _read_rope_types(config, config["num_hidden_layers"])
    return [FULL if window is None or has else SLIDING for has in rotated]


SMOLLM3 = LLAMA.derive(
    "smollm3",
    "SmolLM3ForCausalLM",
    Pair("tie_word_embeddings", "tie_embeddings", default=True),
    Pair("num_key_value_heads", "mixer.kv_heads", "present"),
    RotaryKeys(base=2e6),
    RotatedLayers(),
    LayerTypes(_list_smollm_types, "use_sliding_window"),
    neutral=("max_window_layers",),
)
GEMMA = LLAMA.derive(
    "gemma",
    "GemmaForCausalLM",
    choose(
        "hidden_act",
        "feed_forward.activation",
        {"gelu_pytorch_tanh": "geglu", "gelu": "geglu"},
        default="gelu_pytorch_tanh",
    ),
    Pair("tie_word_embeddings", "tie_embeddings", default=True),
    Pair("num_key_value_heads", "mixer.kv_heads", "value"),
    Pair("head_dim", "mixer.head_dim", "value"),
    own={"embedding_scale": lambda facts: facts.get("hidden") ** 0.5},
    fixed={"use_bidirectional_attention": None, "mlp_bias": False},
    neutral=("hidden_activation",),
    norm_offset=1.0,
)
_SCALE_OF_WIDTH: dict[str, Any] = {
    "to_fact": lambda width: width**-0.5,
    "to_key": lambda scale: round(scale**-2),
    "type": Size,
}
"""Of a key that has the width of which scores are divided by the root."""
VAULT_GEMMA = GEMMA.derive(
    "vaultgemma",
    "VaultGemmaForCausalLM",
    choose(
        "hidden_activation",
        "feed_forward.activation",
        {"gelu_pytorch_tanh": "geglu"},
        default="gelu_pytorch_tanh",
    ),
    Pair("query_pre_attn_scalar", "mixer.score_scale", "value", **_SCALE_OF_WIDTH),
    Pair("attn_logit_softcapping", "mixer.softcap", "present"),
    Pair("final_logit_softcapping", "logit_softcap", "present"),
    LayerTypes(slide_except("", 2), need="present"),
    neutral=("hidden_act", "cache_implementation"),
    block={"post_attention_layernorm": None, "pre_feedforward_layernorm": "mlp_norm"},
)
GEMMA2 = VAULT_GEMMA.derive(
    "gemma2",
    "Gemma2ForCausalLM",
    own={"norms": "both"},
    block={
        "post_attention_layernorm": "attention_post_norm",
        "post_feedforward_layernorm": "mlp_post_norm",
    },
    neutral=("sliding_window_size",),
)
GEMMA3 = GEMMA2.derive(
    "gemma3_text",
    "Gemma3ForCausalLM",
    Pair("attn_logit_softcapping", "mixer.softcap"),
    Pair("final_logit_softcapping", "logit_softcap"),
    LayerTypes(
        slide_except("sliding_window_pattern", 6),
        need="present",
        more=(("sliding_window_pattern", Size),),
    ),
    RotaryKeysOfTypes(1e6, 1e4, "rope_local_base_freq"),
    own={"mixer.qk_norm": "head"},
    fixed={"use_bidirectional_attention": False},
    neutral=("_sliding_window_pattern",),
    block=QK_NORMS,
)
OLMO2 = LLAMA.derive(
    "olmo2",
    "Olmo2ForCausalLM",
    Pair("num_key_value_heads", "mixer.kv_heads"),
    own={"norms": "after", "mixer.qk_norm": "whole"},
    fixed={"mlp_bias": False},
    block={
        **QK_NORMS,
        "input_layernorm": None,
        "post_attention_layernorm": "attention_post_norm",
        "post_feedforward_layernorm": "mlp_post_norm",
    },
)
OLMO3 = OLMO2.derive(
    "olmo3",
    "Olmo3ForCausalLM",
    LayerTypes(slide_except("", 4), need="present"),
    RotaryKeysOfTypes(5e5, 5e5),
)
EXAONE4 = OLMO2.derive(
    "exaone4",
    "Exaone4ForCausalLM",
    Pair("num_key_value_heads", "mixer.kv_heads", "value"),
    LayerTypes(
        full=(("mixer.rotary", False),),
        need="present",
        full_if_sliding=True,
        needs_types=True,
    ),
    own={"mixer.qk_norm": "head"},
    fixed=NO_BIASES,
    neutral=("sliding_window_pattern",),
)


def _invert(value: float) -> float:
    return 1.0 / value


MULTIPLIERS = (
    Pair("embedding_multiplier", "embedding_scale", default=1.0, type=Factor),
    Pair("residual_multiplier", "residual_scale", default=1.0, type=Factor),
    Pair(
        "logits_scaling",
        "head_scale",
        default=1.0,
        to_fact=_invert,
        to_key=_invert,
        type=Factor,
        absent=1.0,
    ),
)
GRANITE = LLAMA.derive(
    "granite",
    "GraniteForCausalLM",
    *MULTIPLIERS,
    Pair("attention_multiplier", "mixer.score_scale", default=1.0, type=Factor),
    scales={"head.norm": "head_scale"},
)


@dataclass(frozen=True)
class LayerBases(Key):
    """The rotary base of each layer, 0 for one that rotates nothing."""

    @property
    def types(self) -> Mapping[str, Any]:
        """The list."""
        return {"layer_rope_theta": list[Annotated[float, Field(ge=0)]] | None}

    def read(self, config: Mapping[str, Any], facts: Facts) -> None:
        """Set the base of each layer."""
        bases = config.get("layer_rope_theta")
        if bases is None:
            return
        if len(bases) != len(facts.layers):
            raise UserError(
                f"layer_rope_theta has {len(bases)} layers, and num_hidden_layers is "
                f"{len(facts.layers)}"
            )
        facts.set_layers("mixer.rotary", [base > 0 for base in bases])
        facts.set_layers("mixer.rotary_base", [base or None for base in bases])

    def write(self, facts: Facts) -> Keys:
        """Return the list."""
        rotated = zip(*map(facts.list_values, ("mixer.rotary", "mixer.rotary_base")), strict=True)
        return {"layer_rope_theta": [base if rotary else 0.0 for rotary, base in rotated]}


GRANITE_SWA = GRANITE.derive(
    "granite_swa",
    "GraniteSWAForCausalLM",
    LayerTypes(slide_except("", 4, first=True), need="present"),
    Pair("tie_word_embeddings", "tie_embeddings", default=True),
    Pair("num_key_value_heads", "mixer.kv_heads", "value"),
    LayerBases(),
    own={"mixer.sinks": True},
    block={"self_attn.sinks": "attention.sinks"},
)
HYPERCLOVAX = GRANITE.derive(
    "hyperclovax",
    "HyperCLOVAXForCausalLM",
    Pair("attention_multiplier", "mixer.score_scale"),
    Pair("logits_scaling", "head_scale", default=1.0, type=Factor, absent=1.0),
    choose("use_post_norm", "norms", {True: "both", False: "before"}, default=True, type=bool),
    block={"post_norm1": "attention_post_norm", "post_norm2": "mlp_post_norm"},
)
LAYERED_FAMILIES = (
    *(SMOLLM3, GEMMA, VAULT_GEMMA, GEMMA2, GEMMA3, OLMO2, OLMO3, EXAONE4, GRANITE, GRANITE_SWA),
    HYPERCLOVAX,
)
