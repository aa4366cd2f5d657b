"""Families with sparse attention: DeepSeek-V3.2, and GLM-5, 5.1 and 5.2."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megaframe.checkpoint.convert.huggingface.key_pairs import (
    Key,
    Keys,
    Pair,
    check_layer_types,
    make_layer_kinds,
)
from megaframe.checkpoint.convert.huggingface.key_types import Count, Text, Texts
from megaframe.checkpoint.convert.huggingface.model_facts import Facts
from megaframe.checkpoint.convert.huggingface.moe_families import DEEPSEEK_V3, Groups, LatentWidths
from megaframe.errors import UserError

_INDEXED, _OWN, _SHARED = "indexed_attention", "full", "shared"


@dataclass(frozen=True)
class SameLayers(Key):
    """A list that says the same of all layers.

    Attributes:
        name: The key.
        value: What it says of each.
    """

    name: str
    value: str

    @property
    def types(self) -> Mapping[str, Any]:
        """The list."""
        return {self.name: Texts}

    def read(self, config: Mapping[str, Any], facts: Facts) -> None:
        """Refuse what is something else."""
        kinds = config.get(self.name)
        if kinds is not None:
            check_layer_types(self.name, kinds, len(facts.layers), (self.value,))

    def write(self, facts: Facts) -> Keys:
        """Return the list."""
        return {self.name: [self.value] * len(facts.layers)}


@dataclass(frozen=True)
class IndexerSharing(Key):
    """Whether layers have indexers of their own, or use the choice of the nearest before with one.

    In place of the list, older configs have a pattern or an interval: code gives a layer its own
    indexer if its number, less the offset, plus 1 is a multiple of the interval.

    Attributes:
        name: Of the list.
    """

    name: str

    @property
    def types(self) -> Mapping[str, Any]:
        """The list, and what stands in its place."""
        older = {"index_topk_freq": Count, "index_skip_topk_offset": Count}
        return {self.name: Texts, **older, "index_topk_pattern": Text}

    def read(self, config: Mapping[str, Any], facts: Facts) -> None:
        """Read it, and refuse a choice of a layer that there is not."""
        kinds, layers = config.get(self.name), len(facts.layers)
        if kinds is None:
            kinds = _list_indexers(config, layers)
        check_layer_types(self.name, kinds, layers, (_OWN, _SHARED))
        if kinds[0] == _SHARED:
            raise UserError(
                f"{self.name}: layer 0 is {_SHARED}, and no layer before it has an indexer; it "
                f"must be {_OWN}"
            )
        facts.set_layers("mixer.shared_indexer", [kind == _SHARED for kind in kinds])

    def write(self, facts: Facts) -> Keys:
        """Return the list."""
        shares = facts.list_values("mixer.shared_indexer")
        return {self.name: [_SHARED if each else _OWN for each in shares]}


def _list_indexers(config: Mapping[str, Any], layers: int) -> list[str]:
    pattern = config.get("index_topk_pattern")
    if pattern is not None:
        return [{"F": _OWN, "S": _SHARED}.get(kind, kind) for kind in pattern]
    interval, offset = config.get("index_topk_freq"), config.get("index_skip_topk_offset")
    interval, offset = max(1, 1 if interval is None else interval), 2 if offset is None else offset
    numbers = (max(layer - offset + 1, 0) for layer in range(layers))
    return [_SHARED if number % interval else _OWN for number in numbers]


DEEPSEEK_V32 = DEEPSEEK_V3.derive(
    "deepseek_v32",
    "DeepseekV32ForCausalLM",
    Pair("index_n_heads", "indexer.heads", "value"),
    Pair("index_head_dim", "indexer.head_dim", "value"),
    Pair("index_topk", "indexer.top_k", "value"),
    Pair("q_lora_rank", "latent.query_rank", "value"),
    Groups(needed=True, best=2),
    LatentWidths(unread_head=True),
    make_layer_kinds(3, "first_k_dense_replace"),
    SameLayers("layer_types", _INDEXED),
    fixed={"indexer_rope_interleave": False},
    aliases={"num_experts": "n_routed_experts"},
    block={
        "self_attn.q_proj": None,
        "self_attn.indexer.wq_b": "indexer.query",
        "self_attn.indexer.wk": "indexer.key",
        "self_attn.indexer.k_norm": "indexer.key_norm",
        "self_attn.indexer.weights_proj": "indexer.weights",
    },
    code={},
)
GLM_MOE_DSA = DEEPSEEK_V32.derive(
    "glm_moe_dsa",
    "GlmMoeDsaForCausalLM",
    Groups(best=2),
    IndexerSharing("indexer_types"),
    fixed={"indexer_rope_interleave": True},
    neutral=("index_share_for_mtp_iteration", "moe_router_dtype"),  # routers are in fp32 always
    interleaved_indexer=True,
)
SPARSE_FAMILIES = (DEEPSEEK_V32, GLM_MOE_DSA)
