"""LayerNorm and RMSNorm, optionally of the sum with a residual, in one pass over memory each way.

The backward pass runs a few programs that loop over rows. Each sums its part of the gain's gradient
in registers, and the parts are added at the end. The number of programs depends only on the GPU and
the shape, and so does the order of sums, so results are bitwise repeatable.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megaframe_kernels.device import (
    ceil_div,
    count_processors,
    flatten_rows,
    launch,
    next_power_of_2,
)
from megaframe_kernels.direct import bypass_dispatcher
from megaframe_kernels.elementwise import norm_device
from megaframe_kernels.installed import check_liger, require_nothing
from megaframe_kernels.kernel import Implementation, Kernel, refuse_nothing, refuse_types

_WIDEST = 16384
"""Widest row of a 16-bit type."""
_WHOLE = 8192
"""Widest row that the backward pass keeps in registers, and the widest in fp32: a wider one needs
registers for twice the addresses of loads, and with some versions of Triton it spills."""
_TILE = 1024
"""Elements of a program's tile if rows are narrow."""
WARPS_PER_PROCESSOR = 16
"""Of the programs of a backward pass."""


def run_reference(
    x: Tensor,
    gain: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    *,
    kind: str = "rmsnorm",
    eps: float = 1e-5,
) -> tuple[Tensor, Tensor]:
    """t = x + residual; y = normalised t times gain (plus bias), over the last dim.

    rmsnorm: t / sqrt(mean(t^2) + eps) (Zhang and Sennrich 2019). layernorm: (t - mean) /
    sqrt(variance + eps) (Ba et al. 2016).

    Args:
        x: [..., width].
        gain: [width].
        bias: [width], or None.
        residual: [..., width], or None for t = x.
        kind: rmsnorm or layernorm.
        eps: Added to the mean square.

    Returns:
        (y, t), both [..., width].
    """
    total = x if residual is None else x + residual
    wide = total.to(torch.promote_types(total.dtype, torch.float32))
    if kind == "layernorm":
        # In fp32 at least; y is rounded once.
        wide = wide - wide.mean(-1, keepdim=True)
    y = wide * (wide.square().mean(-1, keepdim=True) + eps).rsqrt() * gain
    if bias is not None:
        y = y + bias
    return y.to(total.dtype), total


