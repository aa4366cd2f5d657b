"""Families with sparse attention: DeepSeek-V3.2, and GLM-5 and 5.1."""

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

_INDEXED, _OWN = "indexed_attention", "full"


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
class IndexerSharing(SameLayers):
    """Whether layers have indexers of their own, as all must here.

    In place of the list, older configs have a pattern or an interval: code gives a layer its own
    indexer if its number, less the offset, plus 1 is a multiple of the interval.
    """

    @property
    def types(self) -> Mapping[str, Any]:
        """The list, and what stands in its place."""
        older = {"index_topk_freq": Count, "index_skip_topk_offset": Count}
        return {**super().types, **older, "index_topk_pattern": Text}

    def read(self, config: Mapping[str, Any], facts: Facts) -> None:
        """Refuse layers that use the choice of another one."""
        kinds, layers = config.get(self.name), len(facts.layers)
        if kinds is None:
            kinds = _list_indexers(config, layers)
        if len(kinds) == layers and "shared" in kinds:
            raise UserError(
                f"{self.name}: {kinds.count('shared')} of {layers} layers use the keys that an "
                "earlier one has chosen, which is not supported, only full for all layers"
            )
        check_layer_types(self.name, kinds, layers, (self.value,))


def _list_indexers(config: Mapping[str, Any], layers: int) -> list[str]:
    pattern = config.get("index_topk_pattern")
    if pattern is not None:
        return [{"F": _OWN, "S": "shared"}.get(kind, kind) for kind in pattern]
    interval, offset = config.get("index_topk_freq"), config.get("index_skip_topk_offset")
    interval, offset = max(1, 1 if interval is None else interval), 2 if offset is None else offset
    numbers = (max(layer - offset + 1, 0) for layer in range(layers))
    return ["shared" if number % interval else _OWN for number in numbers]


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
    IndexerSharing("indexer_types", _OWN),
    fixed={"indexer_rope_interleave": True},
    neutral=("index_share_for_mtp_iteration",),
    interleaved_indexer=True,
)
SPARSE_FAMILIES = (DEEPSEEK_V32, GLM_MOE_DSA)
