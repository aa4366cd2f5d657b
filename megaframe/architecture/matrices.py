"""Shapes of the matrices of a block."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from megaframe.architecture.attention import head_widths
from megaframe.architecture.experts import has_experts
from megaframe.config.model import ModelConfig


class MatrixShape(NamedTuple):
    """A whole matrix of shape [outputs, inputs].

    Attributes:
        number: How many of them a block has.
    """

    outputs: int
    inputs: int
    number: int = 1

    @property
    def elements(self) -> int:
        """Elements of all `number` matrices."""
        return self.outputs * self.inputs * self.number


def block_matrices(model: ModelConfig, layer: int) -> list[MatrixShape]:
    """Return the matrices of the block of a layer; none with emulated blocks.

    Predictors' blocks are numbered after the last layer.
    """
    if model.emulate is not None:
        return []
    moe, shapes = model.moe, [*_attention_matrices(model)]
    if moe is None or not has_experts(moe, layer):
        return [*shapes, *_mlp_matrices(model, model.ffn)]
    width = moe.ffn or model.ffn
    shapes += [MatrixShape(moe.experts, model.hidden), *_mlp_matrices(model, width, moe.experts)]
    return [*shapes, *(_mlp_matrices(model, moe.shared * width) if moe.shared else [])]


def attention_matrix_elements(model: ModelConfig) -> int:
    """Return the elements of the matrices of one block's attention."""
    return sum(matrix.elements for matrix in _attention_matrices(model))


def _attention_matrices(model: ModelConfig) -> Iterator[MatrixShape]:
    hidden, heads, latent = model.hidden, model.heads, model.latent
    query, value = head_widths(model)
    yield MatrixShape(hidden, heads * value)
    if latent is None:
        yield MatrixShape(heads * query, hidden)
        yield MatrixShape(model.kv_heads * query, hidden, 2)
        return
    yield MatrixShape(heads * query, latent.query_rank or hidden)
    yield MatrixShape(heads * latent.head_dim, latent.kv_rank)
    yield MatrixShape(heads * value, latent.kv_rank)
    for rank in (latent.query_rank, latent.kv_rank, latent.rotary_dim):
        if rank:
            yield MatrixShape(rank, hidden)


def _mlp_matrices(model: ModelConfig, width: int, number: int = 1) -> list[MatrixShape]:
    up = 2 if model.activation == "swiglu" else 1
    return [MatrixShape(width, model.hidden, up * number), MatrixShape(model.hidden, width, number)]
