"""The MLP: the dense feed-forward half of a block."""

from __future__ import annotations

from functools import partial

from torch import Tensor

from megaframe.architecture.mlp import MLPDescription
from megaframe.model.activation import activate
from megaframe.model.activation_sparsity import GaussianTopK
from megaframe.model.layer_inputs import MicrobatchInputs
from megaframe.model.pass_state import PassState
from megaframe.model.xielu import XIELU
from megaframe.parameters.parameter import Module
from megaframe.tensor_parallel.axis import TensorParallel
from megaframe.tensor_parallel.linear import Elementwise, Linear


class MLP(Module):
    """hidden -> width -> hidden."""

    def __init__(self, name: str, description: MLPDescription, tensor: TensorParallel) -> None:
        """Make the layers.

        Args:
            name: Of the MLP in the model.
            description: What it declares.
            tensor: The tensor ranks, and how products are computed.
        """
        self.up = Linear(f"{name}.up", description.up, tensor)
        self.down = Linear(f"{name}.down", description.down, tensor)
        activation = description.activation
        slopes = activation.slopes
        self.top_gates: GaussianTopK | None = None
        if description.sparsity:
            self.top_gates = GaussianTopK(description, tensor.group)
        self.activate: Elementwise = (
            partial(activate, activation) if slopes is None else XIELU(f"{name}.activation", slopes)
        )

    def __call__(
        self, x: Tensor, norm: Elementwise | None, inputs: MicrobatchInputs, state: PassState
    ) -> Tensor:
        """Apply the MLP to each row. The arguments are those of `Attention`."""
        up = self.up(x, state.deferred, norm)
        up = up if self.top_gates is None else self.top_gates(up)
        return self.down(up, state.deferred, self.activate)
