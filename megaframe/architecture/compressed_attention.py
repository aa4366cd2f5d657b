"""Attention to one key for all heads and to compressed keys (DeepSeek-V4, 2026): what a layer is
made of."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from megaframe.architecture.attention import SinksDescription
from megaframe.architecture.layer import (
    BatchedProduct,
    HasParameters,
    MixerDescription,
    SavedActivations,
)
from megaframe.architecture.limits import Limit
from megaframe.architecture.linear import LinearSpec, Number, TensorTraffic
from megaframe.architecture.norm import RMSNormDescription
from megaframe.architecture.sparse_attention import INDEX_BYTES
from megaframe.architecture.spec import Constant, ParamSpec
from megaframe.architecture.traffic import AxisTraffic
from megaframe.architecture.window import compute_mean_keys
from megaframe.config.parallel import ParallelConfig

TILE_QUERIES = 128
"""Queries that are multiplied with the keys of their windows at once. More would multiply more keys
that windows hide, fewer would put compressed keys beside them more often."""


@dataclass(frozen=True)
class GroupProductsSpec(LinearSpec):
    """A product for each group of heads, of what these have made: a weight of the shape (groups,
    rank, inputs of a group). Tensor ranks divide the groups, and have the rows of all tokens."""

    @property
    def tensor_traffic(self) -> TensorTraffic:
        """Nothing."""
        return TensorTraffic(0, 0, 0)

    def count_kept_for_weights(self, tensor: int) -> Number:
        """Return the inputs of all groups, and the gradients of the outputs."""
        return self.results + self.outputs[0] * self.terms


@dataclass(frozen=True)
class PlaceBiasDescription:
    """What is added to the weights of the tokens of a window, by their places in it.

    Attributes:
        tokens: Of a window.
        width: Weights of a token.
    """

    tokens: int
    width: int

    def declare_parameters(self, name: str) -> Iterator[ParamSpec]:
        """Yield the spec of the biases, which are 0 at first."""
        yield ParamSpec(f"{name}.bias", (self.tokens, self.width), Constant(0.0), role="bias")


@dataclass(frozen=True, kw_only=True)
class CompressorDescription:
    """Makes one key of each window of tokens: a mean of what each token has, with a softmax over
    the tokens for each element, normalised. Tokens have two such parts if windows overlap, one for
    their own window and, first, one for the next.

    Attributes:
        hidden: Width of the stream.
        width: Of a key.
        tokens: Of a window.
        overlap: Whether the window before takes part in each key.
        norm_eps: Of the norm.
        init_std: Standard deviation of the initial matrices.
    """

    hidden: int
    width: int
    tokens: int
    overlap: bool
    norm_eps: float
    init_std: float

    @property
    def parts_width(self) -> int:
        """Width of all parts of a token."""
        return self.width * (1 + self.overlap)

    @property
    def reach(self) -> int:
        """Tokens before the last one of a window that take part in its key."""
        return self.tokens * (1 + self.overlap) - 1

    @property
    def product(self) -> LinearSpec:
        """From the stream to the parts, and to their weights; every tensor rank has its own
        rows."""
        outputs, fused = (2, self.parts_width), {0: (1, 1)}
        names = "key", "weights"
        return LinearSpec((self.hidden,), outputs, self.init_std, fused=fused, matrices=names)

    @property
    def places(self) -> PlaceBiasDescription:
        """What is added to the weights of tokens by their places."""
        return PlaceBiasDescription(self.tokens, self.parts_width)

    @property
    def norm(self) -> RMSNormDescription:
        """Of keys."""
        return RMSNormDescription(self.width, self.norm_eps)

    @property
    def parts(self) -> Mapping[str, HasParameters]:
        """The product, the biases of places, and the norm."""
        return {"product": self.product, "places": self.places, "norm": self.norm}

    def count_keys(self, tokens: int) -> int:
        """Return the places for keys of a piece of so many tokens: those of windows that end in it,
        of which there may be fewer."""
        return -(-tokens // self.tokens)

    def count_passed(self, tokens: int) -> int:
        """Return the elements that a piece of so many tokens sends for the windows of the next one,
        and its keys."""
        return min(tokens, self.reach) * self.product.results + self.count_keys(tokens) * self.width


@dataclass(frozen=True, kw_only=True)
class CompressedIndexerDescription:
    """Scores each compressed key for each query by a few heads, which share one compressed key of
    their own; the largest scores are those of the keys that attention sees. It is not trained.
    Every tensor rank scores for the queries of its own rows.

    Attributes:
        query_rank: Width of the latent of the queries.
        heads: Query heads.
        top_k: Number of keys that are chosen.
        compressor: Makes its keys.
    """

    query_rank: int
    heads: int
    top_k: int
    compressor: CompressorDescription

    @property
    def query(self) -> LinearSpec:
        """From the latent of the queries to the query heads."""
        outputs = self.heads, self.compressor.width
        return LinearSpec((self.query_rank,), outputs, self.compressor.init_std)

    @property
    def weights(self) -> LinearSpec:
        """From the stream to the weights of the heads."""
        return LinearSpec((self.compressor.hidden,), (self.heads,), self.compressor.init_std)

    @property
    def parts(self) -> Mapping[str, HasParameters]:
        """The products, and the parts of the compressor."""
        return {"query": self.query, "weights": self.weights, **self.compressor.parts}

    def chooses(self, keys: int) -> bool:
        """Return whether a query sees fewer than so many compressed keys."""
        return keys > self.top_k


@dataclass(frozen=True, kw_only=True)
class CompressedAttentionDescription(MixerDescription):
    """Attention whose heads share one key, which is its value, too. Queries come from a latent.
    Heads see the keys of a window, and compressed keys of all tokens before; each has a logit
    without a value. What is rotated of a value is turned back by the position of the query, so
    that outputs depend on distances alone.

    Every tensor rank has the keys of all tokens, and every context rank the compressed keys of
    whole samples; of a window before its pieces of a sample it is sent the keys.

    Attributes:
        hidden: Width of the stream.
        heads: Query heads.
        head_dim: Width of a head.
        query_rank: Width of the latent of the queries.
        output_groups: Groups of heads, each with a product of its own before the output's.
        output_rank: Width of what that makes.
        bias: Whether the output has a bias.
        norm_eps: Of the norms inside the layer.
        score_scale: Factor of the scores.
        init_std: Standard deviation of initial matrices.
        output_std: That of the output matrix.
        window: How many tokens a token sees, with itself.
        compressor: Makes compressed keys; None if there are none.
        indexer: Chooses compressed keys; None if all are seen.
    """

    hidden: int
    heads: int
    head_dim: int
    query_rank: int
    output_groups: int
    output_rank: int
    bias: bool
    norm_eps: float
    score_scale: float
    init_std: float
    output_std: float
    window: int
    compressor: CompressorDescription | None = None
    indexer: CompressedIndexerDescription | None = None

    name = "compressed_attention"
    context_kinds = ("ring", "all_to_all", "nested")
    mixes_pieces_alike = False
    keeps_normed_input = True

    @property
    def limits(self) -> tuple[Limit, ...]:
        """The groups of heads."""
        return (Limit("tensor", self.output_groups, f"output_groups={self.output_groups}"),)

    @property
    def down(self) -> LinearSpec:
        """From the stream to the latent of the queries, and to the key."""
        sizes = self.query_rank, self.head_dim
        down = LinearSpec(
            (self.hidden,),
            (sum(sizes),),
            self.init_std,
            fused={0: sizes},
            matrices=("query", "key"),
        )
        return self.adapt("down", down, "stream")

    @property
    def query_norm(self) -> RMSNormDescription:
        """Of the latent of the queries."""
        return RMSNormDescription(self.query_rank, self.norm_eps)

    @property
    def key_norm(self) -> RMSNormDescription:
        """Of the key."""
        return RMSNormDescription(self.head_dim, self.norm_eps)

    @property
    def query(self) -> LinearSpec:
        """The queries of all heads."""
        outputs = self.heads, self.head_dim
        query = LinearSpec((self.query_rank,), outputs, self.init_std, split=0)
        return self.adapt("query", query)

    @property
    def sinks(self) -> SinksDescription:
        """The logits without values."""
        return SinksDescription(self.heads, self.init_std)

    @property
    def groups(self) -> GroupProductsSpec:
        """From the heads of each group to what is made of them."""
        terms = self.heads // self.output_groups * self.head_dim
        return GroupProductsSpec(
            (terms,),
            (self.output_groups, self.output_rank),
            self.init_std,
            split=0,
            fused={0: (1,) * self.output_groups},
        )

    @property
    def output(self) -> LinearSpec:
        """From what is made of all groups back to the stream."""
        inputs = self.output_groups, self.output_rank
        output = LinearSpec(inputs, (self.hidden,), self.output_std, split=1, bias=self.bias)
        return self.adapt("output", output)

    @property
    def parts(self) -> Mapping[str, HasParameters]:
        """The products, the norms and the sinks of attention, and the parts of what compresses keys
        and of what chooses them."""
        parts: dict[str, HasParameters] = {
            "down": self.down,
            "query_norm": self.query_norm,
            "key_norm": self.key_norm,
            "query": self.query,
            "sinks": self.sinks,
        }
        if self.compressor is not None:
            inner = self.compressor.parts.items()
            parts |= {f"compressor.{name}": part for name, part in inner}
        if self.indexer is not None:
            inner = self.indexer.parts.items()
            parts |= {f"indexer.{name}": part for name, part in inner}
        return {**parts, "groups": self.groups, "output": self.output}

    @property
    def _trained(self) -> list[LinearSpec]:
        """The products that are trained."""
        compressor = [] if self.compressor is None else [self.compressor.product]
        return [self.down, *compressor, self.query, self.groups, self.output]

    def count_keys(self, seq: int) -> int:
        """Return the compressed keys of a sample of so many tokens."""
        return 0 if self.compressor is None else self.compressor.count_keys(seq)

    def chooses(self, keys: int) -> bool:
        """Return whether a query sees fewer than so many compressed keys."""
        return self.indexer is not None and self.indexer.chooses(keys)

    def list_batched_products(self, seq: int) -> tuple[BatchedProduct, ...]:
        """Return the scores and the sums of values of attention, and the scores of the indexer."""
        compressed, keys = self.count_keys(seq), round(self._count_multiplied(seq) / seq)
        share = (compute_mean_keys(seq, self.window) + compressed / 2) / keys
        scores = BatchedProduct(self.heads, seq, keys, self.head_dim, share)
        values = BatchedProduct(self.heads, seq, self.head_dim, keys, share)
        indexer = self.indexer
        if indexer is None or not indexer.chooses(compressed):
            return scores, values
        heads, width = indexer.heads, indexer.compressor.width
        of_heads = BatchedProduct(heads, seq, compressed, width, differentiated=False)
        sums = BatchedProduct(1, seq, compressed, heads, differentiated=False)
        return scores, values, of_heads, sums

    def _count_multiplied(self, seq: int) -> int:
        """Return the products of queries and keys of a head in a sample, tile by tile."""
        total = 0
        for start in range(0, seq, TILE_QUERIES):
            stop = min(start + TILE_QUERIES, seq)
            keys = stop - max(0, start + 1 - self.window) + self.count_keys(stop)
            total += (stop - start) * keys
        return total

    @property
    def input_products(self) -> int:
        """`down`, and that of what compresses keys."""
        return 1 + (self.compressor is not None)

    @property
    def tensor_gathers(self) -> int:
        """The key, and what is compressed."""
        compressed = 0 if self.compressor is None else self.compressor.product.results
        return self.head_dim + compressed

    @property
    def tensor_traffic(self) -> TensorTraffic:
        """That of all products, the keys, and what the indexer compresses."""
        indexer = self.indexer
        indexed = 0 if indexer is None else indexer.compressor.product.results
        return super().tensor_traffic + TensorTraffic(indexed, 0, 0)

    def count_gathered_bytes(self, seq: int, width: int) -> int:
        """Return those of the numbers of chosen keys."""
        if self.indexer is None or not self.chooses(self.count_keys(seq)):
            return 0
        return INDEX_BYTES * self.indexer.top_k

    @property
    def passed_elements(self) -> int:
        """Those of a long piece."""
        reach = 0 if self.compressor is None else self.compressor.reach
        return self.count_passed(max(self.window, reach))

    def count_passed(self, tokens: int, tensor: int = 1) -> int:
        """Return what a piece sends: the keys that the window of the next one sees, what that
        compresses of it, and compressed keys."""
        window = min(tokens, self.window - 1) * self.head_dim
        compressed = 0 if self.compressor is None else self.compressor.count_passed(tokens)
        return tensor * (window + compressed)

    def count_traffic(
        self, parallel: ParallelConfig, seq: int, near: int = 1
    ) -> Mapping[str, AxisTraffic]:
        """Return what pieces send, and what they send for the indexer, without gradients."""
        traffic = super().count_traffic(parallel, seq, near)
        if self.indexer is None or parallel.context == 1:
            return traffic
        context = parallel.context
        passed = self.indexer.compressor.count_passed(-(-seq // (2 * context)))
        share = 2 * context * (context - 1) / seq
        indexed = AxisTraffic(wide_forward=share * parallel.tensor * passed)
        return {"context": traffic["context"] + indexed}

    @property
    def widest(self) -> int:
        """The gradients of the outputs of heads, and of their queries."""
        return 2 * self.heads * self.head_dim

    def count_saved(self, parallel: ParallelConfig, recompute: str) -> SavedActivations:
        """Return the latents with the normalised one of queries, queries before and after they are
        normalised, outputs before and after they are turned back, what the groups make of them, the
        keys, what compressed keys are made of and these, and the numbers of chosen ones. Tensor
        ranks have the keys of all tokens."""
        heads, tensor = self.heads * self.head_dim, parallel.tensor
        turned = self.rotary is not None
        elements: Number = self.down.results + self.query_rank + self.output.terms
        elements += (3 + turned) * heads + tensor * self.head_dim
        other: Number = 0
        if self.compressor is not None:
            compressor = self.compressor
            elements += tensor * (compressor.product.results + compressor.width / compressor.tokens)
        if self.indexer is not None:
            other = INDEX_BYTES * self.indexer.top_k * tensor
        # Of both norms of latents, of the norm of each query head, and of its scores.
        saved = SavedActivations(elements, 2 + 2 * self.heads, other)
        return saved + self.count_saved_by_adapters(parallel)

    def count_saved_for_weights(self, parallel: ParallelConfig, recompute: str) -> SavedActivations:
        """Return the inputs and output gradients of all products that are trained, of which two
        multiply the layer's input."""
        kept = sum(linear.count_kept_for_weights(parallel.tensor) for linear in self._trained)
        adapted = super().count_saved_for_weights(parallel, recompute).values - sum(
            linear.count_kept_for_weights(parallel.tensor) for linear in self.linears
        )
        shared = self.hidden * (self.input_products - 1)
        return SavedActivations(kept + adapted - shared)
