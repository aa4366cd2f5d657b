"""Gated activations, GELU, ReLU and squared ReLU. The backward pass recomputes them.

Only the input is saved, so a block keeps one wide activation instead of two. Gated activations read
gate and up from the two halves of a row, as the fused linear before it writes them.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from megaframe_kernels.device import ceil_div, flatten_rows, launch, next_power_of_2
from megaframe_kernels.direct import bypass_dispatcher
from megaframe_kernels.installed import check_liger, require_nothing
from megaframe_kernels.kernel import Implementation, Kernel, refuse_nothing, refuse_types

GATED = ("swiglu", "geglu", "swiglu_clamped")
KINDS = (*GATED, "gelu", "gelu_tanh", "relu", "relu2")
_TILE = 2048
_COLUMNS = 1024


def run_reference(x: Tensor, kind: str) -> Tensor:
    """Apply the activation to x.

    gelu: x Phi(x), or its tanh form (Hendrycks and Gimpel 2016). relu: max(x, 0), and relu2 its
    square (So et al. 2021). swiglu: silu(gate) up (Shazeer 2020). geglu: gelu_tanh(gate) up.
    swiglu_clamped: (up + 1) gate sigmoid(1.702 gate), with gate at most 7 and up within -7 and 7
    (gpt-oss, 2025).

    Args:
        x: [..., F]; for gated kinds [..., 2F], which is (gate, up).
        kind: One of `KINDS`.

    Returns:
        The activation, [..., F].
    """
    if kind in GATED:
        gate, up = x.chunk(2, -1)
        if kind == "swiglu":
            return F.silu(gate) * up
        if kind == "geglu":
            return F.gelu(gate, approximate="tanh") * up
        gate = gate.clamp(max=7.0)
        return gate * torch.sigmoid(1.702 * gate) * (up.clamp(-7.0, 7.0) + 1.0)
    if kind == "relu":
        return F.relu(x)
    if kind == "relu2":
        return F.relu(x).square()
    return F.gelu(x, approximate="tanh" if kind == "gelu_tanh" else "none")


@triton.jit
def _tile(
    rows: tl.tensor, width: tl.tensor, ROWS: tl.constexpr, COLUMNS: tl.constexpr
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Return the rows, columns and mask of this program."""
    across = tl.cdiv(width, COLUMNS)
    # 64-bit: rows times width may exceed 32 bits.
    row = (tl.program_id(0) // across).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = (tl.program_id(0) % across) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    return row, column, (row < rows) & (column < width)


@triton.jit
def _compute_gelu_share(value: tl.tensor, TANH: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """Return gelu(x) / x and its derivative."""
    if TANH:
        # Beyond 20 the share is 0 or 1 in fp32, and the cube could overflow.
        near = tl.clamp(value, -20.0, 20.0, propagate_nan=tl.PropagateNan.ALL)
        # (1 + tanh(u)) / 2 = sigmoid(2 u), so the factor is 2 sqrt(2 / pi).
        share = tl.sigmoid(1.5957691216057308 * (near + 0.044715 * near * near * near))
        inner = 1.5957691216057308 * (1.0 + 0.134145 * near * near)
        return share, share * (1.0 - share) * inner
    # Phi(x); its derivative is the density exp(-x^2 / 2) / sqrt(2 pi).
    share = 0.5 + 0.5 * tl.erf(value * 0.7071067811865476)
    return share, 0.3989422804014327 * tl.exp(-0.5 * value * value)


@triton.jit
def _forward(
    x: tl.tensor,
    y: tl.tensor,
    rows: tl.tensor,
    width: tl.tensor,
    stride: tl.tensor,
    KIND: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    """y = f(x) for one tile."""
    row, column, inside = _tile(rows, width, ROWS, COLUMNS)
    # All in fp32; the result is rounded once, when stored.
    value = tl.load(x + row * stride + column, mask=inside, other=0.0).to(tl.float32)
    if KIND == "swiglu" or KIND == "geglu" or KIND == "swiglu_clamped":
        # The second half of the row, as the fused linear wrote it.
        up = tl.load(x + row * stride + width + column, mask=inside, other=0.0).to(tl.float32)
        if KIND == "swiglu":
            result = value * tl.sigmoid(value) * up
        elif KIND == "geglu":
            share, _ = _compute_gelu_share(value, True)
            result = value * share * up
        else:
            value = tl.minimum(value, 7.0, propagate_nan=tl.PropagateNan.ALL)
            up = tl.clamp(up, -7.0, 7.0, propagate_nan=tl.PropagateNan.ALL)
            result = value * tl.sigmoid(1.702 * value) * (up + 1.0)
    elif KIND == "relu" or KIND == "relu2":
        # A plain maximum would turn NaN into 0.
        positive = tl.maximum(value, 0.0, propagate_nan=tl.PropagateNan.ALL)
        result = positive * positive if KIND == "relu2" else positive
    else:
        share, _ = _compute_gelu_share(value, KIND == "gelu_tanh")
        result = value * share
    tl.store(y + row * width + column, result.to(y.dtype.element_ty), mask=inside)


@triton.jit
def _backward(
    d_y: tl.tensor,
    x: tl.tensor,
    d_x: tl.tensor,
    rows: tl.tensor,
    width: tl.tensor,
    d_stride: tl.tensor,
    stride: tl.tensor,
    KIND: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    """d_x = d_y f'(x) for one tile. For swiglu, with s = sigmoid(gate): d_gate = d_y up s (1 + gate
    (1 - s)), d_up = d_y gate s; other gated kinds alike."""
    row, column, inside = _tile(rows, width, ROWS, COLUMNS)
    value = tl.load(x + row * stride + column, mask=inside, other=0.0).to(tl.float32)
    d_value = tl.load(d_y + row * d_stride + column, mask=inside, other=0.0).to(tl.float32)
    at = d_x + row * width + column
    if KIND == "swiglu" or KIND == "geglu" or KIND == "swiglu_clamped":
        up = tl.load(x + row * stride + width + column, mask=inside, other=0.0).to(tl.float32)
        # Gradients of gate and up are the two halves of one row, like their input.
        at = d_x + row * (2 * width) + column
        if KIND == "swiglu":
            # The slope of x sigmoid(x) is s (1 + x (1 - s)).
            share = tl.sigmoid(value)
            d_up = d_value * value * share
            result = d_value * up * share * (1.0 + value * (1.0 - share))
        elif KIND == "geglu":
            share, slope = _compute_gelu_share(value, True)
            near = tl.clamp(value, -20.0, 20.0, propagate_nan=tl.PropagateNan.ALL)
            d_up = d_value * value * share
            result = d_value * up * (share + near * slope)
        else:
            gate = tl.minimum(value, 7.0, propagate_nan=tl.PropagateNan.ALL)
            share = tl.sigmoid(1.702 * gate)
            factor = tl.clamp(up, -7.0, 7.0, propagate_nan=tl.PropagateNan.ALL) + 1.0
            # Nothing changes with what is clamped. Compared this way, NaN is not masked.
            d_up = tl.where(tl.abs(up) > 7.0, 0.0, d_value * gate * share)
            slope = share * (1.0 + 1.702 * gate * (1.0 - share))
            result = tl.where(value > 7.0, 0.0, d_value * factor * slope)
        tl.store(at + width, d_up.to(d_x.dtype.element_ty), mask=inside)
    elif KIND == "relu":
        # NaN stays NaN, as under all others.
        result = tl.where(value > 0.0, d_value, tl.where(value <= 0.0, 0.0, value))
    elif KIND == "relu2":
        result = d_value * 2.0 * tl.maximum(value, 0.0, propagate_nan=tl.PropagateNan.ALL)
    else:
        share, slope = _compute_gelu_share(value, KIND == "gelu_tanh")
        # Beyond 20 the slope is 0, and an infinite value times 0 would be NaN.
        near = tl.clamp(value, -20.0, 20.0, propagate_nan=tl.PropagateNan.ALL)
        result = d_value * (share + near * slope)
    tl.store(at, result.to(d_x.dtype.element_ty), mask=inside)


def _choose_grid(rows: int, width: int) -> tuple[tuple[int], dict[str, int]]:
    """Return the grid and the tile sizes."""
    columns = min(next_power_of_2(max(width, 16)), _COLUMNS)
    tall = _TILE // columns
    grid = (ceil_div(rows, tall) * ceil_div(width, columns),)
    return grid, {"ROWS": tall, "COLUMNS": columns}


def launch_forward(x: Tensor, kind: str) -> Tensor:
    """Return the activation of x."""
    flat = flatten_rows(x)
    # The width of the result, not of the input.
    width = flat.shape[1] // 2 if kind in GATED else flat.shape[1]
    y = x.new_empty(*x.shape[:-1], width)
    grid, tile = _choose_grid(flat.shape[0], width)
    launch(_forward, grid, flat, y, flat.shape[0], width, flat.stride(0), KIND=kind, **tile)
    return y


def launch_backward(d_y: Tensor, x: Tensor, kind: str) -> Tensor:
    """Return the gradient of x.

    Args:
        d_y: Gradient of the result.
        x: The input.
        kind: The activation.
    """
    flat, d_flat = flatten_rows(x), flatten_rows(d_y)
    d_x = torch.empty_like(x, memory_format=torch.contiguous_format)
    rows, width = d_flat.shape
    grid, tile = _choose_grid(rows, width)
    strides = d_flat.stride(0), flat.stride(0)
    launch(_backward, grid, d_flat, flat, d_x, rows, width, *strides, KIND=kind, **tile)
    return d_x


_forward_op = torch.library.custom_op("megaframe::activation", launch_forward, mutates_args=())
_backward_op = torch.library.custom_op(
    "megaframe::activation_backward", launch_backward, mutates_args=()
)


@_forward_op.register_fake
def _(x: Tensor, kind: str) -> Tensor:
    return x.new_empty(*x.shape[:-1], x.shape[-1] // 2 if kind in GATED else x.shape[-1])


@_backward_op.register_fake
def _(d_y: Tensor, x: Tensor, kind: str) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    # Only the input; the activation is computed again in the backward pass.
    ctx.save_for_backward(inputs[0])
    ctx.kind = inputs[1]


def _compute_gradients(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
    return _direct_backward(gradients[0], *ctx.saved_tensors, ctx.kind), None


_forward_op.register_autograd(_compute_gradients, setup_context=_keep)
_direct_forward = bypass_dispatcher(_forward_op, launch_forward, _keep, _compute_gradients)
_direct_backward = bypass_dispatcher(_backward_op, launch_backward)


def run_triton(x: Tensor, kind: str = "swiglu") -> Tensor:
    """Compute the reference in Triton."""
    return _direct_forward(x, kind)


def run_liger(x: Tensor, kind: str) -> Tensor:
    """Compute the reference by Liger-Kernel."""
    from liger_kernel.transformers import functional

    return functional.liger_swiglu(*(part.contiguous() for part in x.chunk(2, -1)))


def _refuse_inputs(x: Tensor, kind: str) -> str | None:
    if kind in GATED and x.shape[-1] % 2:
        return f"a row of {x.shape[-1]} does not split into two halves"
    return refuse_types(x)


def _refuse_for_liger(x: Tensor, kind: str) -> str | None:
    if kind != "swiglu":
        return "it is used for swiglu only"
    return None if x.is_cuda else "tensors are not on a GPU"


KERNEL = Kernel(
    "activation",
    run_reference,
    {
        "triton": Implementation("triton", run_triton, require_nothing, _refuse_inputs),
        "torch": Implementation("torch", run_reference, require_nothing, refuse_nothing),
        "liger": Implementation("liger", run_liger, check_liger, _refuse_for_liger),
    },
    # Arguments of exponentials reach 10 where the result matters, and their rounding grows with it.
    constant=16.0,
)
