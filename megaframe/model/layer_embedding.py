"""Per-layer embeddings: how the embedding makes an input of each layer besides the stream, and how
a layer adds its own to the stream.

Shape legend: T tokens of the microbatch, R rows of this rank, L layers, P width of an input.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from megaframe.architecture.activation import describe_activation
from megaframe.architecture.embedding import LayerEmbeddingsDescription
from megaframe.architecture.layer_embedding import LayerEmbeddingDescription, name_layer_embedding
from megaframe.model.activation import activate
from megaframe.model.layer_inputs import LayerSetup, MicrobatchInputs
from megaframe.model.norm import Norm
from megaframe.model.pass_state import PassState
from megaframe.parameters.parameter import Module
from megaframe.tensor_parallel.embedding import EmbeddingTable
from megaframe.tensor_parallel.linear import Elementwise, Linear


class LayerEmbeddings(Module):
    """The inputs of all layers: (norm(projection of the stream) + row of a table) / sqrt(2)."""

    def __init__(self, description: LayerEmbeddingsDescription, setup: LayerSetup) -> None:
        self.layers, self.width = description.layers, description.width
        self.kernels = setup.kernels
        table = description.tokens
        self.words = table.rows if description.is_short else None
        self.tokens = EmbeddingTable("embedding.layer_tokens", table, setup.tensor.group)
        projection = description.projection
        self.projection = Linear("embedding.layer_projection", projection, setup.tensor)
        self.norm = Norm("embedding.layer_norm", description.norm)

    @property
    def handed_names(self) -> tuple[str, ...]:
        """Names of the inputs of all layers."""
        return tuple(name_layer_embedding(f"blocks.{layer}") for layer in range(self.layers))

    def __call__(
        self, tokens_T: Tensor, x_RH: Tensor, inputs: MicrobatchInputs, state: PassState
    ) -> None:
        """Hand its input to each layer.

        Args:
            tokens_T: Token numbers, int64.
            x_RH: The stream before the first layer.
            inputs: Of the microbatch.
            state: Of its pass.
        """
        sizes = (self.layers, self.width)
        if self.words is not None:
            tokens_T = torch.where(tokens_T < self.words, tokens_T, 0)
        rows_RLP = self.tokens(tokens_T, inputs.rows).unflatten(1, sizes)
        projected = self.projection(x_RH, state.deferred) * x_RH.shape[1] ** -0.5
        normed_RLP = self.norm(projected.unflatten(1, sizes), self.kernels)
        inputs_RLP = (normed_RLP + rows_RLP * self.width**0.5) * 2**-0.5
        for name, input_RP in zip(self.handed_names, inputs_RLP.unbind(1), strict=True):
            state.handed.hand_on(name, input_RP)


class LayerEmbedding(Module):
    """norm(output(gelu(gate(x)) * input)), which a block adds to the stream."""

    def __init__(
        self, name: str, description: LayerEmbeddingDescription, setup: LayerSetup
    ) -> None:
        self.gate = Linear(f"{name}.gate", description.gate, setup.tensor)
        self.output = Linear(f"{name}.output", description.output, setup.tensor)
        self.norm = Norm(f"{name}.post_norm", description.norm)
        self.kernels = setup.kernels
        self.activate = partial(activate, describe_activation("gelu_tanh"))
        self.input_name = name_layer_embedding(name.rpartition(".")[0])

    def __call__(
        self, x: Tensor, norm: Elementwise | None, inputs: MicrobatchInputs, state: PassState
    ) -> Tensor:
        """Compute what is added to each row. The arguments are those of `Attention`."""
        gates = self.activate(self.gate(x, state.deferred, norm), self.kernels)
        gated = gates * state.handed.take(self.input_name)
        return self.norm(self.output(gated, state.deferred), self.kernels)
