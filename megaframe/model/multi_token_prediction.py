"""Multi-token prediction (DeepSeek-V3, 2024, section 2.2): tokens beyond the next one are predicted
too, each depth by one more block."""

from __future__ import annotations

import torch
from torch import Tensor

from megaframe.architecture.predictor import describe_predictor
from megaframe.config import ModelConfig
from megaframe.model.block import TransformerBlock
from megaframe.model.layer_inputs import LayerSetup, MicrobatchInputs
from megaframe.model.norm import Norm
from megaframe.model.pass_state import PassState
from megaframe.parameters.parameter import Module
from megaframe.tensor_parallel.embedding import EmbeddingTable
from megaframe.tensor_parallel.linear import Linear


class MultiTokenPredictor(Module):
    """One depth: the stream of a token and the embedding of a token further ahead are normalised,
    joined, and passed through one more block, which is numbered after the last layer."""

    def __init__(
        self,
        model: ModelConfig,
        index: int,
        tokens: EmbeddingTable,
        previous_norm: Norm,
        setup: LayerSetup,
    ) -> None:
        """Declare the layers.

        Args:
            model: The model's config.
            index: Of the depth, from 0.
            tokens: The token table, which this shares with the embedding.
            previous_norm: The final norm of the previous depth. It is applied to the stream first,
                because the predictor takes the stream as the head saw it, as in the released code.
            setup: What the run fixes.
        """
        self.name, self.setup = f"predictors.{index}", setup
        self.tokens, self.previous_norm = tokens, previous_norm
        description = describe_predictor(model, index)
        self.stream_norm = Norm(f"{self.name}.stream_norm", description.norm)
        self.token_norm = Norm(f"{self.name}.token_norm", description.norm)
        # Not divided over the tensor ranks: each multiplies its own rows.
        self.join = Linear(f"{self.name}.join", description.join, setup.tensor)
        self.block = TransformerBlock(description.block, model.layers + index, setup)

    @property
    def second_half(self) -> Module:
        """The second half of the block."""
        return self.block.second_half

    def __call__(
        self, x: Tensor, ahead_BS: Tensor, inputs: MicrobatchInputs, state: PassState
    ) -> Tensor:
        """Return the next stream from x, the stream [rows, hidden] of the previous depth, and the
        tokens ahead."""
        ahead = self.tokens(ahead_BS.flatten(), inputs.rows)
        if inputs.dropout is not None:
            ahead = inputs.dropout(ahead, self.name)
        kernels = self.setup.kernels
        # Twice normalised, as in the released code: by the head's norm of the previous depth and by
        # its own.
        stream = self.stream_norm(self.previous_norm(x, kernels), kernels)
        # [rows, 2 * hidden]: stream first, then token, as the weight of `join` has its two inputs.
        stream_and_token = torch.cat((stream, self.token_norm(ahead, kernels)), 1)
        return self.block(self.join(stream_and_token, state.deferred), inputs, state)
