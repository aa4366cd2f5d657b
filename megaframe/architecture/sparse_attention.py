"""Sparse attention (DeepSeek-V3.2, 2025): latent attention to the keys that an indexer chooses, its
own or that of an earlier layer, and what both are made of; by keys and values of all heads, or by
the latents of chosen keys."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from megaframe.architecture.attention import count_exchanging_ranks
from megaframe.architecture.layer import BatchedProduct, HasParameters, SavedActivations
from megaframe.architecture.linear import LinearSpec, TensorTraffic
from megaframe.architecture.mla import LatentAttentionDescription
from megaframe.architecture.norm import LayerNormDescription, RMSNormDescription
from megaframe.architecture.traffic import AxisTraffic
from megaframe.architecture.window import compute_mean_keys
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

    def list_batched_products(self, seq: int, compared: int) -> tuple[BatchedProduct, ...]:
        """Return the scores, as often as they are computed: for the choice; and for the loss with
        their gradients, which a forward pass computes.

        Args:
            seq: Tokens of a sample.
            compared: Keys of each query that the loss compares.
        """
        chooses, trained, heads = self.chooses(seq), self.is_trained, self.heads
        shapes = (
            (chooses * heads, seq, self.head_dim),
            (3 * trained * heads, compared, self.head_dim),
            # The sums over heads have one gradient less, because that of ReLUs is no sum.
            (chooses, seq, heads),
            (2 * trained, compared, heads),
        )
        return tuple(
            BatchedProduct(number, seq, columns, terms, differentiated=False)
            for number, columns, terms in shapes
            if number
        )


@dataclass(frozen=True, kw_only=True)
class ChosenKeysDescription(LatentAttentionDescription):
    """Latent attention to the keys that an indexer chooses.

    Plain code computes the scores of all keys before a query, and hides those of the others. If the
    layer absorbs, queries are multiplied by the keys' part of `kv` and outputs by the values' part,
    so that attention reads the latents of chosen keys alone, once for all heads. Context ranks
    gather these latents, whatever else they do.

    Attributes:
        indexer: Chooses them.
        absorbs: Whether the layer absorbs where tokens see fewer keys than all before them.
    """

    indexer: IndexerDescription
    absorbs: bool = False

    @property
    def latent_width(self) -> int:
        """Elements of a token that heads attend to: the shared part of keys, and the latent."""
        return self.shared_dim + self.kv_rank

    def list_batched_products(self, seq: int) -> tuple[BatchedProduct, ...]:
        """Return the scores and the weighted sums, of all keys or of latents."""
        number = self.indexer.top_k
        if not (self.absorbs and self.indexer.chooses(seq)):
            return super().list_batched_products(seq)
        reach = min(number, self.window) if isinstance(self.window, int) else number
        share = compute_mean_keys(seq, reach) / number
        widths = (number, self.latent_width), (self.kv_rank, number)
        scores, sums = (
            BatchedProduct(self.heads, seq, outputs, terms, share, gathered=True)
            for outputs, terms in widths
        )
        return scores, sums

    @property
    def linear_norms(self) -> tuple[RMSNormDescription, ...]:
        """Those of latents, but not of latents that are gathered as they are."""
        return super().linear_norms[: -1 if self.absorbs else None]

    @property
    def widest(self) -> int:
        """What attention is made of: latents that are gathered for some queries are fewer."""
        return self.heads * self.latent_width * self.absorbs

    @property
    def tensor_traffic(self) -> TensorTraffic:
        """That of all products. Latents that attention reads are kept, and not gathered again for
        the gradient of `kv`."""
        return super().tensor_traffic + TensorTraffic(0, -self.kv_rank * self.absorbs, 0)

    @property
    def gathered_elements(self) -> int:
        """Shared keys and latents of whole samples, if the layer absorbs."""
        return self.latent_width * self.absorbs

    def count_traffic(
        self, parallel: ParallelConfig, seq: int, near: int = 1
    ) -> Mapping[str, AxisTraffic]:
        """Return that of attention, and the choices of tokens whose heads are exchanged; or what is
        gathered, with its gradients."""
        if parallel.context == 1:
            return {}
        if self.absorbs:
            latents = (parallel.context - 1) * parallel.tensor * self.latent_width
            return {"context": AxisTraffic(latents, latents)}
        others = (count_exchanging_ranks(parallel) - 1) * parallel.tensor
        choices = AxisTraffic(integer_bytes=self.indexer.count_chosen_bytes(seq) * others)
        return {"context": super().count_traffic(parallel, seq, near)["context"] + choices}

    def count_gathered_bytes(self, seq: int, width: int) -> int:
        """Return those of the numbers of chosen keys."""
        return self.indexer.count_chosen_bytes(seq)

    def count_saved_by_heads(self, parallel: ParallelConfig) -> SavedActivations:
        """Return what attention keeps: if it absorbs, queries before and after, outputs before and
        after, and on each rank the latents of whole samples."""
        if not self.absorbs:
            return super().count_saved_by_heads(parallel)
        elements = self.query_width + self.latent_width + self.kv_rank + self.value_width
        elements = self.heads * elements + self.latent_width * parallel.tensor * parallel.context
        return SavedActivations(elements, self.heads) + self.kv_norm.saved_statistics

    def count_saved_choice(self, parallel: ParallelConfig, *, own: bool) -> SavedActivations:
        """Return the numbers of chosen keys that are kept.

        Args:
            parallel: The layout.
            own: Whether those of a rank's own rows count.
        """
        ranks = parallel.tensor * (1 if self.absorbs else count_exchanging_ranks(parallel))
        # What a query does not see of them is marked, in a copy.
        if self.indexer.dense or (ranks == 1 and not (own or self.absorbs)):
            return SavedActivations()
        return SavedActivations(other_bytes=INDEX_BYTES * self.indexer.top_k * ranks)

    def count_saved_for_weights(self, parallel: ParallelConfig, recompute: str) -> SavedActivations:
        """Return the inputs and output gradients of all products. Those of an absorbed `kv` are
        queries and outputs before and after."""
        saved = super().count_saved_for_weights(parallel, recompute)
        if not self.absorbs:
            return saved
        elements = self.query_width + self.latent_width + self.kv_rank + self.value_width
        instead = self.heads * elements - self.kv.count_kept_for_weights(parallel.tensor)
        return saved + SavedActivations(instead)


@dataclass(frozen=True, kw_only=True)
class SparseAttentionDescription(ChosenKeysDescription):
    """Latent attention to the keys that an indexer of its own chooses.

    Attributes:
        query_rank: Width of the latent of the queries, from which those of the indexer come, too.
        hands_choice: Whether later layers attend to the same keys.
    """

    query_rank: int
    hands_choice: bool = False

    keeps_normed_input = True

    @property
    def parts(self) -> Mapping[str, HasParameters]:
        """The parts of attention, and those of the indexer."""
        indexer = {f"indexer.{name}": part for name, part in self.indexer.parts.items()}
        return {**super().parts, **indexer}

    def _count_compared(self, seq: int) -> int:
        """Return the keys of each query that the loss compares."""
        absorbs = self.absorbs and self.indexer.chooses(seq)
        return self.indexer.top_k if absorbs else seq

    def list_batched_products(self, seq: int) -> tuple[BatchedProduct, ...]:
        """Return those of attention and of the indexer, and for its loss the scores of attention
        once more."""
        compared, own = self._count_compared(seq), super().list_batched_products(seq)
        products = *own, *self.indexer.list_batched_products(seq, compared)
        if not self.indexer.is_trained:
            return products
        terms = own[0].terms
        return *products, BatchedProduct(self.heads, seq, compared, terms, differentiated=False)

    @property
    def input_products(self) -> int:
        """`down`, and the indexer's if it is trained."""
        return 1 + self.indexer.is_trained

    @property
    def widest(self) -> int:
        """The products of the indexer's heads for some queries, in at least fp32."""
        return max(super().widest, 2 * self.indexer.query.results)

    @property
    def tensor_traffic(self) -> TensorTraffic:
        """That of attention, and the keys of the indexer with their gradients."""
        width = self.indexer.head_dim
        return super().tensor_traffic + TensorTraffic(width, width * self.indexer.is_trained, 0)

    def count_traffic(
        self, parallel: ParallelConfig, seq: int, near: int = 1
    ) -> Mapping[str, AxisTraffic]:
        """Return that of attention, the keys of the indexer, and for its loss those of attention if
        they are not gathered already."""
        indexer, others = self.indexer, parallel.context - 1
        traffic = super().count_traffic(parallel, seq, near)
        if not others:
            return traffic
        keys = others * parallel.tensor * indexer.head_dim
        scored = others * self.heads * self.query_width * (indexer.is_trained and not self.absorbs)
        more = AxisTraffic(keys + scored, keys * indexer.is_trained)
        return {"context": traffic["context"] + more}

    def count_gathered_bytes(self, seq: int, width: int) -> int:
        """Return those of the numbers of chosen keys, and for the loss those of the sums of
        heads."""
        sums = 2 * max(4, width) * self._count_compared(seq) * self.indexer.is_trained
        return super().count_gathered_bytes(seq, width) + sums

    def count_saved(self, parallel: ParallelConfig, recompute: str) -> SavedActivations:
        """Return what attention keeps, the normalised latent of queries, whatever is recomputed,
        and the numbers of the chosen keys. If the indexer is trained, also its key and weights
        before the norm, and all gradients of its loss."""
        indexer, tensor = self.indexer, parallel.tensor
        saved = super().count_saved(parallel, recompute)
        if recompute == "selective" and self.query_norm is not None:
            saved = saved + self.query_norm.saved
        saved = saved + self.count_saved_choice(parallel, own=True)
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
class SharedIndexerDescription(ChosenKeysDescription):
    """Latent attention to the keys that the indexer of an earlier layer has chosen (GLM-5.2).

    Attributes:
        source: Number of that layer.
    """

    source: int

    def count_saved(self, parallel: ParallelConfig, recompute: str) -> SavedActivations:
        """Return what attention keeps, and the numbers of the chosen keys if they are gathered. A
        rank's own ones are kept for all layers together."""
        choice = self.count_saved_choice(parallel, own=False)
        return super().count_saved(parallel, recompute) + choice
