"""The feed-forward half of a block: plain (GELU, squared ReLU) or gated (SwiGLU)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megaframe.architecture.mlp import MLPDescription
from megaframe.model.forward_context import MicrobatchContext
from megaframe.model.pass_state import PassState
from megaframe.ops.kernel_dispatch import NO_KERNELS, Kernels
from megaframe.parameters.parameter import Module
from megaframe.tensor_parallel.context import TensorParallel
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
        self.activation = description.activation
        self.up = Linear(f"{name}.up", description.up, tensor)
        self.down = Linear(f"{name}.down", description.down, tensor)

    def __call__(
        self, x: Tensor, norm: Elementwise | None, context: MicrobatchContext, state: PassState
    ) -> Tensor:
        """Apply the MLP to each row. The arguments are those of `Attention`."""
        up = self.up(x, state.deferred, norm)
        return self.down(up, state.deferred, partial(activate, self.activation))


def activate(kind: str, x: Tensor, kernels: Kernels = NO_KERNELS) -> Tensor:
    """Apply an activation.

    Args:
        kind: Its name, as in `model.activation`.
        x: [..., F], or for swiglu (gate, up) [..., 2F].
        kernels: The kernels of the run.

    Returns:
        The result [..., F], for swiglu silu(gate) * up.
    """
    return _select_activation(kind, x, kernels)(kind, x)


def recompute_activation(
    kind: str, x: Tensor, kernels: Kernels = NO_KERNELS
) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """Compute an activation again in a backward pass. The arguments are those of `activate`.

    Returns:
        The result, and a function that turns its gradient into the gradient of x. It may be called
        only once.
    """
    run = _select_activation(kind, x, kernels)
    # By hand: silu(gate) is computed once, for the activation and for its gradient.
    if kind == "swiglu" and run is _activate:
        gate, up = x.chunk(2, -1)
        silu = F.silu(gate)
        return silu * up, partial(_compute_swiglu_gradient, x, silu)
    # A graph of its own, from x to y only; it lives until the returned function is called.
    x = x.detach().requires_grad_()
    with torch.enable_grad():
        y = run(kind, x)
    return y.detach(), lambda dy: torch.autograd.grad(y, x, dy)[0]


def _select_activation(kind: str, x: Tensor, kernels: Kernels) -> Callable[[str, Tensor], Tensor]:
    """Return the function that computes this activation for tensors like x: a kernel, or compiled
    or plain code."""
    if run := kernels.find("activation", x, kind):
        return lambda kind, x: run(x, kind)
    return kernels.maybe_compile(_activate, _activate_for_compiler)


def _activate(kind: str, x: Tensor) -> Tensor:
    if kind == "swiglu":
        return _SwiGLU.apply(x)
    if kind == "relu2":
        return F.relu(x).square()
    return F.gelu(x, approximate="tanh" if kind == "gelu_tanh" else "none")


def _activate_for_compiler(kind: str, x: Tensor) -> Tensor:
    if kind == "swiglu":
        gate, up = x.chunk(2, -1)
        return F.silu(gate) * up
    return _activate(kind, x)


class _SwiGLU(torch.autograd.Function):
    """silu(gate) * up (Shazeer 2020). Keeps only its input; the backward pass computes silu(gate)
    again."""

    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up)
        gate, up = gate_up.chunk(2, -1)
        # In place: `silu` returns new memory, so nothing that is kept changes.
        return F.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (gate_up,) = ctx.saved_tensors
        return _compute_swiglu_gradient(gate_up, F.silu(gate_up.chunk(2, -1)[0]), gradients[0])


def _compute_swiglu_gradient(gate_up: Tensor, silu: Tensor, dy: Tensor) -> Tensor:
    """Return the gradient of (gate, up). silu: silu(gate), which is overwritten."""
    gate, up = gate_up.chunk(2, -1)
    # One tensor for both gradients, written through two views, as the product after it reads them.
    d_gate_up = torch.empty_like(gate_up)
    d_gate, d_up = d_gate_up.chunk(2, -1)
    # First, because the next line overwrites `silu`.
    torch.mul(dy, silu, out=d_up)
    # The buffer of `silu` takes dy * up, the gradient of silu(gate).
    torch.ops.aten.silu_backward(torch.mul(dy, up, out=silu), gate, grad_input=d_gate)
    return d_gate_up
