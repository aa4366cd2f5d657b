"""The MLP: the dense feed-forward half of a block."""

from __future__ import annotations

from functools import partial

from torch import Tensor

from megaframe.architecture.mlp import MLPDescription
from megaframe.model.activation import activate
from megaframe.model.gate_cut_off import GateCutOff
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
        self.cut_off: GateCutOff | None = None
        if description.sparsity:
            self.cut_off = GateCutOff(description, tensor.group)
        self.activate: Elementwise = (
            partial(activate, activation) if slopes is None else XIELU(f"{name}.activation", slopes)
        )

    def __call__(
        self, x: Tensor, norm: Elementwise | None, inputs: MicrobatchInputs, state: PassState
    ) -> Tensor:
        """Apply the MLP to each row. The arguments are those of `Attention`."""
        up = self.up(x, state.deferred, norm)
        up = up if self.cut_off is None else self.cut_off(up)
        return self.down(up, state.deferred, self.activate)
