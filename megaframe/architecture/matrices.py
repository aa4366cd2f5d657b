"""Shapes of the matrices of a block, and the widths of heads and latents."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from megaframe.architecture.experts import has_experts
from megaframe.config.model import LatentAttentionConfig, ModelConfig


class Matrix(NamedTuple):
    """A whole matrix of shape [outputs, inputs]. number: how many of them a block has."""

    outputs: int
    inputs: int
    number: int = 1

    @property
    def elements(self) -> int:
        """Elements of all `number` matrices."""
        return self.outputs * self.inputs * self.number


def matrices(model: ModelConfig, layer: int) -> list[Matrix]:
    """Return the matrices of the block of a layer; none with emulated blocks. Predictors' blocks
    are numbered after the last layer."""
    if model.emulate is not None:
        return []
    moe, found = model.moe, [*_attention(model)]
    if moe is None or not has_experts(moe, layer):
        return [*found, *_mlp(model, model.ffn)]
    width = moe.ffn or model.ffn
    found += [Matrix(moe.experts, model.hidden), *_mlp(model, width, moe.experts)]
    return [*found, *(_mlp(model, moe.shared * width) if moe.shared else [])]


def attention_matrices(model: ModelConfig) -> int:
    """Return the elements of the matrices of one block's attention."""
    return sum(matrix.elements for matrix in _attention(model))


def _attention(model: ModelConfig) -> Iterator[Matrix]:
    hidden, heads, latent = model.hidden, model.heads, model.latent
    query, value = head_widths(model)
    yield Matrix(hidden, heads * value)
    if latent is None:
        yield Matrix(heads * query, hidden)
        yield Matrix(model.kv_heads * query, hidden, 2)
        return
    yield Matrix(heads * query, latent.query_rank or hidden)
    yield Matrix(heads * latent.head_dim, latent.kv_rank)
    yield Matrix(heads * value, latent.kv_rank)
    for rank in (latent.query_rank, latent.kv_rank, latent.rotary_dim):
        if rank:
            yield Matrix(rank, hidden)


def _mlp(model: ModelConfig, width: int, number: int = 1) -> list[Matrix]:
    up = 2 if model.activation == "swiglu" else 1
    return [Matrix(width, model.hidden, up * number), Matrix(model.hidden, width, number)]


def latent_width(latent: LatentAttentionConfig) -> int:
    """Return the elements of a token's latents, including the rotated part of its keys."""
    return (latent.query_rank or 0) + latent.kv_rank + latent.rotary_dim


def head_widths(model: ModelConfig) -> tuple[int, int]:
    """Return the width of a query or key head, and that of a value head."""
    latent = model.latent
    if latent is None:
        return model.head_dim, model.head_dim
    return latent.rotary_dim + latent.head_dim, latent.value_dim
