"""Mixture of experts: the layer that replaces the MLP of a block."""

from __future__ import annotations

from torch import Tensor

from megaframe.architecture.moe import MoEDescription
from megaframe.expert_parallel.dispatch import route_tokens
from megaframe.expert_parallel.transfer import combine_along, dispatch_along
from megaframe.model.layer_inputs import LayerSetup, MicrobatchInputs
from megaframe.model.mlp import MLP
from megaframe.model.moe.experts import Experts
from megaframe.model.moe.router import Router
from megaframe.model.norm import Norm
from megaframe.model.pass_state import PassState
from megaframe.ops.kernel_dispatch import NO_KERNELS
from megaframe.parameters.parameter import Module
from megaframe.tensor_parallel.linear import Elementwise, Linear


class MixtureOfExperts(Module):
    """A router, the experts to which it sends tokens, and optionally a shared MLP for every token,
    which is computed while tokens are in transit."""

    def __init__(self, name: str, description: MoEDescription, setup: LayerSetup) -> None:
        self.setup = setup
        self.router = Router(f"{name}.router", description, setup)
        self.experts = Experts(f"{name}.experts", description, setup)
        self.shared: MLP | None = None
        if description.shared is not None:
            self.shared = MLP(f"{name}.shared", description.shared, setup.tensor)
        gate = description.shared_gate
        self.gate = None if gate is None else Linear(f"{name}.shared_gate", gate, setup.tensor)
        self.norms = {part: Norm(f"{name}.{part}", n) for part, n in description.norms.items()}

    def __call__(
        self, x: Tensor, norm: Elementwise | None, inputs: MicrobatchInputs, state: PassState
    ) -> Tensor:
        """Apply the layer to each row. The arguments are those of `Attention`."""
        normed = x if norm is None else norm(x, self.setup.kernels)
        chosen, gates = self.router(self._normalize("router_norm", normed), inputs, state)
        moe = self.router.moe
        kernels = NO_KERNELS if moe.capacity else self.setup.kernels  # kernels cannot drop choices
        route = route_tokens(chosen, moe.experts, self.setup.experts, kernels)
        rows = dispatch_along(route.rows, state.interleave_hook)
        # The first collective starts here; `in_transit` is an empty tensor that stands for the rows
        # in the autograd graph.
        in_transit = rows.start(self._normalize("experts_norm", normed))
        # Gates take the same way as the rows, so that they can be multiplied in before the experts'
        # second product.
        weights = dispatch_along(route.gates, state.interleave_hook).run(gates)
        # Between start and finish, so that it is computed while rows are in transit.
        shared = None
        if self.shared is not None:
            of_shared = self._normalize("shared_norm", normed)
            shared = self.shared(of_shared, None, inputs, state)
            if self.gate is not None:
                shared = shared * self.gate(of_shared, state.deferred).sigmoid()
            shared = self._normalize("shared_post_norm", shared)
        arrived = rows.finish(in_transit)
        outputs = self.experts(arrived, weights, route.last, route.expert_rows, state)
        combined = combine_along(route.rows, state.interleave_hook).run(outputs)
        combined = self._normalize("experts_post_norm", combined)
        return combined if shared is None else combined + shared

    def _normalize(self, name: str, rows: Tensor) -> Tensor:
        """Return the rows after a norm of the layer's own, if it has one."""
        return self.norms[name](rows, self.setup.kernels) if name in self.norms else rows
