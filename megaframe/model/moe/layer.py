"""Mixture of experts: the layer that replaces the MLP of a block."""

from __future__ import annotations

from torch import Tensor

from megaframe.config import ModelConfig, MoEConfig
from megaframe.expert_parallel.dispatch import route_tokens
from megaframe.expert_parallel.paths import back, there
from megaframe.model.forward_context import Frame
from megaframe.model.mlp import MLP
from megaframe.model.moe.experts import Experts
from megaframe.model.moe.router import Router
from megaframe.ops.kernel_dispatch import NO_KERNELS
from megaframe.parameters.parameter import Module
from megaframe.tensor_parallel.linear import Elementwise, as_it_is


class MixtureOfExperts(Module):
    """A router, the experts to which it sends tokens, and optionally a shared MLP for every token,
    which is computed while tokens are in transit."""

    def __init__(self, name: str, model: ModelConfig, moe: MoEConfig, output_std: float) -> None:
        self.router = Router(f"{name}.router", model, moe)
        self.experts = Experts(f"{name}.experts", model, moe, output_std)
        self.shared: MLP | None = None
        if moe.shared:
            width = moe.shared * (moe.ffn or model.ffn)
            self.shared = MLP(f"{name}.shared", model, output_std, width)

    def __call__(self, x: Tensor, norm: Elementwise, frame: Frame) -> Tensor:
        """Normalise x [rows, hidden] by `norm` and apply the layer; the result has the same
        shape."""
        normed = norm(x, frame.kernels)
        chosen, gates = self.router(normed, frame)
        moe = self.router.moe
        kernels = NO_KERNELS if moe.capacity else frame.kernels  # kernels cannot drop choices
        way = route_tokens(chosen, moe.experts, frame.experts, kernels)
        going = there(way.rows, frame.turn)
        ticket = going.depart(normed)
        weights = there(way.gates, frame.turn).cross(gates)
        shared = None if self.shared is None else self.shared(normed, as_it_is, frame)
        made = self.experts(going.arrive(ticket), weights, way.last, way.dealt, frame)
        out = back(way.rows, frame.turn).cross(made)
        return out if shared is None else out + shared
