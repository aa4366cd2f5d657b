"""Which weights of a model have adapters or are kept as codes, by their names in a checkpoint."""

from __future__ import annotations

from megaframe.architecture.block import describe_block
from megaframe.architecture.layer import iterate_linears
from megaframe.architecture.linear import LinearSpec
from megaframe.config.model import ModelConfig


def list_adapted_weights(model: ModelConfig) -> dict[str, LinearSpec]:
    """Return the products whose matrices have adapters or are kept as codes, by the names of their
    weights."""
    linears: dict[str, LinearSpec] = {}
    for layer in range(model.layers + model.mtp_depth):
        block = describe_block(model, layer)
        for part in block.layers:
            for name, linear in iterate_linears(part, f"blocks.{layer}.{part.name}"):
                if linear.adapters or linear.quantised:
                    linears[f"{name}.weight"] = linear
    return linears
