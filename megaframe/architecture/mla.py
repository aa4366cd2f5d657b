"""Multi-head latent attention (DeepSeek-V2, 2024, section 2.1): what a layer is made of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from megaframe.architecture.attention import SoftmaxAttention
from megaframe.architecture.layer import HasParameters, SavedActivations
from megaframe.architecture.limits import Limit
from megaframe.architecture.linear import LinearSpec
from megaframe.architecture.norm import RMSNormDescription
from megaframe.config.parallel import ParallelConfig


@dataclass(frozen=True, kw_only=True)
class LatentAttentionDescription(SoftmaxAttention):
    """Attention whose queries, keys and values are computed from narrow latents.

    One weight `down` maps the stream to a latent of the queries (if there is a `query_rank`), a
    latent of the keys and values, and the rotated part of the keys, which all heads share. Every
    tensor rank has it whole and makes the latents of its own rows, so that what is gathered is the
    latents.

    Attributes:
        query_rank: Width of the latent of the queries; None if they come from the stream.
        kv_rank: Width of the latent of keys and values.
        head_dim: Width of the part of a query or key head that is not rotated.
        shared_dim: Width of the rest, which all heads have the same of a key, and which is rotated
            if anything is.
        value_dim: Width of a value head.
    """

    query_rank: int | None
    kv_rank: int
    head_dim: int
    shared_dim: int
    value_dim: int

    @property
    def limits(self) -> tuple[Limit, ...]:
        """The heads."""
        return (Limit("tensor", self.heads, f"model.heads={self.heads}"),)

    @property
    def query_width(self) -> int:
        """Width of a query or key head."""
        return self.shared_dim + self.head_dim

    @property
    def value_width(self) -> int:
        """Width of a value head."""
        return self.value_dim

    @property
    def latents(self) -> tuple[int, ...]:
        """The outputs of `down`: latent of the queries (if there is one), latent of keys and
        values, shared part of the keys."""
        rank = (self.query_rank,) if self.query_rank else ()
        return (*rank, self.kv_rank, self.shared_dim)

    @property
    def down(self) -> LinearSpec:
        """From the stream to the latents."""
        width = (sum(self.latents),)
        matrices = ("query", "kv", "shared_key")[-len(self.latents) :]
        fused = {0: self.latents}
        down = LinearSpec((self.hidden,), width, self.init_std, fused=fused, matrices=matrices)
        return self.adapt("down", down, "stream")

    @property
    def query(self) -> LinearSpec:
        """The queries of all heads, the part for the shared one first."""
        inputs = (self.query_rank or self.hidden,)
        query = LinearSpec(inputs, (self.heads, self.query_width), self.init_std, split=0)
        return self.adapt("query", query, "computed" if self.query_rank else "stream")

    @property
    def kv(self) -> LinearSpec:
        """The part of the keys that is not rotated, and the values, of all heads."""
        kv = LinearSpec(
            (self.kv_rank,),
            (self.heads, self.head_dim + self.value_dim),
            self.init_std,
            split=0,
            fused={1: (self.head_dim, self.value_dim)},
            matrices=("key", "value"),
        )
        return self.adapt("kv", kv, "computed")

    @property
    def query_norm(self) -> RMSNormDescription | None:
        """Of the latent of the queries."""
        rank = self.query_rank
        return None if rank is None else RMSNormDescription(rank, self.norm_eps)

    @property
    def kv_norm(self) -> RMSNormDescription:
        """Of the latent of keys and values."""
        return RMSNormDescription(self.kv_rank, self.norm_eps)

    @property
    def parts(self) -> Mapping[str, HasParameters]:
        """The products, and the norms of the latents."""
        norm = self.query_norm
        return {
            "down": self.down,
            **({} if norm is None else {"query_norm": norm}),
            "kv_norm": self.kv_norm,
            "query": self.query,
            "kv": self.kv,
            "output": self.output,
        }

    @property
    def tensor_gathers(self) -> int:
        """The shared part of the keys, which no product gathers."""
        return self.shared_dim

    def count_saved(self, parallel: ParallelConfig, recompute: str) -> SavedActivations:
        """Return the latents, what attention keeps, and unless they are recomputed the normalised
        latents with a statistic for each."""
        saved = self.count_saved_by_heads(parallel) + SavedActivations(sum(self.latents))
        saved = saved + self.count_saved_by_adapters(parallel)
        if recompute == "selective":
            return saved
        return sum((norm.saved for norm in self.linear_norms), saved)

    @property
    def linear_norms(self) -> tuple[RMSNormDescription, ...]:
        """The norms whose results only linears read, which can compute them again."""
        norm = self.query_norm
        return (self.kv_norm,) if norm is None else (norm, self.kv_norm)

    def count_saved_for_weights(self, parallel: ParallelConfig, recompute: str) -> SavedActivations:
        """Return the inputs and output gradients of all products. Queries without a latent use the
        same rows as `down`."""
        shared = self.hidden * (self.input_products - 1)
        return super().count_saved_for_weights(parallel, recompute) + SavedActivations(-shared)

    @property
    def input_products(self) -> int:
        """`down`, and the queries if they have no latent."""
        return 1 if self.query_rank else 2
