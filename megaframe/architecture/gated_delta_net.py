"""Gated delta net (Yang et al. 2024, "Gated Delta Networks", as Qwen3-Next has it), and Kimi delta
attention (Kimi Linear 2025), whose keys decay by channels: what a layer is made of."""

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
from megaframe.architecture.limits import Limit
from megaframe.architecture.linear import LinearSpec
from megaframe.architecture.norm import RMSNormDescription
from megaframe.config.parallel import ParallelConfig


@dataclass(frozen=True, kw_only=True)
class GatedDeltaNetDescription(MixerDescription):
    """A state for each value head, which every token decays and corrects.

    One weight [key_heads, ..., hidden] makes of each key head the query, the key, and of its value
    heads the values, the gates of the outputs, the strengths of corrections and the decays, so
    that a tensor shard has whole groups. Decays of channels, and gates, may come from latents of
    the stream instead, which every tensor rank makes of its own rows.

    Attributes:
        hidden: Width of the stream.
        key_heads: Heads of queries and keys, G.
        value_heads: Heads of values, and states; a multiple.
        key_dim: Width of a query or key head, K.
        value_dim: Width of a value head, V.
        taps: Tokens that the convolution sees.
        chunk: Tokens that see each other through products.
        strongest: Largest strength of a correction.
        norm_eps: Of the norm of each value head's output.
        init_std: Standard deviation of the first matrix.
        output_std: That of the second one.
        decay_rank: Width of the latent of the decays of channels; 0 for decays of heads.
        gate_rank: Width of the latent of the gates; 0 for gates from the stream.
        gate_function: `silu` or `sigmoid` of the gates.
    """

    hidden: int
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    taps: int
    chunk: int
    strongest: float
    norm_eps: float
    init_std: float
    output_std: float
    decay_rank: int = 0
    gate_rank: int = 0
    gate_function: str = "silu"

    name = "delta_net"
    context_kinds = ("ring", "all_to_all", "nested")
    mixes_pieces_alike = False

    @property
    def limits(self) -> tuple[Limit, ...]:
        """The key heads, with their value heads."""
        return (Limit("tensor", self.key_heads, f"key_heads={self.key_heads}"),)

    def find_mistakes(self, parallel: ParallelConfig) -> Iterator[str]:
        """Yield a message if key heads cannot have equally many value heads, and those of all
        mixers."""
        heads, groups = self.value_heads, self.key_heads
        if heads % groups:
            below = heads // groups * groups
            near = " or ".join(str(n) for n in (below, below + groups) if n)
            yield f"value_heads={heads} is no multiple of key_heads={groups}; use {near}"
        yield from super().find_mistakes(parallel)

    @property
    def per_group(self) -> int:
        """Value heads of a key head."""
        return max(1, self.value_heads // self.key_heads)

    @property
    def channels(self) -> int:
        """What the convolution sees of a key head: query, key and values."""
        return 2 * self.key_dim + self.per_group * self.value_dim

    @property
    def widths(self) -> tuple[int, ...]:
        """Of what the stream makes of a key head: query, key, values, gates, strengths and decays;
        0 for what comes from a latent."""
        values = self.per_group * self.value_dim
        gates, decays = values * (not self.gate_rank), self.per_group * (not self.decay_rank)
        return (self.key_dim, self.key_dim, values, gates, self.per_group, decays)

    @property
    def input(self) -> LinearSpec:
        """From the stream to all that makes the heads."""
        outputs = (self.key_heads, sum(self.widths))
        names = ("query", "key", "value", "gate", "strength", "decay")
        widths = {n: width for n, width in zip(names, self.widths, strict=True) if width}
        product = LinearSpec(
            (self.hidden,),
            outputs,
            self.init_std,
            split=0,
            fused={1: tuple(widths.values())},
            matrices=tuple(widths),
        )
        return self.adapt("input", product, "stream")

    @property
    def latents(self) -> Mapping[str, tuple[int, int]]:
        """The width of each latent, and what a key head has of it."""
        heads = {
            "decay_up": (self.decay_rank, self.per_group * self.key_dim),
            "gate_up": (self.gate_rank, self.per_group * self.value_dim),
        }
        return {name: (rank, width) for name, (rank, width) in heads.items() if rank}

    @property
    def down(self) -> LinearSpec:
        """From the stream to the latents."""
        ranks = tuple(rank for rank, _ in self.latents.values())
        fused, names = {0: ranks}, tuple(self.latents)
        product = LinearSpec(
            (self.hidden,), (sum(ranks),), self.init_std, fused=fused, matrices=names
        )
        return self.adapt("down", product, "stream")

    @property
    def ups(self) -> Mapping[str, LinearSpec]:
        """From the latents to the decays of channels, and to the gates."""
        return {
            name: self.adapt(
                name, LinearSpec((rank,), (self.key_heads, width), self.init_std, split=0)
            )
            for name, (rank, width) in self.latents.items()
        }

    @property
    def output(self) -> LinearSpec:
        """From the heads back to the stream."""
        inputs = (self.key_heads, self.per_group * self.value_dim)
        output = LinearSpec(inputs, (self.hidden,), self.output_std, split=1)
        return self.adapt("output", output)

    @property
    def convolution(self) -> ConvolutionDescription:
        """That of queries, keys and values."""
        return ConvolutionDescription((self.key_heads, self.channels, self.taps))

    @property
    def decay(self) -> DecayDescription:
        """What makes the decays of the states."""
        channels = (self.key_dim,) if self.decay_rank else ()
        return DecayDescription((self.key_heads, self.per_group, *channels))

    @property
    def norm(self) -> RMSNormDescription:
        """Of the output of each value head."""
        return RMSNormDescription(self.value_dim, self.norm_eps)

    @property
    def parts(self) -> Mapping[str, HasParameters]:
        """The products, the convolution, the decays, and the norm of outputs."""
        latents = {"down": self.down, **self.ups} if self.latents else {}
        return {
            "input": self.input,
            **latents,
            "convolution": self.convolution,
            "decay": self.decay,
            "norm": self.norm,
            "output": self.output,
        }

    def count_saved(self, parallel: ParallelConfig, recompute: str) -> SavedActivations:
        """Return the results of the first products, and the input of the last one. All that is
        between them is computed again."""
        latents = [self.down, *self.ups.values()] if self.latents else []
        made = sum(product.results for product in (self.input, *latents))
        return SavedActivations(made + self.output.terms) + self.count_saved_by_adapters(parallel)

    def count_saved_for_weights(self, parallel: ParallelConfig, recompute: str) -> SavedActivations:
        """Return the inputs and output gradients of all products, of which `down` uses the same
        rows as the first one."""
        shared = self.hidden * (self.input_products - 1)
        return super().count_saved_for_weights(parallel, recompute) + SavedActivations(-shared)

    @property
    def input_products(self) -> int:
        """The first one, and that of the latents."""
        return 2 if self.latents else 1

    def list_batched_products(self, seq: int) -> tuple[BatchedProduct, ...]:
        """Return those of the chunks of a sample: queries and keys with keys, the corrections that
        tokens of a chunk make to each other's, what they do to the state, and what queries and
        corrections read of it; and those of the states from chunk to chunk."""
        length = min(self.chunk, seq)
        chunks = -(-seq // length)
        groups, heads = chunks * self.key_heads, chunks * self.value_heads
        key_dim, value_dim = self.key_dim, self.value_dim
        read = BatchedProduct(heads, length, value_dim, key_dim)
        meetings = [BatchedProduct(2 * groups, length, length, key_dim)]
        if self.decay_rank:  # the halves of blocks of two tokens, of four, and so on
            halves = [1 << level for level in range((length - 1).bit_length())]
            padded = 2 * halves[-1] if halves else 1
            meetings = [
                BatchedProduct(2 * heads * padded // (2 * half), half, half, key_dim)
                for half in halves
            ]
        return (
            *meetings,
            BatchedProduct(heads, length, key_dim + value_dim, length),
            BatchedProduct(heads, key_dim, key_dim + value_dim, length),
            BatchedProduct(heads - self.value_heads, key_dim, value_dim, key_dim),
            *(read, read),
            BatchedProduct(heads, length, value_dim, length),
        )

    @property
    def widest(self) -> int:
        """Half of what exists while the heads are computed again and differentiated: 12 tensors of
        keys; of each value head four of keys, ten of values, eight of pairs of tokens in a chunk,
        and three of states between chunks. Where channels decay, four more of keys for each size of
        blocks, and two. It is within a sixth of what is measured."""
        key_dim, value_dim = self.key_dim, self.value_dim
        states = 3 * key_dim * (key_dim + value_dim) // self.chunk
        per_head = 4 * key_dim + 10 * value_dim + 8 * self.chunk + states
        if self.decay_rank:
            per_head += (4 * (self.chunk - 1).bit_length() + 2) * key_dim
        return (self.value_heads * per_head + self.key_heads * 12 * key_dim) // 2

    @property
    def passed_elements(self) -> int:
        """Those of a piece that has as many tokens as the convolution sees."""
        return self.count_passed(self.taps)

    def count_passed(self, tokens: int, tensor: int = 1) -> int:
        """Return a state and the matrix that a piece multiplies it by, of each value head, and its
        last tokens, which the convolution of the next piece sees."""
        states = self.value_heads * self.key_dim * (self.key_dim + self.value_dim)
        return states + min(tokens, self.taps - 1) * self.key_heads * self.channels
