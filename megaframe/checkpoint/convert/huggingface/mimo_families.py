"""MiMo-V2-Flash (Xiaomi 2025): layers that slide have twice the key and value heads, and sinks."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megaframe.checkpoint.convert.huggingface.dense_families import LLAMA
from megaframe.checkpoint.convert.huggingface.key_pairs import (
    FULL,
    SLIDING,
    Key,
    Keys,
    LayerTypes,
    Pair,
    list_experts,
    make_layer_kinds,
)
from megaframe.checkpoint.convert.huggingface.key_types import Counts, Positive, Share, Size
from megaframe.checkpoint.convert.huggingface.model_facts import Facts
from megaframe.checkpoint.convert.huggingface.moe_families import (
    BIASED_ROUTER,
    EXPERTS,
    SIGMOID,
    TOP_K,
    WIDTH,
    Groups,
)
from megaframe.checkpoint.convert.huggingface.rotary_keys import RotaryKeysOfTypes
from megaframe.errors import UserError


def _list_types(config: Mapping[str, Any], window: int | None) -> Sequence[str]:
    layers = range(config["num_hidden_layers"])
    return [FULL if layer == 0 or (layer + 1) % 6 == 0 else SLIDING for layer in layers]


@dataclass(frozen=True)
class GroupedLayerTypes(LayerTypes):
    """Layers that slide, and the key and value heads of each. The window has a second name, under
    which it has one token less, and which wins."""

    @property
    def types(self) -> Mapping[str, Any]:
        """The window under both names, the types of layers, and the heads."""
        return {**super().types, "sliding_window_size": Size, "num_key_value_heads": Size}

    @property
    def required(self) -> Sequence[str]:
        """The heads."""
        return ("num_key_value_heads",)

    def read(self, config: Mapping[str, Any], facts: Facts) -> None:
        """Set the window of each layer, and its heads."""
        if (before := config.get("sliding_window_size")) is not None:
            config = {**config, "sliding_window": before + 1}
        super().read(config, facts)
        heads, windows = config["num_key_value_heads"], facts.list_values("mixer.window")
        facts.set_layers("mixer.kv_heads", [heads if w is None else 2 * heads for w in windows])

    def write(self, facts: Facts) -> Keys:
        """Return the window, the type of each layer, and the heads of those that do not slide."""
        keys, heads = super().write(facts), facts.list_values("mixer.kv_heads")
        sliding = keys["layer_types"][0] == SLIDING
        keys["num_key_value_heads"] = (heads[0] or 0) // (2 if sliding else 1)
        window = keys["sliding_window"]
        return {**keys, "sliding_window_size": None if window in (None, 1) else window - 1}


@dataclass(frozen=True)
class PublishedKeys(Key):
    """Keys that follow from others. Transformers does not read them; the publisher's code, vLLM and
    SGLang do."""

    @property
    def types(self) -> Mapping[str, Any]:
        """The keys."""
        return {
            **dict.fromkeys(("layernorm_epsilon", "rope_theta", "swa_rope_theta"), Positive),
            **{"hybrid_layer_pattern": Counts, "moe_layer_freq": Counts},
            **{"swa_num_attention_heads": Size, "swa_num_key_value_heads": Size},
            **{"swa_head_dim": Size, "swa_v_head_dim": Size, "partial_rotary_factor": Share},
        }

    def read(self, config: Mapping[str, Any], facts: Facts) -> None:
        """Raise `UserError` if one contradicts the facts, which other keys have set before."""
        share, shares = config.get("partial_rotary_factor"), _list_shares(facts)
        if share is not None and len(shares) > 1:
            raise UserError(
                f"partial_rotary_factor={share} is not supported where layers rotate "
                f"{' and '.join(map(str, shares))} of their heads: leave it out of config.json"
            )
        for key, expected in self.write(facts).items():
            value = config.get(key)
            if key == "partial_rotary_factor" and value is not None:  # as code rounds it
                head = facts.get("mixer.head_dim")
                value = int(head * value) / head
            if value is not None and value != expected:
                raise UserError(
                    f"{key}={reprlib.repr(config[key])} contradicts other keys, by which it is "
                    f"{reprlib.repr(expected)}; transformers computes what those say"
                )

    def write(self, facts: Facts) -> Keys:
        """Return the keys."""
        slides = [window is not None for window in facts.list_values("mixer.window")]
        shares = _list_shares(facts)
        full, sliding = (
            next((layer for layer, s in zip(facts.layers, slides, strict=True) if s is kind), {})
            for kind in (False, True)
        )
        sliding_keys = {
            "swa_num_attention_heads": sliding.get("mixer.heads"),
            "swa_num_key_value_heads": sliding.get("mixer.kv_heads"),
            "swa_head_dim": sliding.get("mixer.head_dim"),
            "swa_v_head_dim": sliding.get("mixer.v_head_dim"),
            "swa_rope_theta": sliding.get("mixer.rotary_base"),
        }
        keys = {
            "layernorm_epsilon": facts.get("norm_eps"),
            "rope_theta": full.get("mixer.rotary_base"),
            "partial_rotary_factor": shares[0] if len(shares) == 1 else None,
            "hybrid_layer_pattern": [int(s) for s in slides],
            "moe_layer_freq": [int(has) for has in list_experts(facts)],
            **sliding_keys,
        }
        return {key: value for key, value in keys.items() if value is not None}


def _list_shares(facts: Facts) -> list[float]:
    """Return the shares of heads that layers rotate, each once. Transformers takes one outside of
    the sections of types for those that have none, whose default is another."""
    return sorted({layer.get("mixer.rotary_fraction", 1.0) for layer in facts.layers})


MIMO_V2_FLASH = LLAMA.derive(
    "mimo_v2_flash",
    "MiMoV2FlashForCausalLM",
    Pair("rms_norm_eps", "norm_eps", default=1e-5),
    Pair("head_dim", "mixer.head_dim", "value"),
    Pair("v_head_dim", "mixer.v_head_dim", "value"),
    Pair("attention_bias", "mixer.qkv_bias", default=False),
    Pair("attention_value_scale", "value_scale", "present", default=1.0, type=Positive, absent=1.0),
    GroupedLayerTypes(_list_types, sliding=(("mixer.sinks", True),), need="present"),
    RotaryKeysOfTypes(5e6, 1e4, share=0.334, reads_outside=False),
    Pair("n_routed_experts", "moe.experts", "value"),
    TOP_K,
    WIDTH,
    Pair("routed_scaling_factor", "moe.scale", default=1.0),
    Pair("norm_topk_prob", "moe.normalise", default=True),
    Groups(best=2),
    make_layer_kinds(1),
    PublishedKeys(),
    own=SIGMOID,
    fixed={
        **{"mlp_bias": False, "n_shared_experts": None, "scoring_func": "sigmoid"},
        **{"topk_method": "noaux_tc", "add_swa_attention_sink_bias": True},
        "add_full_attention_sink_bias": False,
    },
    neutral=("hybrid_block_size", "attention_chunk_size"),
    aliases={"num_local_experts": "n_routed_experts"},
    block={"self_attn.attention_sink_bias": "attention.sinks", **BIASED_ROUTER, **EXPERTS},
    scales={"attention.value": "value_scale"},
    other_models=("model.mtp.",),
)
MIMO_FAMILIES = (MIMO_V2_FLASH,)
