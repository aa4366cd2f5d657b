"""Which weights of a model have adapters or are kept as codes, by their names in a checkpoint."""

from __future__ import annotations

from functools import lru_cache

from megaframe.architecture.layer import iterate_linears
from megaframe.architecture.linear import LinearSpec
from megaframe.architecture.model_blocks import describe_block
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


@lru_cache(maxsize=64)
def list_coded_patterns(model: ModelConfig) -> tuple[str, ...]:
    """Return patterns of the names of the weights that are kept as codes, which are the same in all
    layers."""
    if model.adapters is None or model.adapters.quantize_base is None or model.emulate is not None:
        return ()
    names = (name for name, each in list_adapted_weights(model).items() if each.quantised)
    return tuple(dict.fromkeys("blocks.*." + name.split(".", 2)[2] for name in names))
