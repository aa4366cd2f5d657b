"""Llama 4 (Meta 2025): chunked attention in most layers, others whose queries and keys are not
rotated and whose queries grow with their positions, and experts whose inputs are scaled."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import Field

from megaframe.checkpoint.convert.huggingface.dense_families import LLAMA
from megaframe.checkpoint.convert.huggingface.key_pairs import (
    FULL,
    ExpertLayers,
    Keys,
    Pair,
    check_layer_types,
)
from megaframe.checkpoint.convert.huggingface.key_types import Counts, Size, Texts
from megaframe.checkpoint.convert.huggingface.layered_families import RotatedLayers
from megaframe.checkpoint.convert.huggingface.model_facts import Facts
from megaframe.checkpoint.convert.huggingface.moe_families import SIGMOID, TOP_K
from megaframe.checkpoint.convert.huggingface.rotary_keys import RotaryKeys
from megaframe.errors import UserError

_CHUNKED = "chunked_attention"
_LENGTH = 8192
"""Tokens of a chunk, and of a step of the factor of queries, of a config that does not say."""


@dataclass(frozen=True)
class ChunkedLayers(RotatedLayers):
    """Which layers rotate queries and keys, which have chunks, and what goes with either: norms of
    queries and keys after a rotation, and a factor of queries that are not rotated."""

    @property
    def types(self) -> Mapping[str, Any]:
        """The lists of layers, and the keys of chunks, norms and factors."""
        return {
            **super().types,
            "layer_types": Texts,
            **{"attention_chunk_size": Size, "floor_scale": Size, "use_qk_norm": bool},
            "attn_scale": Annotated[float, Field(gt=0)],
            "attn_temperature_tuning": bool | int,  # 4 in the first version of Scout
        }

    def read(self, config: Mapping[str, Any], facts: Facts) -> None:
        """Set what each layer has."""
        given = config.get("no_rope_layers") or None  # an empty list is as good as none
        if given is not None:  # and what is longer is cut off
            given = given[: len(facts.layers)]
        super().read({**config, "no_rope_layers": given}, facts)
        rotated = facts.list_values("mixer.rotary")
        kinds = config.get("layer_types")
        kinds = [_CHUNKED if has else FULL for has in rotated] if kinds is None else kinds
        check_layer_types("layer_types", kinds, len(facts.layers), (FULL, _CHUNKED))
        size, length = (config.get(key, _LENGTH) for key in ("attention_chunk_size", "floor_scale"))
        for key, value in (("attention_chunk_size", size), ("floor_scale", length)):
            if value is None:
                raise UserError(f"{key}=null is not supported, only a number of tokens")
        scale = {"rate": config.get("attn_scale", 0.1), "length": length, "first": 1}
        scale = {f"mixer.query_scale.{key}": value for key, value in scale.items()}
        has_norms, is_tuned = (
            config.get(key, True) for key in ("use_qk_norm", "attn_temperature_tuning")
        )
        for layer, kind, is_rotated in zip(facts.layers, kinds, rotated, strict=True):
            layer["mixer.attention_chunk"] = size if kind == _CHUNKED else None
            layer["mixer.qk_norm"] = "l2" if is_rotated and has_norms else False
            layer["mixer.norm_after_rotation"] = is_rotated and has_norms
            layer.update(scale if is_tuned and not is_rotated else {})

    def write(self, facts: Facts) -> Keys:
        """Return the lists, and the other keys as the first layer has them that has any."""
        chunks = facts.list_values("mixer.attention_chunk")
        rate, length = (facts.get(f"mixer.query_scale.{key}") for key in ("rate", "length"))
        return {
            **super().write(facts),
            "layer_types": [FULL if chunk is None else _CHUNKED for chunk in chunks],
            "attention_chunk_size": next((c for c in chunks if c is not None), _LENGTH),
            "use_qk_norm": "l2" in facts.list_values("mixer.qk_norm"),
            "attn_temperature_tuning": rate is not None,
            **{"attn_scale": rate or 0.1, "floor_scale": length or _LENGTH},
        }


def _find_experts(config: Mapping[str, Any], layers: int) -> list[bool]:
    step, listed = config.get("interleave_moe_layer_step") or 1, config.get("moe_layers")
    numbers = range(step - 1, layers, step) if listed is None else listed
    return [layer in numbers for layer in range(layers)]


def _state_experts(has_experts: Sequence[bool]) -> Keys:
    numbers = [layer for layer, has in enumerate(has_experts) if has]
    return {"moe_layers": numbers, "interleave_moe_layer_step": (numbers or [0])[0] + 1}


LLAMA4 = LLAMA.derive(
    "llama4_text",
    "Llama4ForCausalLM",
    Pair("intermediate_size", "moe.ffn", "value"),
    Pair("intermediate_size_mlp", "feed_forward.ffn", "value", otherwise="moe.ffn"),
    Pair("num_local_experts", "moe.experts", "value"),
    TOP_K,
    Pair("num_key_value_heads", "mixer.kv_heads", "value"),
    Pair("head_dim", "mixer.head_dim", "present"),
    RotaryKeys(base=5e5),
    ChunkedLayers(),
    ExpertLayers(
        (("moe_layers", Counts), ("interleave_moe_layer_step", Size)), _find_experts, _state_experts
    ),
    own=SIGMOID
    | {
        **{"moe.balance": "sequence", "moe.normalise": False, "moe.scale_inputs": True},
        "moe.shared": 1,
    },
    fixed={"mlp_bias": False},
    training=("router_aux_loss_coef", "router_jitter_noise"),
    neutral=("cache_implementation", "for_llm_compressor"),
    aliases={"num_experts": "num_local_experts"},
    block={
        **{f"mlp.{name}_proj": None for name in ("gate", "up", "down")},
        **{f"feed_forward.{name}_proj": f"mlp.{name}" for name in ("gate", "up", "down")},
        "feed_forward.router": "moe.router",
        "feed_forward.experts.gate_up_proj": "moe.all_experts.gate moe.all_experts.up",
        "feed_forward.experts.down_proj": "moe.all_experts.down",
        **{
            f"feed_forward.shared_expert.{name}_proj": f"moe.shared.{name}"
            for name in ("gate", "up", "down")
        },
    },
    transposed_experts=True,
    interleaved=True,
)
LLAMA4_FAMILIES = (LLAMA4,)
