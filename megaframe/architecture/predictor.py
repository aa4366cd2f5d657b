"""A depth of multi-token prediction: what it is made of."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from megaframe.architecture.block import BlockDescription
from megaframe.architecture.embedding import TableDescription, describe_embedding
from megaframe.architecture.layer import SavedActivations
from megaframe.architecture.linear import LinearSpec, Number, TensorTraffic
from megaframe.architecture.model_blocks import describe_block
from megaframe.architecture.norm import NormDescription
from megaframe.architecture.spec import ParamSpec
from megaframe.architecture.traffic import AxisTraffic
from megaframe.config.model import ModelConfig
from megaframe.config.parallel import ParallelConfig


@dataclass(frozen=True)
class PredictorDescription:
    """One depth of multi-token prediction (DeepSeek-V3, 2024, section 2.2): the stream and the
    embedding of a token ahead are normalised, joined by a matrix, and passed through a block. Its
    final norm belongs to the head."""

    block: BlockDescription
    join: LinearSpec
    tokens: TableDescription

    @property
    def norm(self) -> NormDescription:
        """Of the stream and of the token."""
        return self.block.norm

    @property
    def linears(self) -> list[LinearSpec]:
        """All products with weights, in order of use."""
        return [self.join, *self.block.linears]

    def count_saved(self, parallel: ParallelConfig, recompute: str) -> SavedActivations:
        """Return what a predictor keeps per token besides the stream that it starts from.

        It is what its block and three norms keep, and five streams: the output of the preceding
        depth's norm, the embeddings of the tokens ahead, both of them normalised, and the result of
        joining them.
        """
        kept = self.block.count_saved(parallel, recompute) + self.tokens.count_saved(parallel)
        return sum([self.norm.saved_statistics] * 3, kept + SavedActivations(5 * self.norm.width))

    def count_saved_for_weights(self, parallel: ParallelConfig, recompute: str) -> SavedActivations:
        """Return what the backward pass leaves for its weight pass, per token."""
        joining = SavedActivations(self.join.count_kept_for_weights(parallel.tensor))
        return self.block.count_saved_for_weights(parallel, recompute) + joining

    @property
    def tensor_traffic(self) -> TensorTraffic:
        """What the rows of a token move over the tensor axis."""
        return self.tokens.tensor_traffic + self.join.tensor_traffic + self.block.tensor_traffic

    def count_tensor_statistics(self, tensor: Number) -> Number:
        """Return the elements per token that each pass sums over tensor ranks."""
        return self.block.count_tensor_statistics(tensor)

    def count_traffic(
        self, parallel: ParallelConfig, seq: int, near: int = 1
    ) -> Mapping[str, AxisTraffic]:
        """Return what the block moves over other axes than `tensor`."""
        return self.block.count_traffic(parallel, seq, near)

    def count_gathered_bytes(self, seq: int, width: int) -> int:
        """Return the bytes per token that a forward pass gathers over tensor ranks beside
        elements."""
        return self.block.count_gathered_bytes(seq, width)

    def count_tensor_sums(self, samples: int) -> int:
        """Return the elements that a forward pass sums over the ranks of a sample."""
        return self.block.count_tensor_sums(samples)

    def declare_parameters(self, name: str, block_name: str) -> Iterator[ParamSpec]:
        """Yield the specs of all parameters.

        Args:
            name: The path of the predictor in the model.
            block_name: That of its block, which is numbered after the last layer.
        """
        yield from self.norm.declare_parameters(f"{name}.stream_norm")
        yield from self.norm.declare_parameters(f"{name}.token_norm")
        yield from self.join.declare_parameters(f"{name}.join")
        yield from self.block.declare_parameters(block_name)


def describe_predictor(model: ModelConfig, index: int) -> PredictorDescription:
    """Return predictor number `index`, from 0."""
    join = LinearSpec((2, model.hidden), (model.hidden,), model.init_std)
    block, tokens = describe_block(model, model.layers + index), describe_embedding(model, 1).tokens
    return PredictorDescription(block, join, tokens)
