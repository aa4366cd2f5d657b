"""Gated short convolution (Liquid AI 2025, "LFM2"): what a layer is made of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from megaframe.architecture.causal_convolution import ConvolutionDescription
from megaframe.architecture.layer import HasParameters, MixerDescription, SavedActivations
from megaframe.architecture.limits import Limit
from megaframe.architecture.linear import LinearSpec
from megaframe.config.parallel import ParallelConfig


@dataclass(frozen=True, kw_only=True)
class GatedShortConvolutionDescription(MixerDescription):
    """A causal convolution of each channel of the stream's width, between two gates.

    Attributes:
        hidden: Width of the stream, and number of channels.
        taps: Tokens that the convolution sees.
        bias: Whether both products and the convolution have biases.
        init_std: Standard deviation of the first matrix.
        output_std: That of the second one.
    """

    hidden: int
    taps: int
    bias: bool
    init_std: float
    output_std: float

    name = "gated_short_convolution"
    context_kinds = ("ring", "all_to_all", "nested")

    @property
    def limits(self) -> tuple[Limit, ...]:
        """The channels."""
        return (Limit("tensor", self.hidden, f"model.hidden={self.hidden}", even=False),)

    @property
    def input(self) -> LinearSpec:
        """From the stream to the gate before the convolution, the gate after it, and what it sees.
        They are separate along dim 0, so that a tensor shard of dim 1 has the same channels of
        all."""
        product = LinearSpec(
            (self.hidden,),
            (3, self.hidden),
            self.init_std,
            split=1,
            bias=self.bias,
            fused={0: (1, 1, 1)},
            matrices=("gate_before", "gate_after", "channels"),
        )
        return self.adapt("input", product, "stream")

    @property
    def convolution(self) -> ConvolutionDescription:
        """That of the channels."""
        return ConvolutionDescription((self.hidden, self.taps), self.bias)

    @property
    def output(self) -> LinearSpec:
        """From the channels back to the stream."""
        outputs = (self.hidden,)
        product = LinearSpec((self.hidden,), outputs, self.output_std, split=1, bias=self.bias)
        return self.adapt("output", product)

    @property
    def parts(self) -> Mapping[str, HasParameters]:
        """The products, and the convolution between them."""
        return {"input": self.input, "convolution": self.convolution, "output": self.output}

    def count_saved(self, parallel: ParallelConfig, recompute: str) -> SavedActivations:
        """Return the result of the first product, and the input of the second one. What is between
        them is computed again."""
        saved = SavedActivations(self.input.results + self.output.terms)
        return saved + self.count_saved_by_adapters(parallel)

    @property
    def widest(self) -> int:
        """Half of what exists while the gates and the convolution are computed again and
        differentiated: as much as 14 tensors of channels in 16 bits, as sums are in fp32."""
        return 7 * self.hidden

    @property
    def passed_elements(self) -> int:
        """Those of a piece that has as many tokens as the convolution sees."""
        return self.count_passed(self.taps)

    def count_passed(self, tokens: int, tensor: int = 1) -> int:
        """Return the last tokens of a piece, which the convolution of the next one sees."""
        return min(tokens, self.taps - 1) * self.hidden
