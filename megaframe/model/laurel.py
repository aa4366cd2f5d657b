"""Learned augmented residuals (`LaurelDescription`)."""

from __future__ import annotations

from torch import Tensor

from megaframe.architecture.laurel import LaurelDescription
from megaframe.model.layer_inputs import LayerSetup, MicrobatchInputs
from megaframe.model.norm import Norm
from megaframe.model.pass_state import PassState
from megaframe.parameters.parameter import Module
from megaframe.tensor_parallel.linear import Elementwise, Linear


class Laurel(Module):
    """x + norm(right(left(x))), which a block adds to the stream beside its mixers."""

    def __init__(self, name: str, description: LaurelDescription, setup: LayerSetup) -> None:
        self.left = Linear(f"{name}.left", description.left, setup.tensor)
        self.right = Linear(f"{name}.right", description.right, setup.tensor)
        self.norm = Norm(f"{name}.post_norm", description.norm)
        self.kernels = setup.kernels

    def __call__(
        self, x: Tensor, norm: Elementwise | None, inputs: MicrobatchInputs, state: PassState
    ) -> Tensor:
        """Compute what is added to each row. The arguments are those of `Attention`."""
        # Not left to the first product, because its input is added as well.
        x = x if norm is None else norm(x, self.kernels)
        low = self.left(x, state.deferred)
        return x + self.norm(self.right(low, state.deferred), self.kernels)
