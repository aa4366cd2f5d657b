"""Checks of sparse attention that reads the latents of chosen keys."""

from __future__ import annotations

from collections.abc import Iterator

from megaframe.architecture.absorption import KEY, explain_obstacle
from megaframe.config.schema import RunConfig


def find_absorption_mistakes(config: RunConfig) -> Iterator[str]:
    """Yield a message if `model.indexer.absorb=true` cannot be. The model's layers must be
    describable."""
    indexer = config.model.indexer
    if indexer is not None and indexer.absorb is True:
        obstacle = explain_obstacle(config)
        if obstacle is not None:
            yield f"{KEY}=true cannot work here: {obstacle}; use {KEY}=auto or false"
