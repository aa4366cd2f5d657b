"""Attention to the keys and values of an earlier layer (Gemma 3n and 4)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from megaframe.architecture.attention import AttentionDescription, count_exchanging_ranks
from megaframe.architecture.layer import HasParameters, SavedActivations
from megaframe.architecture.linear import LinearSpec
from megaframe.architecture.norm import NormDescription
from megaframe.config.parallel import ParallelConfig


@dataclass(frozen=True, kw_only=True)
class SharedKeyAttentionDescription(AttentionDescription):
    """Attention whose keys and values another layer has computed, normalised and rotated.

    Attributes:
        source: Number of that layer.
    """

    source: int

    @property
    def query(self) -> LinearSpec:
        """The queries of all heads, which are its only product of the stream besides gates."""
        outputs = (self.heads, self.head_dim)
        query = LinearSpec((self.hidden,), outputs, self.init_std, split=0, bias=self.qkv_bias)
        return self.adapt("query", query, "stream")

    @property
    def qk_norms(self) -> Mapping[str, NormDescription]:
        """That of queries."""
        return {name: norm for name, norm in super().qk_norms.items() if name == "query_norm"}

    @property
    def parts(self) -> Mapping[str, HasParameters]:
        """The queries in place of queries, keys and values, and the rest."""
        rest = {name: part for name, part in super().parts.items() if name != "qkv"}
        return {"query": self.query, **rest}

    def count_saved(self, parallel: ParallelConfig, recompute: str) -> SavedActivations:
        """Return the queries as attention reads them, and before their norm, the output with one
        log-sum-exp per head, and of keys and values the copies that context ranks exchange or pass
        on: what they are copies of is kept for all layers together."""
        tensor, sharing = parallel.tensor, count_exchanging_ranks(parallel)
        ring, normalised = parallel.context > sharing, self.qk_norm != "none"
        queries, output = self.heads * self.head_dim, self.heads * self.value_dim
        elements = queries * (1 + normalised) + output * (1 + (sharing > 1))
        groups = max(self.kv_heads, tensor)
        groups *= max(1, sharing * tensor // groups) if sharing > 1 else 1
        elements += groups * (self.head_dim + self.value_dim) * ((sharing > 1) + ring)
        if self.gate_width:
            elements += self.heads * self.gate_width + output
        statistics = self.heads * (1 + normalised)
        return SavedActivations(elements, statistics) + self.count_saved_by_adapters(parallel)
