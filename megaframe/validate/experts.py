"""Checks of experts: their router, and the ranks that they are divided over."""

from __future__ import annotations

from collections.abc import Iterator

from megaframe.architecture.moe import count_expert_layers
from megaframe.config.model import ModelConfig, MoEConfig
from megaframe.config.parallel import ParallelConfig
from megaframe.errors import find_nearest_divisors


def find_expert_mistakes(model: ModelConfig, parallel: ParallelConfig) -> Iterator[str]:
    """Yield a message for each mistake in model.moe and parallel.expert_overlap, and for ranks
    that divide experts if there are none."""
    moe = model.moe
    if moe is None:
        for key in ("expert", "expert_tensor"):
            if getattr(parallel, key) > 1:
                yield (
                    f"parallel.{key}={getattr(parallel, key)} divides experts, and the model has "
                    f"none; use parallel.{key}=1, or set model.moe.experts"
                )
        return
    yield from _find_router_mistakes(moe)
    if model.activation == "xielu":
        yield (
            "model.activation=xielu has slopes that are trained, which experts have no place for; "
            "use model.activation=relu2, or say activation in the MLPs of model.blocks"
        )
    if parallel.expert_overlap:
        yield from _find_overlap_mistakes(parallel)
    if not count_expert_layers(model):
        yield (
            f"model.moe.first={moe.first} and model.moe.every={moe.every} leave none of "
            f"model.layers={model.layers} with experts; use model.moe.first=0 and "
            "model.moe.every=1, or leave model.moe out"
        )


def _find_overlap_mistakes(parallel: ParallelConfig) -> Iterator[str]:
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


def _find_router_mistakes(moe: MoEConfig) -> Iterator[str]:
    if moe.shared_gate and not moe.shared:
        yield (
            "model.moe.shared_gate=true has no effect with model.moe.shared=0; use "
            "model.moe.shared=1 or more, or model.moe.shared_gate=false"
        )
    if moe.own_norms and moe.shared_gate:
        yield (
            "model.moe.own_norms=true normalises what model.moe.shared_gate=true would scale, so "
            "that the gate does nothing; leave one of them out"
        )
    if moe.experts % moe.groups:
        yield (
            f"model.moe.groups={moe.groups} does not divide model.moe.experts={moe.experts}; "
            f"use {find_nearest_divisors(moe.experts, moe.groups)}"
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
    if moe.normalise_eps and not moe.normalise:
        yield (
            f"model.moe.normalise_eps={moe.normalise_eps} has no effect with "
            "model.moe.normalise=false; use model.moe.normalise_eps=0 or model.moe.normalise=true"
        )
