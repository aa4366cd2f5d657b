"""The embedding: token table, and learned positions and a norm if the model has them."""

from __future__ import annotations

from torch import Tensor

from megaframe.architecture.embedding import (
    describe_layer_embeddings,
    describe_position_table,
    describe_token_table,
)
from megaframe.architecture.model_blocks import describe_norm
from megaframe.architecture.streams import describe_first_streams
from megaframe.config import ModelConfig
from megaframe.data.microbatch import Microbatch
from megaframe.model.layer_embedding import LayerEmbeddings
from megaframe.model.layer_inputs import LayerSetup, MicrobatchInputs, get_token_positions
from megaframe.model.norm import Norm
from megaframe.model.pass_state import PassState
from megaframe.model.streams import FirstStreams
from megaframe.parameters.parameter import Module, Parameter
from megaframe.tensor_parallel.embedding import EmbeddingTable


class Embedding(Module):
    """Token embedding, plus learned positions if the model has them, and their norm; and further
    inputs of layers."""

    def __init__(self, model: ModelConfig, seq: int, setup: LayerSetup) -> None:
        self.position, self.scale = model.position, model.embedding_scale
        self.copies = 1 if model.streams is None else model.streams.number
        self.kernels = setup.kernels
        self.tokens = make_token_table(model, setup)
        position_table = describe_position_table(model, seq)
        if position_table is not None:
            self.positions = EmbeddingTable(
                "embedding.positions", position_table, setup.tensor.group
            )
        self.norm: Norm | None = None
        if model.embedding_norm:
            self.norm = Norm("embedding.norm", describe_norm(model))
        streams = describe_first_streams(model)
        self.streams = None if streams is None else FirstStreams("embedding.streams", streams)
        layer_embeddings = describe_layer_embeddings(model)
        self.layer_embeddings: LayerEmbeddings | None = None
        if layer_embeddings is not None:
            self.layer_embeddings = LayerEmbeddings(layer_embeddings, setup)

    @property
    def handed_names(self) -> tuple[str, ...]:
        """Names of what it hands to layers besides the stream."""
        return () if self.layer_embeddings is None else self.layer_embeddings.handed_names

    @property
    def multiplies(self) -> bool:
        """Whether it has products, whose weights a backward pass needs."""
        return self.layer_embeddings is not None

    def __call__(
        self, microbatch: Microbatch, inputs: MicrobatchInputs, state: PassState
    ) -> Tensor:
        """Return this rank's rows [rows, hidden] of the residual stream for token ids [B, S], or
        those of all streams beside each other; and hand the further inputs of layers to them."""
        tokens_BS = microbatch.tokens_BS
        x = self.tokens(tokens_BS.flatten(), inputs.rows)
        if self.position == "learned":
            positions = get_token_positions(microbatch).expand_as(tokens_BS)
            # Every rank has the whole table of positions and looks up only its own rows.
            x = x + self.positions(positions.flatten(), inputs.rows)
        if self.scale != 1.0:
            x = x * self.scale
        if self.norm is not None:
            x = self.norm(x, self.kernels)
        if self.layer_embeddings is not None:
            self.layer_embeddings(tokens_BS.flatten(), x, inputs, state)
        x = x if inputs.dropout is None else inputs.dropout(x, "embedding")
        if self.streams is not None:
            return self.streams(x)
        return x if self.copies == 1 else x.repeat(1, self.copies)


def make_token_table(
    model: ModelConfig, setup: LayerSetup, *, replica: bool = False
) -> EmbeddingTable:
    """Return the token table.

    Args:
        model: The model's config.
        setup: What the run fixes.
        replica: Whether another rank's stage has the same table.
    """
    table = EmbeddingTable("embedding.tokens", describe_token_table(model), setup.tensor.group)
    if replica:
        table.weight = Parameter(table.weight.spec, replica=True)
    return table
