"""Experts: which layers have them, how a node's ranks share them, and checks of their config."""

from __future__ import annotations

from collections.abc import Iterator
from math import gcd

from megaframe.config.model import ModelConfig, MoEConfig
from megaframe.config.schema import ParallelConfig, RunConfig
from megaframe.errors import nearest_divisors


def has_experts(moe: MoEConfig, layer: int) -> bool:
    """Return whether a layer has experts: after `moe.first` dense layers, every `moe.every`-th."""
    return layer >= moe.first and (layer - moe.first) % moe.every == moe.every - 1


def has_mlp(model: ModelConfig, layer: int) -> bool:
    """Return whether all rows of a layer go through an MLP that tensor ranks divide. In a layer
    with experts that is the shared experts; a row goes to routed experts from the rank that has
    it, without a transfer over tensor ranks."""
    moe = model.moe
    return moe is None or moe.shared > 0 or not has_experts(moe, layer)


def expert_layers(model: ModelConfig) -> int:
    """Return the number of layers that have experts."""
    return sum(model.moe is not None and has_experts(model.moe, i) for i in range(model.layers))


def near_experts(parallel: ParallelConfig, node_size: int) -> int:
    """Return how many neighbours on the expert axis share a node."""
    return gcd(parallel.expert, max(1, node_size // parallel.expert_tensor))


def expert_mistakes(config: RunConfig) -> Iterator[str]:
    """Yield a message for each mistake in model.moe, parallel.expert, parallel.expert_tensor and
    parallel.expert_overlap."""
    model, parallel = config.model, config.parallel
    moe = model.moe
    if moe is None:
        for key in ("expert", "expert_tensor"):
            if getattr(parallel, key) > 1:
                yield (
                    f"parallel.{key}={getattr(parallel, key)} divides experts, and the model has "
                    f"none; use parallel.{key}=1, or set model.moe.experts"
                )
        return
    yield from _router(moe)
    if parallel.expert_overlap:
        yield from _overlap(parallel)
    width = moe.ffn or model.ffn
    if parallel.expert > moe.experts:
        yield (
            f"parallel.expert={parallel.expert} ranks are more than model.moe.experts="
            f"{moe.experts}; use {moe.experts} or fewer"
        )
    if parallel.expert_tensor > width:
        yield (
            f"parallel.expert_tensor={parallel.expert_tensor} ranks are more than an expert's "
            f"width of {width}; use {width} or fewer"
        )
    if not expert_layers(model):
        yield (
            f"model.moe.first={moe.first} and model.moe.every={moe.every} leave none of "
            f"model.layers={model.layers} with experts; use model.moe.first=0 and "
            "model.moe.every=1, or leave model.moe out"
        )


def _overlap(parallel: ParallelConfig) -> Iterator[str]:
    if parallel.expert * parallel.expert_tensor == 1 or parallel.pipeline == 1:
        yield (
            f"parallel.expert_overlap=true has no effect with parallel.expert={parallel.expert} "
            f"and parallel.pipeline={parallel.pipeline}; use 2 or more of both, or "
            "parallel.expert_overlap=false"
        )
    if parallel.zero == 3:
        yield (
            "parallel.expert_overlap=true runs two passes at a time, and parallel.zero=3 gathers "
            "the weights of one; use parallel.zero=2 or less, or parallel.expert_overlap=false"
        )


def _router(moe: MoEConfig) -> Iterator[str]:
    if moe.experts % moe.groups:
        yield (
            f"model.moe.groups={moe.groups} does not divide model.moe.experts={moe.experts}; "
            f"use {nearest_divisors(moe.experts, moe.groups)}"
        )
        return
    size = moe.experts // moe.groups
    if moe.top_groups > moe.groups:
        yield (
            f"model.moe.top_groups={moe.top_groups} is more than model.moe.groups={moe.groups}; "
            f"use {moe.groups} or fewer"
        )
    elif moe.top_k > moe.top_groups * size:
        yield (
            f"model.moe.top_k={moe.top_k} is more than the {moe.top_groups * size} experts that a "
            f"token may use; use {moe.top_groups * size} or fewer"
        )
    if moe.group_best > size:
        yield (
            f"model.moe.group_best={moe.group_best} is more than the {size} experts of a group; "
            f"use {size} or fewer"
        )
    if moe.normalise and moe.top_k == 1:
        yield (
            "model.moe.normalise=true makes the weight of the one expert of "
            "model.moe.top_k=1 always 1, so that the router learns nothing; use "
            "model.moe.normalise=false"
        )
