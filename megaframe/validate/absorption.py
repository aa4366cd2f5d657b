"""Checks of sparse attention that reads the latents of chosen keys."""

from __future__ import annotations

from collections.abc import Iterator

from megaframe.architecture.absorption import KEY, explain_obstacle
from megaframe.config.model import ModelConfig
from megaframe.config.schema import TrainConfig


def find_absorption_mistakes(model: ModelConfig, train: TrainConfig) -> Iterator[str]:
    """Yield a message if `model.indexer.absorb=true` cannot be. The model's layers must be
    describable."""
    if model.indexer is not None and model.indexer.absorb is True:
        obstacle = explain_obstacle(model, train)
        if obstacle is not None:
            yield f"{KEY}=true cannot work here: {obstacle}; use {KEY}=auto or false"
