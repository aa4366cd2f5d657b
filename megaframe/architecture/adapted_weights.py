"""Which weights of a model have adapters, by their names in a checkpoint."""

from __future__ import annotations

from collections.abc import Iterator

from megaframe.architecture.block import describe_block
from megaframe.architecture.linear import LinearSpec
from megaframe.config.model import ModelConfig


def list_adapted_weights(model: ModelConfig) -> dict[str, LinearSpec]:
    """Return the products whose matrices have adapters, by the names of their weights."""
    linears: dict[str, LinearSpec] = {}
    for layer in range(model.layers + model.mtp_depth):
        block = describe_block(model, layer)
        for part in block.layers:
            found = _iterate_linears(part, f"blocks.{layer}.{part.name}")
            linears |= {f"{name}.weight": linear for name, linear in found if linear.adapters}
    return linears


def _iterate_linears(part: object, name: str) -> Iterator[tuple[str, LinearSpec]]:
    """Yield the products of a part and of all parts below it, with their names in the model."""
    if isinstance(part, LinearSpec):
        yield name, part
    for part_name, below in getattr(part, "parts", {}).items():
        yield from _iterate_linears(below, f"{name}.{part_name}")
