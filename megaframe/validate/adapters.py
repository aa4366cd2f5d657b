"""Checks of adapters: what they are to be added to must be there, and larger than they are."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from difflib import get_close_matches

from megaframe.architecture.adapters import Adapter, is_target, matches
from megaframe.architecture.linear import GroupedLinearSpec, LinearSpec
from megaframe.architecture.model_blocks import describe_block
from megaframe.config.adapters import AdaptersConfig
from megaframe.config.model import ModelConfig
from megaframe.config.schema import CheckpointConfig
from megaframe.errors import join_or

_EVERY = AdaptersConfig(rank=1)


def find_adapter_import_mistakes(model: ModelConfig, checkpoint: CheckpointConfig) -> Iterator[str]:
    """Yield a message if adapters are to be read for a model that has none, or without a base."""
    if checkpoint.adapters is None:
        return
    folder = checkpoint.adapters
    if model.adapters is None:
        yield (
            f"checkpoint.adapters={folder} has values for adapters, and this model has none; set "
            "model.adapters={rank: R, alpha: A} to r and lora_alpha of its adapter_config.json"
        )
    if checkpoint.weights is None:
        yield (
            f"checkpoint.adapters={folder} holds no base; set checkpoint.weights to the one that "
            "the adapters were trained on"
        )


def find_adapter_mistakes(model: ModelConfig) -> Iterator[str]:
    """Yield a message for each mistake in `model.adapters`."""
    adapters = model.adapters
    if adapters is None:
        return
    if model.emulate is not None:
        yield (
            "model.adapters has nothing to be added to in the blocks of model.emulate, which have "
            "no weights; leave one of them out"
        )
        return
    last = model.layers + model.mtp_depth - 1
    beyond = [layer for layer in adapters.layers or () if layer > last]
    if beyond:
        yield (f"model.adapters.layers={beyond[0]} is not a layer of this model; use 0 to {last}")
        return
    matrices = _list_matrices(model)
    if not matrices:
        yield (
            "model.adapters has nothing to be added to: the layers of model.blocks come from "
            "extensions and have no matrices that may have adapters; leave it out"
        )
        return
    for pattern in adapters.targets:
        if not any(matches(pattern, name) for name in matrices):
            last_parts = {name.rpartition(".")[2]: None for name in matrices}
            near = get_close_matches(pattern, [*matrices, *last_parts], 3, 0.0)
            yield (
                f"model.adapters.targets={pattern} matches none of the {len(matrices)} kinds of "
                f"matrices; the nearest are {join_or(near)}"
            )
    if not adapters.targets:
        yield (
            "model.adapters.targets=[] leaves nothing to train; use names such as "
            f"{join_or([*matrices][:3])}, or '*'"
        )
    yield from _find_wrong_targets(adapters, matrices)


def _find_wrong_targets(
    adapters: AdaptersConfig, matrices: Mapping[str, tuple[LinearSpec, Adapter]]
) -> Iterator[str]:
    """Yield a message for each matrix that cannot have these adapters."""
    for name, (linear, adapter) in matrices.items():
        if not is_target(adapters, name):
            continue
        _, up = linear.make_factors(adapter)
        outputs, inputs = math.prod(up.outputs), linear.terms
        if adapters.rank > min(outputs, inputs):
            yield (
                f"model.adapters.rank={adapters.rank} is above that of {name}, a matrix of "
                f"{outputs} x {inputs}; use {min(outputs, inputs)} or less, or leave it out of "
                "model.adapters.targets"
            )
        if adapters.dropout and isinstance(linear, GroupedLinearSpec):
            yield (
                f"model.adapters.dropout={adapters.dropout:g} is not for experts, which "
                f"model.adapters.targets={','.join(adapters.targets)} names with {name}; use "
                "dropout=0, or other targets"
            )
        if adapters.dora and isinstance(linear, GroupedLinearSpec):
            yield (
                "model.adapters.dora=true is not for experts, which model.adapters.targets="
                f"{','.join(adapters.targets)} names with {name}; use dora=false, or other targets"
            )


def _list_matrices(model: ModelConfig) -> dict[str, tuple[LinearSpec, Adapter]]:
    """Return the matrices of the model that may have adapters, by name within a block."""
    matrices: dict[str, tuple[LinearSpec, Adapter]] = {}
    for layer in range(model.layers + model.mtp_depth):
        for half in describe_block(model, layer).layers:
            for linear in replace(half, adapters=_EVERY).adapted_linears:
                for adapter in linear.adapters:
                    matrices.setdefault(adapter.target, (linear, adapter))
    return matrices
