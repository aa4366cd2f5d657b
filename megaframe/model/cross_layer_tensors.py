"""Tensors that parts of the model hand to later layers besides the stream, for one microbatch.

Each block has an autograd graph of its own, so what it takes is a leaf, as its input is. The leaf
collects the gradients of all layers that use it, and the part that made it is given their sum with
the gradient of its output.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge


class HandedTensors:
    """What was handed on so far, by name."""

    def __init__(self) -> None:
        self._leaves: dict[str, Tensor] = {}
        self._edges: dict[str, GradientEdge] = {}

    def hand_on(self, name: str, tensor: Tensor) -> None:
        """Let later layers use a tensor. A block that is computed again hands it on again, and only
        the graph behind it is new."""
        if name not in self._leaves:
            # Numbers of keys have no gradients.
            leaf = tensor.detach()
            self._leaves[name] = leaf.requires_grad_(leaf.is_floating_point())
        if tensor.requires_grad:
            # The edge, not the tensor: the leaf holds the same numbers.
            self._edges[name] = get_gradient_edge(tensor)

    def take(self, name: str) -> Tensor:
        """Return the leaf that later layers compute with."""
        return self._leaves[name]

    def get_gradient(self, name: str) -> Tensor:
        """Return the sum of the gradients of all layers that used a tensor."""
        leaf = self._leaves[name]
        return torch.zeros_like(leaf) if leaf.grad is None else leaf.grad

    def set_gradient(self, name: str, gradient: Tensor) -> None:
        """Begin the sum with the gradient of the layers of later stages."""
        self._leaves[name].grad = gradient

    def clear(self) -> None:
        """Forget all that was handed on."""
        self._leaves.clear()
        self._edges.clear()

    def take_edges(self, names: Iterable[str]) -> tuple[list[GradientEdge], list[Tensor]]:
        """Return the graphs behind tensors that have a gradient, and these, for the backward pass
        of the part that made them."""
        edges, gradients = [], []
        for name in names:
            edge, gradient = self._edges.pop(name), self._leaves.pop(name).grad
            if gradient is not None:
                edges.append(edge)
                gradients.append(gradient)
        return edges, gradients
