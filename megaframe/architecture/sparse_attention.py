"""Sparse attention (DeepSeek-V3.2, 2025): latent attention to the keys that an indexer chooses, its
own or that of an earlier layer, and what both are made of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from megaframe.architecture.attention import count_exchanging_ranks
from megaframe.architecture.layer import BatchedProduct, HasParameters, SavedActivations
from megaframe.architecture.linear import LinearSpec, TensorTraffic
from megaframe.architecture.mla import LatentAttentionDescription
from megaframe.architecture.norm import LayerNormDescription
from megaframe.architecture.traffic import AxisTraffic
from megaframe.config.parallel import ParallelConfig

INDEX_BYTES = 4
"""Bytes of the number of a chosen key."""
_NORM_EPS = 1e-6
"""Of the norm of index keys, in all published code."""


@dataclass(frozen=True, kw_only=True)
class IndexerDescription:
    """Scores each key for each query by a few heads, which share one key; the largest scores are
    those of the keys that attention sees. Every tensor rank scores for the queries of its own rows.

    Attributes:
        hidden: Width of the stream.
        query_rank: Width of the latent of the queries.
        heads: Query heads.
        head_dim: Width of a head.
        top_k: Number of keys that are chosen.
        loss: Weight of the loss that trains it; 0 if it is frozen.
        dense: Whether attention sees all keys all the same.
        init_std: Standard deviation of initial matrices.
    """

    hidden: int
    query_rank: int
    heads: int
    head_dim: int
    top_k: int
    loss: float
    dense: bool
    init_std: float

    @property
    def is_trained(self) -> bool:
        """Whether it has a loss."""
        return self.loss > 0

    @property
    def query(self) -> LinearSpec:
        """From the latent of the queries to the query heads."""
        return LinearSpec((self.query_rank,), (self.heads, self.head_dim), self.init_std)

    @property
    def key(self) -> LinearSpec:
        """From the stream to the key, and to the weights of the heads."""
        sizes = self.head_dim, self.heads
        matrices = "key", "weights"
        return LinearSpec(
            (self.hidden,), (sum(sizes),), self.init_std, fused={0: sizes}, matrices=matrices
        )

    @property
    def key_norm(self) -> LayerNormDescription:
        """Of the key."""
        return LayerNormDescription(self.head_dim, _NORM_EPS, True)

    @property
    def parts(self) -> Mapping[str, HasParameters]:
        """The products and the norm."""
        return {"query": self.query, "key": self.key, "key_norm": self.key_norm}

    def chooses(self, seq: int) -> bool:
        """Return whether tokens of a sample of this length see fewer keys than all before them."""
        return not self.dense and seq > self.top_k

    def count_chosen_bytes(self, seq: int) -> int:
        """Return the bytes of the numbers of the keys that a token of such a sample sees."""
        return INDEX_BYTES * self.top_k * self.chooses(seq)

    def count_choice_traffic(self, parallel: ParallelConfig, seq: int) -> AxisTraffic:
        """Return what ranks that exchange heads move because they need the choices of each other's
        tokens."""
        others = (count_exchanging_ranks(parallel) - 1) * parallel.tensor
        return AxisTraffic(integer_bytes=self.count_chosen_bytes(seq) * others)

    def list_batched_products(self, seq: int) -> tuple[BatchedProduct, ...]:
        """Return the scores, as often as they are computed: for the choice; and for the loss with
        their gradients, which a forward pass computes."""
        chooses, trained = self.chooses(seq), self.is_trained
        products = BatchedProduct(
            (chooses + 3 * trained) * self.heads, seq, seq, self.head_dim, differentiated=False
        )
        # The sums over heads have one gradient less, because that of ReLUs is no sum.
        sums = BatchedProduct(chooses + 2 * trained, seq, seq, self.heads, differentiated=False)
        return products, sums


@dataclass(frozen=True, kw_only=True)
class SparseAttentionDescription(LatentAttentionDescription):
    """Latent attention to the keys that an indexer chooses.

    Plain code computes the scores of all keys before a query, and hides those of the others.

    Attributes:
        indexer: Chooses them.
        query_rank: Width of the latent of the queries, from which those of the indexer come, too.
        hands_choice: Whether later layers attend to the same keys.
    """

    indexer: IndexerDescription
    query_rank: int
    hands_choice: bool = False

    keeps_normed_input = True

    @property
    def parts(self) -> Mapping[str, HasParameters]:
        """The parts of attention, and those of the indexer."""
        indexer = {f"indexer.{name}": part for name, part in self.indexer.parts.items()}
        return {**super().parts, **indexer}

    def list_batched_products(self, seq: int) -> tuple[BatchedProduct, ...]:
        """Return those of attention and of the indexer, and for its loss the scores of attention
        once more."""
        scores = BatchedProduct(
            self.heads * self.indexer.is_trained, seq, seq, self.query_width, differentiated=False
        )
        own = super().list_batched_products(seq)
        return *own, *self.indexer.list_batched_products(seq), scores

    @property
    def input_products(self) -> int:
        """`down`, and the indexer's if it is trained."""
        return 1 + self.indexer.is_trained

    @property
    def widest(self) -> int:
        """The products of the indexer's heads for some queries, in at least fp32."""
        return 2 * self.indexer.query.results

    @property
    def tensor_traffic(self) -> TensorTraffic:
        """That of attention, and the keys of the indexer with their gradients."""
        width = self.indexer.head_dim
        return super().tensor_traffic + TensorTraffic(width, width * self.indexer.is_trained, 0)

    def count_traffic(
        self, parallel: ParallelConfig, seq: int, near: int = 1
    ) -> Mapping[str, AxisTraffic]:
        """Return that of attention, and the keys of the indexer, and for its loss those of
        attention. Ranks that exchange heads also need the choices of each other's tokens."""
        indexer, others = self.indexer, parallel.context - 1
        traffic = super().count_traffic(parallel, seq, near)
        if not others:
            return traffic
        keys = others * parallel.tensor * indexer.head_dim
        scored = others * self.heads * self.query_width * indexer.is_trained
        more = AxisTraffic(keys + scored, keys * indexer.is_trained)
        more = more + indexer.count_choice_traffic(parallel, seq)
        return {"context": traffic["context"] + more}

    def count_gathered_bytes(self, seq: int, width: int) -> int:
        """Return those of the numbers of chosen keys, and for the loss those of the sums of
        heads."""
        chosen = self.indexer.count_chosen_bytes(seq)
        return chosen + 2 * max(4, width) * seq * self.indexer.is_trained

    def count_saved(self, parallel: ParallelConfig, recompute: str) -> SavedActivations:
        """Return what attention keeps, the normalised latent of queries, whatever is recomputed,
        and the numbers of the chosen keys. If the indexer is trained, also its key and weights
        before the norm, and all gradients of its loss."""
        indexer, tensor = self.indexer, parallel.tensor
        saved = super().count_saved(parallel, recompute)
        if recompute == "selective" and self.query_norm is not None:
            saved = saved + self.query_norm.saved
        if not indexer.dense:
            ranks = tensor * count_exchanging_ranks(parallel)
            saved = saved + SavedActivations(other_bytes=INDEX_BYTES * indexer.top_k * ranks)
        if not indexer.is_trained:
            return saved
        elements = indexer.key.results + indexer.query.results + indexer.heads
        # Each rank has gradients of the keys of whole samples, and of its rows' tables of rotation
        # a copy.
        elements += indexer.head_dim * tensor * parallel.context + self.rotary_dim * (tensor > 1)
        return saved + SavedActivations(elements) + indexer.key_norm.saved_statistics

    def count_saved_for_weights(self, parallel: ParallelConfig, recompute: str) -> SavedActivations:
        """Return the inputs and output gradients of all products that are trained. Those of the
        indexer multiply the same rows and latents as others."""
        indexer, saved = self.indexer, super().count_saved_for_weights(parallel, recompute)
        shared = self.query_rank
        if not indexer.is_trained:
            products = indexer.query, indexer.key
            shared = sum(product.count_kept_for_weights(parallel.tensor) for product in products)
        return saved + SavedActivations(-shared)


