"""Hunyuan: norms of queries and keys after their rotation, dense or with experts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megaframe.checkpoint.convert.huggingface.dense_families import LLAMA
from megaframe.checkpoint.convert.huggingface.key_pairs import Key, Keys, Pair
from megaframe.checkpoint.convert.huggingface.key_types import Size
from megaframe.checkpoint.convert.huggingface.model_facts import Facts
from megaframe.checkpoint.convert.huggingface.moe_families import (
    EXPERT_ALIASES,
    EXPERTS,
    SOFTMAX,
)
from megaframe.checkpoint.convert.huggingface.rotary_keys import AlphaRotaryKeys
from megaframe.errors import UserError

HUNYUAN = LLAMA.derive(
    "hunyuan_v1_dense",
    "HunYuanDenseV1ForCausalLM",
    AlphaRotaryKeys(),
    own={"mixer.qk_norm": "head", "mixer.norm_after_rotation": True},
    fixed={"mlp_bias": False},
    neutral=("eod_token_id",),
    block={
        "self_attn.query_layernorm": "attention.query_norm",
        "self_attn.key_layernorm": "attention.key_norm",
    },
)


@dataclass(frozen=True)
class UniformTopK(Key):
    """Number of experts of a token, or a list with one for each layer, which must be alike."""

    @property
    def types(self) -> Mapping[str, Any]:
        """The key."""
        return {"moe_topk": Size | list[Size]}

    @property
    def required(self) -> tuple[str, ...]:
        """The key."""
        return ("moe_topk",)

    def read(self, config: Mapping[str, Any], facts: Facts) -> None:
        """Set the number."""
        listed = config["moe_topk"]
        numbers = {*listed} if isinstance(listed, list) else {listed}
        if len(numbers) != 1:
            raise UserError(f"moe_topk={listed} is not supported, only the same in all layers")
        facts.set("moe.top_k", *numbers)

    def write(self, facts: Facts) -> Keys:
        """Return the number."""
        return {"moe_topk": facts.get("moe.top_k")}


HUNYUAN_MOE = HUNYUAN.derive(
    "hunyuan_v1_moe",
    "HunYuanMoEV1ForCausalLM",
    Pair("intermediate_size", "moe.ffn", "value"),
    Pair("num_experts", "moe.experts", "value"),
    UniformTopK(),
    own=SOFTMAX | {"moe.shared": 1},
    aliases={**EXPERT_ALIASES, "num_experts_per_tok": "moe_topk"},
    block={
        "mlp.gate.wg": "moe.router",
        **EXPERTS,
        **{f"mlp.shared_mlp.{name}_proj": f"moe.shared.{name}" for name in ("gate", "up", "down")},
    },
)
HUNYUAN_FAMILIES = (HUNYUAN, HUNYUAN_MOE)
