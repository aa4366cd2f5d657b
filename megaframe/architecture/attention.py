"""Attention: what a layer with grouped key and value heads is made of, and how context ranks divide
it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar

from megaframe.architecture.layer import (
    BatchedProduct,
    HasParameters,
    MixerDescription,
    SavedActivations,
)
from megaframe.architecture.linear import LinearSpec, Number
from megaframe.architecture.norm import (
    LayerNormDescription,
    NormDescription,
    RMSNormDescription,
)
from megaframe.architecture.spec import Constant, Normal, ParamSpec
from megaframe.architecture.traffic import AxisTraffic
from megaframe.architecture.window import compute_mean_keys
from megaframe.config.parallel import ParallelConfig
from megaframe.errors import join_or, list_divisors

ALIBI_DIMS = {"exact": 2, "falcon": 1}
"""Dims that each form of ALiBi adds to queries and keys."""


def compute_alibi_slopes(heads: int, largest: float) -> list[float]:
    """Return the slopes of ALiBi's heads: of m heads, a power of 2, those of a geometric series
    that ends at 2^-largest; of more than m, then every second one of the series of 2m heads."""
    most = 1 << (heads.bit_length() - 1)
    slopes = [2.0 ** (-largest * (n + 1) / most) for n in range(most)]
    return slopes + [2.0 ** (-largest * (2 * n + 1) / (2 * most)) for n in range(heads - most)]


def count_exchanging_ranks(parallel: ParallelConfig) -> int:
    """Return how many neighbours on the context axis exchange heads for tokens.

    The groups of such neighbours form a ring.
    """
    if parallel.context_kind == "ring":
        return 1
    if parallel.context_kind == "all_to_all":
        return parallel.context
    return parallel.context_heads or 1


@dataclass(frozen=True, kw_only=True)
class SoftmaxAttention(MixerDescription):
    """What all attention with scores has.

    Attributes:
        hidden: Width of the stream.
        heads: Query heads.
        bias: Whether the output product has a bias.
        norm_eps: Of the norms inside the layer.
        score_scale: Factor of the scores.
        init_std: Standard deviation of initial matrices.
        output_std: That of the output matrix.
    """

    hidden: int
    heads: int
    bias: bool
    norm_eps: float
    score_scale: float
    init_std: float
    output_std: float

    name = "attention"
    has_scores = True
    context_kinds: ClassVar[tuple[str, ...]] = ("ring", "all_to_all", "nested")

    def find_mistakes(self, parallel: ParallelConfig) -> Iterator[str]:
        """Yield a message if tensor ranks cannot divide the heads, and one if context ranks cannot
        exchange tokens for heads."""
        yield from super().find_mistakes(parallel)
        yield from self._find_sharing_mistakes(parallel)

    def _find_sharing_mistakes(self, parallel: ParallelConfig) -> Iterator[str]:
        context, tensor, ranks = parallel.context, parallel.tensor, count_exchanging_ranks(parallel)
        nested = parallel.context_kind == "nested"
        if nested and (context % ranks or not 1 < ranks < context):
            return  # such a nesting is refused for any layer
        if self.can_share(tensor, ranks):
            return
        setting = f"parallel.context={ranks} of parallel.context_kind=all_to_all"
        if nested:
            setting = f"parallel.context_heads={ranks}"
        of_a_rank = "" if tensor == 1 else f" on each of parallel.tensor={tensor}"
        fits = [d for d in range(2, ranks * 2) if self.can_share(tensor, d)]
        if nested:
            fits = [d for d in fits if context % d == 0 and d < context]
        near = [d for d in fits if d < ranks][-1:] + [d for d in fits if d > ranks][:1]
        mend = "use " + (f"{join_or(near)}, or " if near else "") + "parallel.context_kind=ring"
        yield (
            f"{setting} can neither divide nor evenly share model.kv_heads={self.ring_groups} with "
            f"model.heads={self.heads}{of_a_rank}; {mend}"
        )

    def can_share(self, tensor: int, ranks: int) -> bool:
        """Return whether `ranks` ranks can have equally many of one tensor rank's query heads, with
        the key and value heads that belong to them. A `tensor` that does not divide the heads is
        reported elsewhere; here its quotient is rounded down, to at least one head."""
        heads = max(1, self.heads // tensor)
        groups = max(1, self.ring_groups // tensor)
        return heads % ranks == 0 and (groups % ranks == 0 or ranks % groups == 0)

    @property
    def rotary_dim(self) -> int:
        """Rotated dims of a head, 0 if nothing is rotated."""
        return 0 if self.rotary is None else self.rotary.width

    @property
    def query_width(self) -> int:
        """Width of a query or key head."""
        raise NotImplementedError

    @property
    def value_width(self) -> int:
        """Width of a value head."""
        raise NotImplementedError

    @property
    def output(self) -> LinearSpec:
        """From the heads back to the stream."""
        inputs = (self.heads, self.value_width)
        output = LinearSpec(inputs, (self.hidden,), self.output_std, split=1, bias=self.bias)
        return self.adapt("output", output)

    def list_batched_products(self, seq: int) -> tuple[BatchedProduct, ...]:
        """Return the scores, and the weighted sums of values."""
        share = compute_mean_keys(seq, self.window) / seq
        scores = BatchedProduct(self.heads, seq, seq, self.query_width, share)
        return scores, BatchedProduct(self.heads, seq, self.value_width, seq, share)

    @property
    def exchanged_elements(self) -> int:
        """Queries, keys, values and outputs."""
        return (self.heads + self.ring_groups) * self.ring_width

    @property
    def ring_groups(self) -> int:
        """Every head has its own keys and values."""
        return self.heads

    @property
    def ring_width(self) -> int:
        """Elements of a key head and its value head."""
        return self.query_width + self.value_width

    def count_saved_by_heads(self, parallel: ParallelConfig) -> SavedActivations:
        """Return what `attend_heads` keeps if every head has its own keys and values, and its
        inputs are no views: these and its output, with one log-sum-exp per head. Context ranks
        that exchange heads also keep the output before the exchange, and those of a ring what they
        pass on."""
        neighbours = count_exchanging_ranks(parallel)
        elements = 2 * self.ring_width
        if neighbours > 1:
            elements += self.value_width + self.ring_width * (parallel.context > neighbours)
        return SavedActivations(self.heads * elements, self.heads)

    def count_traffic(
        self, parallel: ParallelConfig, seq: int, near: int = 1
    ) -> Mapping[str, AxisTraffic]:
        """Return those of heads that are exchanged for tokens, and of keys and values that go
        around the ring: forward only the halves that ranks behind may see, and backward these with
        their gradients (`megaframe.context_parallel.ring`)."""
        context, tensor = parallel.context, parallel.tensor
        if context == 1:
            return {}
        neighbours = count_exchanging_ranks(parallel)
        ring = context // neighbours
        padded = -(-seq // (2 * context)) * 2 * context / seq
        groups = max(self.ring_groups, tensor)
        groups *= max(1, neighbours * tensor // groups)  # each neighbour has a head
        exchanged = padded * (self.heads + groups) * self.ring_width * (neighbours - 1) / neighbours
        around = padded * groups * self.ring_width * (ring - 1)
        keys, gradients = around * (1 - 0.5 / ring), 0.75 * around
        forward = exchanged + 0.75 * around
        return {"context": AxisTraffic(forward, exchanged + keys, wide_backward=gradients)}


@dataclass(frozen=True)
class SinksDescription:
    """One logit for each query head. It adds to the sum of exponentials of the head's scores, and
    has no value, so that a head can attend to nothing (gpt-oss, 2025).

    Attributes:
        heads: Query heads, which tensor ranks divide.
        std: Standard deviation of the initial logits.
    """

    heads: int
    std: float

    def declare_parameters(self, name: str) -> Iterator[ParamSpec]:
        """Yield the spec of the logits."""
        axes = {0: "tensor"}
        yield ParamSpec(f"{name}.logits", (self.heads,), Normal(self.std), role="bias", axes=axes)


@dataclass(frozen=True)
class WholeNormDescription(NormDescription):
    """An RMSNorm over several heads at once, which tensor ranks divide (OLMo 2, 2025).

    Attributes:
        heads: Query heads, or key heads.
        eps: Added to the mean square.
    """

    heads: int
    eps: float

    def declare_parameters(self, name: str) -> Iterator[ParamSpec]:
        """Yield the spec of the gain."""
        shape, axes = (self.heads, self.width // self.heads), {0: "tensor"}
        yield ParamSpec(f"{name}.gain", shape, Constant(1.0), role="gain", axes=axes)

    @property
    def saved_statistics(self) -> SavedActivations:
        """One number in at least fp32."""
        return SavedActivations(statistics=1)


@dataclass(frozen=True)
class PerHeadNormDescription(NormDescription):
    """A LayerNorm of each head with gains of its own, which tensor ranks divide (Command R+, 2024).

    Attributes:
        heads: Query heads, or key heads.
        eps: Added to the variance.
    """

    heads: int
    eps: float

    def declare_parameters(self, name: str) -> Iterator[ParamSpec]:
        """Yield the spec of the gains."""
        shape, axes = (self.heads, self.width), {0: "tensor"}
        yield ParamSpec(f"{name}.gain", shape, Constant(1.0), role="gain", axes=axes)

    @property
    def saved_statistics(self) -> SavedActivations:
        """Those of a LayerNorm for each head."""
        return SavedActivations(values=2 * self.heads)


@dataclass(frozen=True, kw_only=True)
class AttentionDescription(SoftmaxAttention):
    """Attention with grouped key and value heads (Ainslie et al. 2023).

    Queries, keys and values come from one weight [kv_heads, heads / kv_heads + 2, head_dim,
    hidden], in which each group has its query heads, its key head and its value head, so that a
    tensor shard has whole groups. If values have a width of their own, a group's rows are one dim.

    Attributes:
        kv_heads: Key and value heads, G.
        head_dim: Width of a query or key head.
        value_dim: Width of a value head.
        qk_norm: Whether each `head` of queries and keys is normalised, or the `whole` of a token's
            queries and that of its keys, or `none`; with `layernorm` and `layernorm_per_head` each
            head by a LayerNorm, whose gains all heads share or not, and with `l2` by an RMSNorm
            without gains.
        qkv_bias: Whether queries, keys and values have biases.
        norm_after_rotation: Whether the norms of queries and keys follow their rotation.
        value_norm: Whether each value head is divided by its root mean square.
        keys_as_values: Whether values are the keys before norms and rotation.
        softcap: Bound of the scores; None for no bound.
        has_sinks: Whether each query head has a learned logit in its softmax.
        alibi: Negative binary logarithm of ALiBi's smallest slope; None without ALiBi.
        alibi_form: `exact`, or `falcon`, which rounds what it adds to scores.
        output_gate: Whether the output is multiplied by a sigmoid for each `head` or for each
            `element` of it, or `none`.
        hands_keys: Whether later layers attend to its keys and values, too.
    """

    kv_heads: int
    head_dim: int
    value_dim: int
    qk_norm: str
    qkv_bias: bool
    norm_after_rotation: bool = False
    value_norm: bool = False
    keys_as_values: bool = False
    softcap: float | None = None
    has_sinks: bool = False
    alibi: float | None = None
    alibi_form: str = "exact"
    output_gate: str = "none"
    hands_keys: bool = False

    def find_mistakes(self, parallel: ParallelConfig) -> Iterator[str]:
        """Yield a message if tensor ranks can neither divide nor share key and value heads, or a
        key head would need the biases of several query heads, and those of all attention."""
        if self.alibi is not None and self.alibi_form == "falcon" and self.heads_per_group > 1:
            yield (
                f"alibi_form=falcon gives each key head biases of one query head, and kv_heads="
                f"{self.kv_heads} is not heads={self.heads}; use kv_heads={self.heads}, or "
                "alibi_form=exact"
            )
        groups, heads, tensor = self.kv_heads, self.heads, parallel.tensor
        if groups % tensor and (tensor % groups or heads % tensor):
            fits = [t for t in list_divisors(heads) if groups % t == 0 or t % groups == 0]
            near = [t for t in fits if t < tensor][-1:] + [t for t in fits if t > tensor][:1]
            yield (
                f"parallel.tensor={tensor} can neither divide model.kv_heads={groups} nor share "
                f"them evenly among model.heads={heads}; use {join_or(near)}"
            )
        yield from super().find_mistakes(parallel)

    @property
    def heads_per_group(self) -> int:
        """Query heads that share a key and value head."""
        return self.heads // self.kv_heads

    @property
    def query_width(self) -> int:
        """Width of a query or key head as attention has it."""
        return self.head_dim + self._added

    @property
    def _added(self) -> int:
        """Dims of each query and key head that no product computes."""
        return 0 if self.alibi is None else ALIBI_DIMS[self.alibi_form]

    @property
    def value_width(self) -> int:
        """Width of a value head."""
        return self.value_dim

    @property
    def group_widths(self) -> tuple[int, int, int]:
        """Of the queries of a group, of its key and of its value, as a product computes them."""
        value = 0 if self.keys_as_values else self.value_dim
        return self.heads_per_group * self.head_dim, self.head_dim, value

    @property
    def qkv(self) -> LinearSpec:
        """Queries, keys and values of all groups."""
        others = 1 if self.keys_as_values else 2
        group: tuple[int, ...] = (self.heads_per_group + others, self.head_dim)
        parts: tuple[int, ...] = (self.heads_per_group, *[1] * others)
        if self.value_dim != self.head_dim:
            group, parts = (sum(self.group_widths),), self.group_widths
        qkv = LinearSpec(
            (self.hidden,),
            (self.kv_heads, *group),
            self.init_std,
            split=0,
            bias=self.qkv_bias,
            fused={1: parts},
            matrices=("query", "key", "value")[: 1 + others],
        )
        return self.adapt("qkv", qkv, "stream")

    @property
    def qk_norms(self) -> Mapping[str, NormDescription]:
        """Of queries, and of keys."""
        names = ("query_norm", "key_norm")
        if self.qk_norm == "head":
            return dict.fromkeys(names, RMSNormDescription(self.head_dim, self.norm_eps))
        if self.qk_norm == "whole":
            heads = zip(names, (self.heads, self.kv_heads), strict=True)
            return {
                name: WholeNormDescription(number * self.head_dim, number, self.norm_eps)
                for name, number in heads
            }
        if self.qk_norm == "layernorm":
            return dict.fromkeys(names, LayerNormDescription(self.head_dim, self.norm_eps, True))
        if self.qk_norm == "layernorm_per_head":
            heads = zip(names, (self.heads, self.kv_heads), strict=True)
            return {
                name: PerHeadNormDescription(self.head_dim, number, self.norm_eps)
                for name, number in heads
            }
        return {}

    @property
    def gate_width(self) -> int:
        """Gates of a head, 0 without any."""
        return {"none": 0, "head": 1, "element": self.value_dim}[self.output_gate]

    @property
    def gate(self) -> LinearSpec | None:
        """From the layer's input to the gates of its output."""
        if not self.gate_width:
            return None
        outputs = (self.heads, self.gate_width)
        gate = LinearSpec((self.hidden,), outputs, self.init_std, split=0)
        return self.adapt("gate", gate, "stream")

    @property
    def sinks(self) -> SinksDescription | None:
        """The logits of heads that attend to nothing."""
        return SinksDescription(self.heads, self.init_std) if self.has_sinks else None

    @property
    def parts(self) -> Mapping[str, HasParameters]:
        """The products, the norms of queries and keys, and the sinks."""
        sinks, gate = self.sinks, self.gate
        parts: dict[str, HasParameters] = {"qkv": self.qkv, **self.qk_norms}
        if sinks is not None:
            parts["sinks"] = sinks
        if gate is not None:
            parts["gate"] = gate
        return {**parts, "output": self.output}

    def count_saved(self, parallel: ParallelConfig, recompute: str) -> SavedActivations:
        """Return the inputs of attention and its output, with one log-sum-exp per head.

        The output of the product before it is kept too where norms of queries and keys, or
        attention, use views of it, and rotated queries and keys where norms follow. With gates,
        these and the gated output are kept too.
        """
        tensor, sharing = parallel.tensor, count_exchanging_ranks(parallel)
        ring = parallel.context > sharing
        # ALiBi's queries and keys are new tensors, as rotated ones are.
        rotated = self.rotary is not None or self.alibi is not None
        normalised = self.qk_norm != "none"
        norms_views = normalised and not self.norm_after_rotation
        reads_views = norms_views or self.value_norm
        groups = max(self.kv_heads, tensor)
        queries, keys = self.heads * self.head_dim, groups * self.head_dim
        values, output = groups * self.value_dim, self.heads * self.value_dim
        # The queries of several groups are not contiguous.
        is_scattered = self.heads_per_group > 1 and groups > tensor
        scaled = self.query_scale is not None
        copies_queries = rotated or normalised or is_scattered or scaled
        if sharing > 1:  # exchanged tensors are new ones, and so are those that a ring passes on
            copies = max(1, sharing * tensor // groups)
            elements = queries + (keys + values) * copies * (1 + ring)
            keeps_product = reads_views
        elif ring:
            elements = queries * copies_queries + keys + values
            keeps_product = reads_views or not copies_queries
        else:
            elements = queries * copies_queries + keys * (rotated or normalised)
            elements += values * (rotated or self.value_norm)
            keeps_product = reads_views or not rotated
        # Summed over tensor ranks. With fewer groups than ranks, neighbours compute the same group.
        product = groups * sum(self.group_widths)
        elements += product * keeps_product + queries * (is_scattered and norms_views)
        elements += (queries + keys) * self.norm_after_rotation
        kept_keys = groups if sharing == 1 else groups * max(1, sharing * tensor // groups)
        kept_keys *= 1 + ring * (sharing > 1)
        elements += self._added * (self.heads + kept_keys)
        elements += output * (1 + (sharing > 1))  # before and after the exchange back
        if self.gate_width:
            elements += self.heads * self.gate_width + output
        # A statistic of each normalised head, or on each tensor rank two of all heads. Those of
        # LayerNorm are two values.
        of_heads = self.heads + groups
        norms = {"head": of_heads, "l2": of_heads, "whole": 2 * tensor}.get(self.qk_norm, 0)
        elements += 2 * of_heads * self.qk_norm.startswith("layernorm")
        statistics = self.heads + norms + groups * self.value_norm
        return SavedActivations(elements, statistics) + self.count_saved_by_adapters(parallel)

    def count_saved_for_weights(self, parallel: ParallelConfig, recompute: str) -> SavedActivations:
        """Return the inputs and output gradients of all products. The gates use the same rows as
        queries."""
        shared = self.hidden * (self.input_products - 1)
        return super().count_saved_for_weights(parallel, recompute) + SavedActivations(-shared)

    @property
    def input_products(self) -> int:
        """The queries, keys and values, and the gates."""
        return 2 if self.gate_width else 1

    def count_tensor_statistics(self, tensor: Number) -> Number:
        """Return the squares of queries and those of keys, if they are summed over all heads."""
        return 2 if self.qk_norm == "whole" else 0

    @property
    def ring_groups(self) -> int:
        """The key and value heads."""
        return self.kv_heads
