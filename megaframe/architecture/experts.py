"""Experts: which layers have them, and how the ranks of a node share them."""

from __future__ import annotations

from math import gcd

from megaframe.config.model import ModelConfig, MoEConfig
from megaframe.config.parallel import ParallelConfig


def has_experts(moe: MoEConfig, layer: int) -> bool:
    """Return whether a layer has experts: after `moe.first` dense layers, every `moe.every`-th."""
    return layer >= moe.first and (layer - moe.first) % moe.every == moe.every - 1


def has_mlp(model: ModelConfig, layer: int) -> bool:
    """Return whether all rows of a layer go through an MLP that tensor ranks divide.

    In a layer with experts that is the shared experts; a row goes to routed experts from the rank
    that has it, without a transfer over tensor ranks.
    """
    moe = model.moe
    return moe is None or moe.shared > 0 or not has_experts(moe, layer)


def expert_layers(model: ModelConfig) -> int:
    """Return the number of layers that have experts."""
    return sum(model.moe is not None and has_experts(model.moe, i) for i in range(model.layers))


def near_experts(parallel: ParallelConfig, node_size: int) -> int:
    """Return how many neighbours on the expert axis share a node."""
    return gcd(parallel.expert, max(1, node_size // parallel.expert_tensor))
