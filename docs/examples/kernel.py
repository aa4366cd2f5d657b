"""A kernel of one's own, from its reference to its proof: the soft cap of logits.

TRITON_INTERPRET=1 python docs/examples/kernel.py
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from megaframe_kernels.device import ceil_div, launch
from megaframe_kernels.device_math import tanh
from megaframe_kernels.installed import require_nothing
from megaframe_kernels.kernel import Implementation, Kernel, refuse_types
from megaframe_kernels.selection import select
from torch import Tensor

_BLOCK = 1024


def reference(x: Tensor, cap: float) -> Tensor:
    """cap * tanh(x / cap), elementwise (Gemma 2, 2024, section 2)."""
    return cap * torch.tanh(x / cap)


@triton.jit
def _forward(
    x: tl.tensor, y: tl.tensor, length: tl.tensor, cap: tl.tensor, BLOCK: tl.constexpr
) -> None:
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + place, mask=place < length, other=0.0).to(tl.float32)
    result = cap * tanh(value / cap)
    tl.store(y + place, result.to(y.dtype.element_ty), mask=place < length)


@triton.jit
def _backward(
    d_y: tl.tensor,
    x: tl.tensor,
    d_x: tl.tensor,
    length: tl.tensor,
    cap: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < length
    given = tl.load(d_y + place, mask=inside, other=0.0).to(tl.float32)
    slope = tanh(tl.load(x + place, mask=inside, other=0.0).to(tl.float32) / cap)
    tl.store(d_x + place, (given * (1.0 - slope * slope)).to(d_x.dtype.element_ty), mask=inside)


def launch_forward(x: Tensor, cap: float) -> Tensor:
    """As the reference."""
    flat, y = x.contiguous(), torch.empty_like(x, memory_format=torch.contiguous_format)
    launch(_forward, (ceil_div(x.numel(), _BLOCK),), flat, y, x.numel(), cap, BLOCK=_BLOCK)
    return y


def launch_backward(d_y: Tensor, x: Tensor, cap: float) -> Tensor:
    """Gradient of x, from x alone: nothing else is kept."""
    given, flat = d_y.contiguous(), x.contiguous()
    d_x = torch.empty_like(flat)
    grid = (ceil_div(x.numel(), _BLOCK),)
    launch(_backward, grid, given, flat, d_x, x.numel(), cap, BLOCK=_BLOCK)
    return d_x


_forward_op = torch.library.custom_op("example::softcap", launch_forward, mutates_args=())
_backward_op = torch.library.custom_op("example::softcap_back", launch_backward, mutates_args=())


@_forward_op.register_fake
def _(x: Tensor, cap: float) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@_backward_op.register_fake
def _(d_y: Tensor, x: Tensor, cap: float) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(inputs[0])
    ctx.cap = inputs[1]


def _differentiate(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
    return _backward_op(gradients[0], *ctx.saved_tensors, ctx.cap), None


_forward_op.register_autograd(_differentiate, setup_context=_keep)


def _refuse_inputs(x: Tensor, cap: float) -> str | None:
    return refuse_types(x) if cap > 0 else f"a cap of {cap} caps nothing"


KERNEL = Kernel(
    "softcap",
    reference,
    {"triton": Implementation("triton", _forward_op, require_nothing, _refuse_inputs)},
)


def main() -> None:
    """Hold it to its reference in fp64, results and gradients, in three precisions."""
    softcap = select({"softcap": KERNEL}, {"softcap": "triton"})["softcap"]
    torch.manual_seed(0)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        allowed, worst = KERNEL.compute_tolerance(dtype, length=1), 0.0
        for shape in ((3, 1000), (1, 1), (0, 7)):
            x = (5 * torch.randn(shape)).to(dtype).requires_grad_()
            wide = x.detach().double().requires_grad_()
            weights = torch.randn(shape).to(dtype)
            got, want = softcap(x, 3.0), reference(wide, 3.0)
            (d_x,) = torch.autograd.grad(got, x, weights)
            (d_wide,) = torch.autograd.grad(want, wide, weights.double())
            for mine, true in ((got.detach(), want.detach()), (d_x, d_wide)):
                if true.numel():
                    error = (mine.double() - true).abs().max() / true.abs().max()
                    worst = max(worst, float(error) / allowed)
        print(f"{dtype}: error {worst:.2f} of what is allowed")
        if worst > 1:
            raise SystemExit("the kernel is not what its reference is")


if __name__ == "__main__":
    main()
