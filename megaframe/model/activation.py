"""Activations: plain (GELU, ReLU, squared ReLU) or gated (SwiGLU, GeGLU, and the clamped SwiGLU of
gpt-oss), with gradients by hand for the gated ones; or from outside.

A gated activation is f(gate) g(up), of two halves of one row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megaframe.architecture.activation import ActivationDescription
from megaframe.config.parts import ActivationPart
from megaframe.ops.kernel_dispatch import NO_KERNELS, Kernels

_CLAMP = 7.0
"""Bound of gate and up in `swiglu_clamped`."""
_SLOPE = 1.702
"""Factor within its sigmoid: x sigmoid(1.702 x) is close to GELU."""


def activate(activation: ActivationDescription, x: Tensor, kernels: Kernels = NO_KERNELS) -> Tensor:
    """Apply an activation.

    Args:
        activation: Which one.
        x: [..., F], or for a gated activation (gate, up) [..., 2F].
        kernels: The kernels of the run.

    Returns:
        The result [..., F], for example silu(gate) * up for swiglu.
    """
    return _select_activation(activation, x, kernels)(x)


def recompute_activation(
    activation: ActivationDescription, x: Tensor, kernels: Kernels = NO_KERNELS
) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """Compute an activation again in a backward pass. The arguments are those of `activate`.

    Returns:
        The result, and a function that turns its gradient into the gradient of x. It may be called
        only once.
    """
    run = _select_activation(activation, x, kernels)
    # By hand: f(gate) is computed once, for the activation and for its gradient.
    if run.func is _activate_gated:
        gate, up = x.chunk(2, -1)
        parts = _find_gated_parts(activation.name, activation.limit)
        opened = parts.open_gate(gate)
        y = opened * parts.prepare_up(up)
        return y, partial(_compute_gated_gradient, parts, x, opened)
    # A graph of its own, from x to y only; it lives until the returned function is called.
    x = x.detach().requires_grad_()
    with torch.enable_grad():
        y = run(x)
    return y.detach(), lambda dy: torch.autograd.grad(y, x, dy)[0]


def _select_activation(
    activation: ActivationDescription, x: Tensor, kernels: Kernels
) -> partial[Tensor]:
    """Return the function that computes this activation for tensors like x: a kernel, or compiled
    or plain code."""
    name = activation.name
    assert activation.slopes is None, f"{name} has parameters, and is a layer"
    if activation.part is not None:
        compute = kernels.maybe_compile(_activate_part)
        return partial(compute, activation.part, activation.gated)
    limit = activation.limit
    if limit is None and (kernel := kernels.find("activation", x, name)):
        return partial(_activate_by_kernel, kernel, name)
    if activation.gated:
        compute = kernels.maybe_compile(_activate_gated, _activate_gated_for_compiler)
        return partial(compute, name, limit)
    return partial(kernels.maybe_compile(_activate), name)


def _activate_part(part: ActivationPart, gated: bool, x: Tensor) -> Tensor:
    y: Tensor = part.compute(*x.chunk(2, -1)) if gated else part.compute(x)
    return y


def _activate_by_kernel(kernel: Callable[..., Tensor], kind: str, x: Tensor) -> Tensor:
    return kernel(x, kind)


def _activate(kind: str, x: Tensor) -> Tensor:
    if kind == "relu":
        # `F.relu` keeps its result; this keeps x, as all others do.
        return F.threshold(x, 0.0, 0.0)
    if kind == "relu2":
        return F.relu(x).square()
    return F.gelu(x, approximate="tanh" if kind == "gelu_tanh" else "none")


def _activate_gated(kind: str, limit: float | None, x: Tensor) -> Tensor:
    y: Tensor = _GatedActivation.apply(x, _find_gated_parts(kind, limit))
    return y


def _activate_gated_for_compiler(kind: str, limit: float | None, x: Tensor) -> Tensor:
    gate, up = x.chunk(2, -1)
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    if kind == "swiglu":
        return F.silu(gate) * up
    if kind == "geglu":
        return F.gelu(gate, approximate="tanh") * up
    gate = gate.clamp(max=_CLAMP)
    return gate * torch.sigmoid(_SLOPE * gate) * (up.clamp(-_CLAMP, _CLAMP) + 1.0)


@dataclass(frozen=True)
class _GatedParts:
    """The parts of a gated activation f(gate) g(up).

    Attributes:
        open_gate: Returns f(gate), in new memory.
        prepare_up: Returns g(up), which may be `up` itself.
        write_gate_gradient: (gradient of f(gate), gate, out) -> writes the gradient of gate.
        mask_up_gradient: (gradient of g(up), up) -> makes it that of up, in place.
    """

    open_gate: Callable[[Tensor], Tensor]
    prepare_up: Callable[[Tensor], Tensor]
    write_gate_gradient: Callable[[Tensor, Tensor, Tensor], None]
    mask_up_gradient: Callable[[Tensor, Tensor], None]


class _GatedActivation(torch.autograd.Function):
    """f(gate) g(up) (Shazeer 2020). Keeps only its input; the backward pass computes f(gate)
    again."""

    @staticmethod
    def forward(ctx: Any, gate_up: Tensor, parts: _GatedParts) -> Tensor:
        ctx.save_for_backward(gate_up)
        ctx.parts = parts
        gate, up = gate_up.chunk(2, -1)
        # In place: f(gate) is new memory, so nothing that is kept changes.
        return parts.open_gate(gate).mul_(parts.prepare_up(up))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (gate_up,) = ctx.saved_tensors
        opened = ctx.parts.open_gate(gate_up.chunk(2, -1)[0])
        return _compute_gated_gradient(ctx.parts, gate_up, opened, gradients[0]), None


def _compute_gated_gradient(
    parts: _GatedParts, gate_up: Tensor, opened: Tensor, dy: Tensor
) -> Tensor:
    """Return the gradient of (gate, up).

    Args:
        parts: Those of the activation.
        gate_up: Both inputs, side by side in the last dim.
        opened: f(gate), which is overwritten.
        dy: Gradient of the result.
    """
    gate, up = gate_up.chunk(2, -1)
    # One tensor for both gradients, written through two views, as the product after it reads them.
    d_gate_up = torch.empty_like(gate_up)
    d_gate, d_up = d_gate_up.chunk(2, -1)
    # First, because the line after it overwrites `opened`.
    torch.mul(dy, opened, out=d_up)
    parts.mask_up_gradient(d_up, up)
    # The buffer of f(gate) takes the gradient of f(gate).
    parts.write_gate_gradient(torch.mul(dy, parts.prepare_up(up), out=opened), gate, d_gate)
    return d_gate_up


def _keep_up(up: Tensor) -> Tensor:
    return up


def _keep_up_gradient(gradient: Tensor, up: Tensor) -> None:
    pass


def _write_silu_gradient(gradient: Tensor, gate: Tensor, out: Tensor) -> None:
    torch.ops.aten.silu_backward(gradient, gate, grad_input=out)


def _write_gelu_gradient(gradient: Tensor, gate: Tensor, out: Tensor) -> None:
    torch.ops.aten.gelu_backward(gradient, gate, approximate="tanh", grad_input=out)


def _open_clamped_gate(gate: Tensor) -> Tensor:
    gate = gate.clamp(max=_CLAMP)
    return torch.sigmoid(_SLOPE * gate).mul_(gate)


def _prepare_clamped_up(up: Tensor) -> Tensor:
    return up.clamp(-_CLAMP, _CLAMP).add_(1.0)


def _write_clamped_gate_gradient(gradient: Tensor, gate: Tensor, out: Tensor) -> None:
    """The derivative of x s with s = sigmoid(1.702 x) is s + 1.702 x s (1 - s)."""
    clamped = gate.clamp(max=_CLAMP)
    share = torch.sigmoid(_SLOPE * clamped)
    slope = torch.addcmul(share, clamped * share, 1.0 - share, value=_SLOPE)
    # Compared this way, NaN is not masked.
    torch.mul(gradient, slope, out=out).masked_fill_(gate > _CLAMP, 0.0)


def _mask_clamped_up_gradient(gradient: Tensor, up: Tensor, limit: float = _CLAMP) -> None:
    gradient.masked_fill_(up.abs() > limit, 0.0)


def _open_limited_gate(limit: float, gate: Tensor) -> Tensor:
    return F.silu(gate.clamp(max=limit), inplace=True)


def _write_limited_silu_gradient(limit: float, gradient: Tensor, gate: Tensor, out: Tensor) -> None:
    _write_silu_gradient(gradient, gate.clamp(max=limit), out)
    out.masked_fill_(gate > limit, 0.0)  # compared this way, NaN is not masked


_GATED_PARTS: Mapping[str, _GatedParts] = {
    "swiglu": _GatedParts(F.silu, _keep_up, _write_silu_gradient, _keep_up_gradient),
    "geglu": _GatedParts(
        partial(F.gelu, approximate="tanh"), _keep_up, _write_gelu_gradient, _keep_up_gradient
    ),
    "swiglu_clamped": _GatedParts(
        _open_clamped_gate,
        _prepare_clamped_up,
        _write_clamped_gate_gradient,
        _mask_clamped_up_gradient,
    ),
}


@lru_cache(maxsize=64)
def _find_gated_parts(kind: str, limit: float | None) -> _GatedParts:
    """Return the parts of an activation, of SwiGLU perhaps with a limit of gate and up."""
    if limit is None:
        return _GATED_PARTS[kind]
    return _GatedParts(
        partial(_open_limited_gate, limit),
        partial(torch.clamp, min=-limit, max=limit),
        partial(_write_limited_silu_gradient, limit),
        partial(_mask_clamped_up_gradient, limit=limit),
    )
