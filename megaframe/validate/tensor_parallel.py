"""Checks that matrices and rows can be divided among the tensor ranks as the config says."""

from __future__ import annotations

from collections.abc import Iterator

from megaframe.config.model import ModelConfig
from megaframe.config.schema import RunConfig
from megaframe.errors import TIMES, divisors, join_or, nearest_divisors


def tensor_mistakes(config: RunConfig) -> Iterator[str]:
    """Yield a message for each mistake in parallel.tensor and parallel.tensor_chunks."""
    yield from _matrices(config.model, config.parallel.tensor)
    yield from _chunks(config)


def _matrices(model: ModelConfig, tensor: int) -> Iterator[str]:
    groups, heads = model.kv_heads, model.heads
    if model.latent is not None:
        if heads % tensor:
            yield (
                f"parallel.tensor={tensor} does not divide model.heads={heads}; "
                f"use {nearest_divisors(heads, tensor)}"
            )
    elif groups % tensor and (tensor % groups or heads % tensor):
        fits = [t for t in divisors(heads) if groups % t == 0 or t % groups == 0]
        near = [t for t in fits if t < tensor][-1:] + [t for t in fits if t > tensor][:1]
        yield (
            f"parallel.tensor={tensor} can neither divide model.kv_heads={groups} nor share them "
            f"evenly among model.heads={heads}; use {join_or(near)}"
        )
    for name, size in (("model.ffn", model.ffn), ("model.vocab", model.vocab or tensor)):
        if size < tensor:
            yield f"{name}={size} is less than parallel.tensor={tensor}; use {size} or fewer ranks"


def _chunks(config: RunConfig) -> Iterator[str]:
    parallel, train = config.parallel, config.train
    chunks, tensor = parallel.tensor_chunks, parallel.tensor
    rows = -(-train.microbatch * train.seq // (tensor * parallel.context))
    if chunks > 1 and tensor == 1:
        yield (
            f"parallel.tensor_chunks={chunks} has no effect with parallel.tensor=1, where no rows "
            "travel; leave it out"
        )
    elif chunks > rows:
        yield (
            f"parallel.tensor_chunks={chunks} is more than the {rows} row{'s' * (rows > 1)} of a "
            f"microbatch (train.microbatch={train.microbatch}{TIMES}train.seq={train.seq}) that "
            f"each rank has; use {rows} or fewer"
        )