def choose_tile(x: Tensor) -> tuple[int, int, int]:
    """Return the rows and width of a tile of x [rows, width], and its number of warps, for 16 to 32
    elements per thread."""
    padded = next_power_of_2(max(x.shape[1], 16))
    rows = max(1, _TILE // padded)
    warps = min(16, max(1, rows * padded // 512))
    return rows, padded, warps


def launch_forward(
    x: Tensor, residual: Tensor | None, gain: Tensor, bias: Tensor | None, center: bool, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute the norm in Triton.

    Args:
        x: [..., width].
        residual: [..., width], or None.
        gain: [width].
        bias: [width], or None.
        center: Whether the mean is subtracted (layernorm).
        eps: Added to the mean square.

    Returns:
        y, total (empty without a residual), means (empty for rmsnorm) and scales, fp32 [rows].
    """
    flat = flatten_rows(x)
    rows, width = flat.shape
    added = None if residual is None else flatten_rows(residual)
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    # Without a residual, x is the sum, and the backward pass reads it.
    total = x.new_empty(0) if added is None else torch.empty_like(y)
    scales = x.new_empty(rows, dtype=torch.float32)
    means = torch.empty_like(scales) if center else scales.new_empty(0)
    tile_rows, tile_width, warps = choose_tile(flat)
    launch(
        norm_device.forward,
        (ceil_div(rows, tile_rows),),
        flat,
        added,
        gain.contiguous(),
        None if bias is None else bias.contiguous(),
        y,
        total,
        means,
        scales,
        rows,
        width,
        flat.stride(0),
        0 if added is None else added.stride(0),
        eps,
        CENTER=center,
        ROWS=tile_rows,
        WIDTH=tile_width,
        warps=warps,
    )
    return y, total, means, scales


def launch_backward(
    d_y: Tensor,
    d_total: Tensor | None,
    total: Tensor,
    gain: Tensor,
    means: Tensor,
    scales: Tensor,
    with_bias: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the gradients in Triton.

    Args:
        d_y: Gradient of the result, [..., width].
        d_total: Gradient of the sum with the residual, [..., width], or None.
        total: What was normalised, [..., width].
        gain: [width].
        means: fp32 [rows], empty for rmsnorm.
        scales: fp32 [rows], from the forward pass.
        with_bias: Whether there is a bias.

    Returns:
        The gradients of total, gain and bias (empty without a bias).
    """
    flat, d_flat = flatten_rows(total), flatten_rows(d_y)
    d_added = None if d_total is None else flatten_rows(d_total)
    rows, width = flat.shape
    tile_rows, tile_width, warps = choose_tile(flat)
    wide = tile_width > _WHOLE
    # No more programs than tiles. Only GPU and shape decide, so the order of sums is repeatable.
    together = count_processors(total) * max(1, WARPS_PER_PROCESSOR // warps)
    programs = min(together, max(1, ceil_div(rows, tile_rows)))
    d_x = torch.empty_like(total, memory_format=torch.contiguous_format)
    # Every program writes its row of partial sums. Without rows none runs, so they must be 0.
    d_gain = scales.new_empty(programs, width) if rows else scales.new_zeros(programs, width)
    # Wide rows have no registers for this sum; torch takes it from d_y below.
    d_bias = torch.zeros_like(d_gain) if with_bias and not wide else None
    launch(
        norm_device.backward_wide if wide else norm_device.backward,
        (programs if rows else 0,),
        d_flat,
        d_added,
        flat,
        gain.contiguous(),
        means,
        scales,
        d_x,
        d_gain,
        *(() if wide else (d_bias,)),
        rows,
        width,
        d_flat.stride(0),
        0 if d_added is None else d_added.stride(0),
        flat.stride(0),
        CENTER=means.numel() > 0,
        warps=warps,
        **({"HALF": tile_width // 2} if wide else {"ROWS": tile_rows, "WIDTH": tile_width}),
    )
    bias_sum = gain.new_empty(0)
    if with_bias:
        parts = d_flat if d_bias is None else d_bias
        # Partial sums are added in fp32 in a fixed order, and rounded once.
        bias_sum = parts.sum(0, dtype=torch.float32).to(gain.dtype)
    return d_x, d_gain.sum(0).to(gain.dtype), bias_sum


_forward_op = torch.library.custom_op("megaframe::norm", launch_forward, mutates_args=())
_backward_op = torch.library.custom_op("megaframe::norm_backward", launch_backward, mutates_args=())


@_forward_op.register_fake
def _(
    x: Tensor, residual: Tensor | None, gain: Tensor, bias: Tensor | None, center: bool, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    rows = x.numel() // x.shape[-1] if x.shape[-1] else 0
    scales = x.new_empty(rows, dtype=torch.float32)
    total = x.new_empty(0) if residual is None else torch.empty_like(y)
    return y, total, scales.new_empty(rows if center else 0), scales


@_backward_op.register_fake
def _(
    d_y: Tensor,
    d_total: Tensor | None,
    total: Tensor,
    gain: Tensor,
    means: Tensor,
    scales: Tensor,
    with_bias: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    d_x = torch.empty_like(total, memory_format=torch.contiguous_format)
    shape = gain.shape if with_bias else (0,)
    return d_x, gain.new_empty(gain.shape), gain.new_empty(shape)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, residual, gain, bias, _, _ = inputs
    _, total, means, scales = output
    # The sum is an output too, so saving it takes no memory of its own.
    ctx.save_for_backward(x if residual is None else total, gain, means, scales)
    ctx.added, ctx.with_bias = residual is not None, bias is not None
    ctx.bias_dtype = None if bias is None else bias.dtype
    # None instead of zeros for an output that nothing used: the kernel then reads no d_total.
    ctx.set_materialize_grads(False)


def _compute_gradients(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
    total, gain, means, scales = ctx.saved_tensors
    d_y, d_total = gradients[0], gradients[1] if ctx.added else None
    d_y = torch.zeros_like(total) if d_y is None else d_y
    d_x, d_gain, d_bias = _direct_backward(d_y, d_total, total, gain, means, scales, ctx.with_bias)
    return (
        d_x,
        # x and residual have the same gradient: one tensor serves both.
        d_x if ctx.added else None,
        d_gain,
        d_bias.to(ctx.bias_dtype) if ctx.with_bias else None,
        None,
        None,
    )


_forward_op.register_autograd(_compute_gradients, setup_context=_keep)
_direct_forward = bypass_dispatcher(_forward_op, launch_forward, _keep, _compute_gradients)
_direct_backward = bypass_dispatcher(_backward_op, launch_backward)


def run_triton(
    x: Tensor,
    gain: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    *,
    kind: str = "rmsnorm",
    eps: float = 1e-5,
) -> tuple[Tensor, Tensor]:
    """Compute the reference in Triton."""
    y, total, _, _ = _direct_forward(x, residual, gain, bias, kind == "layernorm", eps)
    return y, x if residual is None else total


def run_torch(
    x: Tensor,
    gain: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    *,
    kind: str = "rmsnorm",
    eps: float = 1e-5,
) -> tuple[Tensor, Tensor]:
    """Compute the reference by torch's own norms."""
    total = x if residual is None else x + residual
    shape = (total.shape[-1],)
    # torch's norms take one type, so the gain is rounded, unlike in the kernel.
    gain = gain.to(total.dtype)
    if kind == "layernorm":
        return F.layer_norm(
            total, shape, gain, None if bias is None else bias.to(total.dtype), eps
        ), total
    y = F.rms_norm(total, shape, gain, eps)
    return y if bias is None else y + bias.to(total.dtype), total


def run_liger(
    x: Tensor,
    gain: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    *,
    kind: str = "rmsnorm",
    eps: float = 1e-5,
) -> tuple[Tensor, Tensor]:
    """Compute the reference by Liger-Kernel."""
    from liger_kernel.transformers import functional

    total = x if residual is None else x + residual
    if kind == "layernorm":
        bias = torch.zeros_like(gain) if bias is None else bias
        return functional.liger_layer_norm(total, gain, bias, eps), total
    return functional.liger_rms_norm(total, gain, eps, in_place=False), total


def _refuse_inputs(
    x: Tensor, gain: Tensor, bias: Tensor | None = None, residual: Tensor | None = None, **_: Any
) -> str | None:
    widest = _WHOLE if x.dtype == torch.float32 else _WIDEST
    if x.shape[-1] > widest:
        return f"a row of {x.shape[-1]} does not fit in registers; at most {widest} does"
    return refuse_types(x, gain, bias, residual)


def _refuse_for_liger(
    x: Tensor, gain: Tensor, bias: Tensor | None = None, *_: Any, kind: str = "rmsnorm", **__: Any
) -> str | None:
    if bias is not None and kind == "rmsnorm":
        return "Liger's RMSNorm has no bias"
    return None if x.is_cuda else "tensors are not on a GPU"


KERNEL = Kernel(
    "norm",
    run_reference,
    {
        "triton": Implementation("triton", run_triton, require_nothing, _refuse_inputs),
        "torch": Implementation("torch", run_torch, require_nothing, refuse_nothing),
        "liger": Implementation("liger", run_liger, check_liger, _refuse_for_liger),
    },
)