@dataclass(frozen=True, kw_only=True)
class SharedIndexerDescription(LatentAttentionDescription):
    """Latent attention to the keys that the indexer of an earlier layer has chosen (GLM-5.2).

    Attributes:
        indexer: That of the other layer.
        source: Number of that layer.
    """

    indexer: IndexerDescription
    source: int

    def count_traffic(
        self, parallel: ParallelConfig, seq: int, near: int = 1
    ) -> Mapping[str, AxisTraffic]:
        """Return that of attention, and the choices."""
        traffic = super().count_traffic(parallel, seq, near)
        choices = self.indexer.count_choice_traffic(parallel, seq)
        return {axis: moved + choices for axis, moved in traffic.items()}

    def count_gathered_bytes(self, seq: int, width: int) -> int:
        """Return those of the numbers of chosen keys."""
        return self.indexer.count_chosen_bytes(seq)

    def count_saved(self, parallel: ParallelConfig, recompute: str) -> SavedActivations:
        """Return what attention keeps, and the numbers of the chosen keys if they are gathered. A
        rank's own ones are kept for all layers together."""
        ranks, saved = (
            parallel.tensor * count_exchanging_ranks(parallel),
            super().count_saved(parallel, recompute),
        )
        if self.indexer.dense or ranks == 1:
            return saved
        return saved + SavedActivations(other_bytes=INDEX_BYTES * self.indexer.top_k * ranks)
