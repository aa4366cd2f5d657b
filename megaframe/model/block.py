"""The transformer block."""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megaframe.architecture.attention import AttentionDescription
from megaframe.architecture.block import BlockDescription
from megaframe.architecture.layer import LayerDescription
from megaframe.architecture.mla import LatentAttentionDescription
from megaframe.architecture.mlp import MLPDescription
from megaframe.architecture.moe import MoEDescription
from megaframe.config import EmulationConfig
from megaframe.model.attention import Attention
from megaframe.model.forward_context import MicrobatchContext, RunContext
from megaframe.model.mla import LatentAttention
from megaframe.model.mlp import MLP
from megaframe.model.moe.layer import MixtureOfExperts
from megaframe.model.norm import Norm
from megaframe.model.pass_state import PassState
from megaframe.parameters.parameter import Module
from megaframe.tensor_parallel.deferred_gradients import DeferredGradients

BlockLayer = Attention | LatentAttention | MLP | MixtureOfExperts
"""A mixer, or a feed-forward layer."""


class TransformerBlock(Module):
    """One pre-norm transformer layer: x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, description: BlockDescription, layer: int, run: RunContext) -> None:
        self.name, self.run = f"blocks.{layer}", run
        self.attention_norm = Norm(f"{self.name}.attention_norm", description.norm)
        self.attention = build_layer(description.mixer, self.name, run)
        self.mlp_norm = Norm(f"{self.name}.mlp_norm", description.norm)
        self.mlp = build_layer(description.feed_forward, self.name, run)

    @property
    def second_half(self) -> Module:
        """The MLP, or the experts in its place."""
        return self.mlp

    def __call__(self, x: Tensor, context: MicrobatchContext, state: PassState) -> Tensor:
        """Return the residual stream after the block.

        Args:
            x: This rank's rows of the stream, [rows, hidden].
            context: Of the microbatch.
            state: Of its pass.

        Returns:
            A tensor like x.
        """
        branch = self.attention(x, self.attention_norm, context, state)
        if context.dropout is not None:
            branch = context.dropout(branch, f"{self.name}.attention")
        # Between the halves: the values of the MLP are waited for here, and in the backward pass
        # its gradients are complete here.
        branch = state.boundary.cross(branch, self.mlp)
        kernels = self.run.kernels
        if kernels.fuses and not self.run.recompute:
            # One kernel adds the branch and normalises the sum. With recompute the norm is left to
            # the linear after it, which computes it again.
            normed, x = self.mlp_norm.add_and_normalize(x, branch, kernels)
            branch = self.mlp(normed, None, context, state)
        else:
            x = x + branch
            branch = self.mlp(x, self.mlp_norm, context, state)
        if context.dropout is not None:
            branch = context.dropout(branch, f"{self.name}.mlp")
        return x + branch


def build_layer(description: LayerDescription, block: str, run: RunContext) -> BlockLayer:
    """Return the torch layer of a description. block: the name of the block in the model."""
    name = f"{block}.{description.name}"
    match description:
        case AttentionDescription():
            return Attention(name, description, run)
        case LatentAttentionDescription():
            return LatentAttention(name, description, run)
        case MLPDescription():
            return MLP(name, description, run.tensor)
        case MoEDescription():
            return MixtureOfExperts(name, description, run)
    raise TypeError(f"no layer is known for a {type(description).__name__}")


_WAKE_UP_SECONDS = 2e-4
"""Seconds before the end of a wait at which it stops sleeping and spins, because a thread that
sleeps wakes up late, by varying times."""


class EmulatedBlock(Module):
    """A block without weights that waits as long as a real one would compute
    (`model.emulate`)."""

    def __init__(self, times: EmulationConfig) -> None:
        self.times = times

    def __call__(self, x: Tensor, context: MicrobatchContext, state: PassState) -> Tensor:
        """Return a copy of x after the forward time."""
        return _Wait.apply(x, time.perf_counter(), self.times, state.deferred)


class _Wait(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, start: float, times: EmulationConfig, deferred: DeferredGradients
    ) -> Tensor:
        ctx.times, ctx.deferred = times, deferred
        # The copy counts as emulated time: `start` was taken before it.
        y = x.clone()
        _wait_until(start + times.forward)
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        _wait(ctx.times.backward)
        # A separate wait, so that a schedule can defer it as it defers real weight gradients.
        ctx.deferred.add(partial(_wait, ctx.times.weight))
        return gradients[0], None, None, None


def _wait(seconds: float) -> None:
    _wait_until(time.perf_counter() + seconds)


def _wait_until(end: float) -> None:
    """Return when `time.perf_counter` reaches `end`. Sleeps first and then spins, because sleeping
    until `end` would return late."""
    remaining = end - time.perf_counter() - _WAKE_UP_SECONDS
    if remaining > 0:
        time.sleep(remaining)
    while time.perf_counter() < end:
        pass
