"""What changes while one microbatch passes through a stage: weight gradients that are still to be
computed, the boundary in the middle of blocks, counts and losses of layers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from megaframe.architecture.window import Window
from megaframe.distributed.interleaving import InterleaveHook
from megaframe.model.cross_layer_tensors import HandedTensors
from megaframe.model.key_value_cache import KeyValueCache, LayerCache, StateCache
from megaframe.ops.autograd import get_direct_apply
from megaframe.ops.workspace import Workspace
from megaframe.parameters.parameter import Module
from megaframe.tensor_parallel.deferred_gradients import DeferredGradients


class LayerStatistics:
    """Counts and losses that the layers of a stage add up over the microbatches of a step, on this
    rank.

    Attributes:
        counts: Sums by name.
        losses: Parts that are added to the model's loss, by name.
    """

    def __init__(self) -> None:
        self.counts: dict[str, Tensor] = {}
        self.losses: dict[str, Tensor] = {}

    def add(self, name: str, value: Tensor) -> None:
        """Add the scalar `value` to the count `name`."""
        _add(self.counts, name, value)

    def add_loss(self, name: str, value: Tensor) -> None:
        """Add the scalar `value` to the part `name` of the loss."""
        _add(self.losses, name, value)

    def copy(self) -> LayerStatistics:
        """Return a copy of the numbers in memory of its own."""
        copy = LayerStatistics()
        copy.counts = {name: value.clone() for name, value in self.counts.items()}
        copy.losses = {name: value.clone() for name, value in self.losses.items()}
        return copy

    @property
    def loss(self) -> Tensor | None:
        """Sum of everything that is added to the loss, fp64 scalar; None if there is nothing."""
        return torch.stack(list(self.losses.values())).sum() if self.losses else None


def _add(sums: dict[str, Tensor], name: str, value: Tensor) -> None:
    # In fp64, because these are sums over all microbatches of a step. Detached, so that a sum keeps
    # no graph alive.
    value = value.detach().double()
    sums[name] = sums[name] + value if name in sums else value


class BlockBoundary:
    """The boundary between the attention and the second half of a block (its MLP or experts), for
    one microbatch.

    In the forward pass the values of the second half are waited for here, and in the backward pass
    its gradients are complete here.

    Attributes:
        take: Returns when the values of a second half are on this rank; may be None.
        done: Called with a second half once this microbatch adds nothing more to its gradients; may
            be None.
    """

    def __init__(self, take: Callable[[Module], None] | None = None) -> None:
        self.take = take
        self.done: Callable[[Module], None] | None = None

    def cross(self, x: Tensor, second_half: Module) -> Tensor:
        """Return x, from which `second_half` is about to be computed: wait for its values, and in
        the backward pass report that it is done."""
        if self.take is not None:
            self.take(second_half)
        # Without gradients there is no backward pass that could report anything.
        return _apply_boundary(x, self, second_half) if torch.is_grad_enabled() else x


class _Boundary(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, boundary: BlockBoundary, second_half: Module) -> Tensor:
        ctx.boundary, ctx.second_half = boundary, second_half
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        if ctx.boundary.done is not None:
            # Autograd runs the backward pass of a block in one call, so the graph itself signals
            # the boundary: this node runs once everything after it in the block has been
            # differentiated.
            ctx.boundary.done(ctx.second_half)
        return gradients[0], None, None


_apply_boundary = get_direct_apply(_Boundary)


@dataclass(frozen=True)
class PassState:
    """The mutable objects of the passes of one microbatch through a stage.

    Attributes:
        statistics: Counts and losses of the layers, of all microbatches of the step.
        workspace: Memory for tensors that end with a layer, of the whole stage.
        boundary: Crossed between the two halves of a block.
        deferred: Computes or keeps the weight gradients of this microbatch.
        interleave_hook: Layers call it before they wait for a transfer.
        cache: What layers keep of the tokens before those of the microbatch; None in training.
        handed: What layers hand to later ones besides the stream.
    """

    statistics: LayerStatistics = field(default_factory=LayerStatistics)
    workspace: Workspace = field(default_factory=Workspace)
    boundary: BlockBoundary = field(default_factory=BlockBoundary)
    deferred: DeferredGradients = field(default_factory=DeferredGradients)
    interleave_hook: InterleaveHook = field(default_factory=InterleaveHook)
    cache: KeyValueCache | None = None
    handed: HandedTensors = field(default_factory=HandedTensors)

    def find_cache(self, layer: object, window: Window) -> LayerCache | None:
        """Return the cache of a layer (`KeyValueCache.get`); None in training."""
        return None if self.cache is None else self.cache.get(layer, window)

    def find_state(self, layer: Module) -> StateCache | None:
        """Return the state that a layer passes on (`KeyValueCache.get_state`); None in training."""
        return None if self.cache is None else self.cache.get_state(layer)
