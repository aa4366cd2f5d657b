"""Comparison of two configs, key by key."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from pydantic import BaseModel

from megaframe.config.keys import format_value

TRAINING_ONLY = frozenset(
    {
        "model.family",
        "model.dropout",
        "model.adapters.dropout",
        "model.indexer.loss",
        "model.indexer.dense",
        "model.indexer.absorb",
        "model.init_std",
        "model.moe.balance_rate",
        "model.moe.balance_loss",
        "model.moe.z_loss",
        "model.moe.jitter",
        "model.moe.capacity",
    }
)
"""Keys of the model that affect only its training; the same weights fit other values."""

PLACES = frozenset({"checkpoint.resume", "data.phase", "train.stop_after"})
"""Keys that say where a run, or a phase of it, begins and ends."""


def find_differences(
    old: object, new: object, free: Collection[str], name: str = ""
) -> Iterator[str]:
    """Yield a line for each key that differs between two configs, sections or values.

    Args:
        old: That there, such as in a checkpoint.
        new: That here.
        free: Dotted keys that are not compared, nor anything inside them.
        name: Dotted key of both; empty for whole configs.
    """
    if name in free:
        return
    if isinstance(old, BaseModel) and isinstance(new, BaseModel):
        for key in type(new).model_fields:
            inner = f"{name}.{key}" if name else key
            yield from find_differences(getattr(old, key), getattr(new, key), free, inner)
    elif old != new:
        yield f"{name}: {format_value(old)} there, {format_value(new)} here"
