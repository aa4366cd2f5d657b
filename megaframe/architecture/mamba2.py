"""Mamba-2 (Dao and Gu 2024, "Transformers are SSMs"): what a layer is made of."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from megaframe.architecture.causal_convolution import ConvolutionDescription
from megaframe.architecture.decay import DecayDescription
from megaframe.architecture.layer import (
    BatchedProduct,
    HasParameters,
    MixerDescription,
    SavedActivations,
)
from megaframe.architecture.linear import LinearSpec, Number
from megaframe.architecture.norm import NormDescription
from megaframe.architecture.spec import Constant, ParamSpec, count_copies
from megaframe.config.parallel import ParallelConfig
from megaframe.errors import join_or, list_divisors


@dataclass(frozen=True)
class SkipDescription:
    """A factor for each head of the inputs that are added to its outputs (`D` elsewhere).

    Attributes:
        shape: Groups of heads, which tensor ranks divide, and heads of each.
    """

    shape: tuple[int, int]

    def declare_parameters(self, name: str) -> Iterator[ParamSpec]:
        """Yield the spec of the factors."""
        axes = {0: "tensor"}
        yield ParamSpec(f"{name}.gain", self.shape, Constant(1.0), role="gain", axes=axes)


@dataclass(frozen=True)
class GroupNormDescription(NormDescription):
    """An RMSNorm of each group of heads with gains of its own, which tensor ranks divide.

    Attributes:
        groups: How many there are.
        eps: Added to the mean square.
    """

    groups: int
    eps: float

    def declare_parameters(self, name: str) -> Iterator[ParamSpec]:
        """Yield the spec of the gains."""
        shape, axes = (self.groups, self.width), {0: "tensor"}
        yield ParamSpec(f"{name}.gain", shape, Constant(1.0), role="gain", axes=axes)

    @property
    def saved_statistics(self) -> SavedActivations:
        """Nothing, because the layer computes its norm again."""
        return SavedActivations()


@dataclass(frozen=True, kw_only=True)
class Mamba2Description(MixerDescription):
    """A state for each head, which every token decays and adds to.

    One weight [groups, ..., hidden] makes of each group of heads the gates and the inputs of its
    heads, the keys and queries that they share (`B` and `C` elsewhere), and a step for each head,
    so that a tensor shard has whole groups. Neighbours of more tensor ranks than groups have the
    same one, as with few key and value heads, and each passes the states of some of its heads.

    Attributes:
        hidden: Width of the stream.
        heads: Heads, which are also the states.
        head_dim: Width of a head's input.
        groups: Groups of heads that share keys and queries.
        state_dim: Width of a key or query, and rows of a state.
        taps: Tokens that the convolution sees.
        convolution_bias: Whether its channels have biases.
        steps: The smallest and the largest step; None for no largest one.
        norm_place: Where the norm of a group's outputs is: after or before their gates, or nowhere.
        norm_eps: Of that norm.
        input_bias: Whether the first product has a bias.
        output_bias: Whether the second one has.
        chunk: Tokens that see each other through products.
        init_std: Standard deviation of the first matrix.
        output_std: That of the second one.
    """

    hidden: int
    heads: int
    head_dim: int
    groups: int
    state_dim: int
    taps: int
    convolution_bias: bool
    steps: tuple[float, float | None]
    norm_place: str
    norm_eps: float
    input_bias: bool
    output_bias: bool
    chunk: int
    init_std: float
    output_std: float

    name = "mamba2"
    context_kinds = ("ring", "all_to_all", "nested")

    def find_mistakes(self, parallel: ParallelConfig) -> Iterator[str]:
        """Yield a message if groups cannot have equally many heads, or if tensor ranks can neither
        divide nor share groups, and those of all mixers."""
        groups, tensor = self.groups, parallel.tensor
        if self.heads % groups:
            below = self.heads // groups * groups
            near = " or ".join(str(n) for n in (below, below + groups) if n)
            yield f"heads={self.heads} is no multiple of groups={groups}; use {near}"
        elif groups % tensor and (tensor % groups or self.heads % tensor):
            fits = [t for t in list_divisors(self.heads) if groups % t == 0 or t % groups == 0]
            near_ranks = [t for t in fits if t < tensor][-1:] + [t for t in fits if t > tensor][:1]
            yield (
                f"parallel.tensor={tensor} can neither divide groups={groups} of Mamba-2 heads nor "
                f"share them evenly among heads={self.heads}; use {join_or(near_ranks)}"
            )
        yield from super().find_mistakes(parallel)

    @property
    def shared_groups(self) -> int:
        """The groups."""
        return self.groups

    @property
    def per_group(self) -> int:
        """Heads of a group."""
        return max(1, self.heads // self.groups)

    @property
    def width(self) -> int:
        """Inputs, or outputs, of the heads of a group."""
        return self.per_group * self.head_dim

    @property
    def channels(self) -> int:
        """What the convolution sees of a group: inputs, key and query."""
        return self.width + 2 * self.state_dim

    @property
    def widths(self) -> tuple[int, ...]:
        """Of a group: gates, inputs, key, query and steps."""
        return (self.width, self.width, self.state_dim, self.state_dim, self.per_group)

    @property
    def input(self) -> LinearSpec:
        """From the stream to all that makes the groups."""
        outputs = (self.groups, sum(self.widths))
        product = LinearSpec(
            (self.hidden,),
            outputs,
            self.init_std,
            split=0,
            bias=self.input_bias,
            fused={1: self.widths},
            matrices=("gate", "input", "key", "query", "step"),
        )
        return self.adapt("input", product, "stream")

    @property
    def output(self) -> LinearSpec:
        """From the heads back to the stream."""
        inputs, stream = (self.heads, self.head_dim), (self.hidden,)
        product = LinearSpec(
            inputs, stream, self.output_std, split=len(stream), bias=self.output_bias
        )
        return self.adapt("output", product)

    @property
    def convolution(self) -> ConvolutionDescription:
        """That of inputs, keys and queries."""
        return ConvolutionDescription(
            (self.groups, self.channels, self.taps), self.convolution_bias
        )

    @property
    def decay(self) -> DecayDescription:
        """What makes the steps and the decays of the states."""
        return DecayDescription((self.groups, self.per_group))

    @property
    def skip(self) -> SkipDescription:
        """The factors of the inputs."""
        return SkipDescription((self.groups, self.per_group))

    @property
    def norm(self) -> GroupNormDescription | None:
        """Of the outputs of each group."""
        if self.norm_place == "none":
            return None
        return GroupNormDescription(self.width, self.groups, self.norm_eps)

    @property
    def parts(self) -> Mapping[str, HasParameters]:
        """The products, the convolution, the decays, the factors of inputs, and the norm."""
        norm = self.norm
        return {
            "input": self.input,
            "convolution": self.convolution,
            "decay": self.decay,
            "skip": self.skip,
            **({} if norm is None else {"norm": norm}),
            "output": self.output,
        }

    def count_saved(self, parallel: ParallelConfig, recompute: str) -> SavedActivations:
        """Return the result of the first product, and the input of the second one. All that is
        between them is computed again, but a mean square of a group that ranks share."""
        tensor = parallel.tensor
        results = self.input.results * count_copies(self.groups, tensor)
        statistics = tensor * (self.count_tensor_statistics(tensor) > 0)
        saved = SavedActivations(results + self.output.terms, statistics)
        return saved + self.count_saved_by_adapters(parallel)

    def count_tensor_statistics(self, tensor: Number) -> Number:
        """Return the squares of the outputs of each group, if ranks that share it normalise
        them."""
        return self.groups * (tensor > self.groups) * (self.norm is not None)

    def list_batched_products(self, seq: int) -> tuple[BatchedProduct, ...]:
        """Return those of the chunks of a sample: queries with keys, the scores with the inputs,
        what the inputs add to the states, and what queries read of them."""
        length = min(self.chunk, seq)
        chunks = -(-seq // length)
        groups, heads = chunks * self.groups, chunks * self.heads
        return (
            BatchedProduct(groups, length, length, self.state_dim, groups=self.groups),
            BatchedProduct(heads, length, self.head_dim, length),
            BatchedProduct(groups, self.state_dim, self.width, length),
            BatchedProduct(groups, length, self.width, self.state_dim),
        )

    @property
    def widest(self) -> int:
        """Half of what exists while the heads are computed again and differentiated: of each head
        25 tensors of inputs, four of pairs of tokens in a chunk, and four of states between chunks;
        and 14 of keys. It is within a tenth of what is measured in 16 bits."""
        states = 4 * self.state_dim * self.head_dim // self.chunk
        per_head = 25 * self.head_dim + 4 * self.chunk + states
        return (self.heads * per_head + self.groups * 14 * self.state_dim) // 2

    @property
    def passed_elements(self) -> int:
        """Those of a piece that has as many tokens as the convolution sees."""
        return self.count_passed(self.taps)

    def count_passed(self, tokens: int, tensor: int = 1) -> int:
        """Return a state and its decay, of each head, and the last tokens of a piece, which the
        convolution of the next piece sees."""
        states = self.heads * (self.state_dim * self.head_dim + 1)
        shared = 2 * self.state_dim * self.groups * count_copies(self.groups, tensor)
        return states + min(tokens, self.taps - 1) * (self.heads * self.head_dim + shared)
