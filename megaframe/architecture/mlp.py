"""The MLP: what a dense feed-forward layer is made of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from megaframe.architecture.activation import ActivationDescription, describe_activation
from megaframe.architecture.layer import FeedForwardDescription, HasParameters, SavedActivations
from megaframe.architecture.limits import Limit
from megaframe.architecture.linear import LinearSpec, Number
from megaframe.config.blocks import MLPConfig
from megaframe.config.model import ModelConfig
from megaframe.config.parallel import ParallelConfig


@dataclass(frozen=True, kw_only=True)
class MLPDescription(FeedForwardDescription):
    """hidden -> width -> hidden. With a gated activation, gate and up are one weight [2, width,
    hidden].

    Attributes:
        hidden: Width of the stream.
        width: Inner width.
        activation: Between the products.
        up_bias: Whether the first product has a bias.
        down_bias: Whether the second one has.
        init_std: Standard deviation of the first matrix.
        output_std: That of the second one.
        sparsity: Share of a token's gates that are cut off; 0 for none.
    """

    hidden: int
    width: int
    activation: ActivationDescription
    up_bias: bool
    down_bias: bool
    init_std: float
    output_std: float
    sparsity: float = 0.0

    name = "mlp"

    @property
    def limits(self) -> tuple[Limit, ...]:
        """The width."""
        return (Limit("tensor", self.width, f"model.ffn={self.width}", even=False),)

    @property
    def gated(self) -> bool:
        """Whether the activation has two inputs."""
        return self.activation.gated

    @property
    def up(self) -> LinearSpec:
        """The first product. Gate and up are separate along dim 0, so that a tensor shard of dim 1
        has the same outputs of both."""
        if not self.gated:
            outputs = (self.width,)
            up = LinearSpec((self.hidden,), outputs, self.init_std, split=0, bias=self.up_bias)
            return self.adapt("up", up, "stream")
        up = LinearSpec(
            (self.hidden,),
            (2, self.width),
            self.init_std,
            split=1,
            bias=self.up_bias,
            fused={0: (1, 1)},
            matrices=("gate", "up"),
        )
        return self.adapt("up", up, "stream")

    @property
    def down(self) -> LinearSpec:
        """The second product."""
        outputs = (self.hidden,)
        down = LinearSpec((self.width,), outputs, self.output_std, split=1, bias=self.down_bias)
        return self.adapt("down", down, "computed")

    @property
    def parts(self) -> Mapping[str, HasParameters]:
        """Both products, and what the activation has."""
        products: dict[str, HasParameters] = {"up": self.up, "down": self.down}
        slopes = self.activation.slopes
        return products if slopes is None else {**products, "activation": slopes}

    def count_saved(self, parallel: ParallelConfig, recompute: str) -> SavedActivations:
        """Return the values before the activation, and unless recomputed those after it and what
        it keeps; and those before gates are cut off, with their mean and deviation on each rank."""
        after = self.width * (1 + self.activation.saved) * (recompute != "selective")
        saved = SavedActivations(self.up.results + after) + self.count_saved_by_adapters(parallel)
        if not self.sparsity:
            return saved
        statistics = self.count_tensor_statistics(parallel.tensor) * parallel.tensor
        return saved + SavedActivations(self.up.results, statistics)

    def count_tensor_statistics(self, tensor: Number) -> Number:
        """Return the mean and the mean square of a token's gates, if they are cut off: all ranks
        have a part of the row."""
        return 2 if self.sparsity else 0

    @property
    def inner_elements(self) -> float:
        """Elements per token that the activation reads and writes, in units of one read and one
        write."""
        return self.width * (1.5 if self.gated else 1.0)

    @property
    def widest(self) -> int:
        """The outputs of the first product."""
        return self.up.results


def describe_mlp(model: ModelConfig, config: MLPConfig, output_std: float) -> MLPDescription:
    """Return an MLP as a block says, by default as the model says.

    Args:
        model: The section `model`.
        config: The keys of the block's MLP.
        output_std: Standard deviation of the second matrix.
    """
    bias = model.bias if config.bias is None else config.bias
    return MLPDescription(
        hidden=model.hidden,
        width=config.ffn or model.ffn,
        activation=describe_activation(
            config.activation or model.activation, model.activation_limit
        ),
        up_bias=bias if config.up_bias is None else config.up_bias,
        down_bias=bias if config.down_bias is None else config.down_bias,
        init_std=model.init_std,
        output_std=output_std,
        sparsity=config.sparsity,
    )
