"""Sum of squares of a flat span in fp64, from which gradient norms are made.

At one product per element, memory is slower than the fp64 units of a datacenter GPU, so exactness
costs nothing there: no square overflows, and up to 1e-15 the sum does not depend on how the span is
divided into shards. The order of sums depends only on the length and the GPU.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from megaframe_kernels.device import ceil_div, count_processors, launch
from megaframe_kernels.direct import bypass_dispatcher
from megaframe_kernels.installed import require_nothing
from megaframe_kernels.kernel import Implementation, Kernel, refuse_nothing, refuse_types

_BLOCK = 4096
_PROGRAMS = 4
"""Programs per multiprocessor. The registers of this many fit at once, so all run at the same
time."""


def run_reference(x: Tensor) -> Tensor:
    """Return the sum of x^2 over all elements, an fp64 scalar; infinite or NaN if an element is."""
    return x.to(torch.float64).square().sum()


@triton.jit
def _sum_part(x: tl.tensor, sums: tl.tensor, length: tl.tensor, BLOCK: tl.constexpr) -> None:
    """sums[i] = sum of x^2 over the blocks of program i, in fp64."""
    total = tl.zeros([BLOCK], tl.float64)
    # A fixed number of programs strides over the span, each over its own blocks.
    step = tl.num_programs(0).to(tl.int64) * BLOCK
    for start in range(tl.program_id(0).to(tl.int64) * BLOCK, length, step):
        place = start + tl.arange(0, BLOCK)
        # Widened before it is squared, so no square overflows.
        value = tl.load(x + place, mask=place < length, other=0.0).to(tl.float64)
        total += value * value
    tl.store(sums + tl.program_id(0), tl.sum(total, 0))


def launch_sum(x: Tensor) -> Tensor:
    """Compute the reference in Triton."""
    flat = x.contiguous()
    # Depends on length and GPU only, and with it the order of sums.
    programs = min(ceil_div(flat.numel(), _BLOCK), count_processors(flat) * _PROGRAMS)
    sums = flat.new_empty(programs, dtype=torch.float64)
    launch(_sum_part, (programs,), flat, sums, flat.numel(), BLOCK=_BLOCK, warps=8)
    # One fp64 number per program; torch adds them on the device.
    return sums.sum()


_sum_op = torch.library.custom_op("megaframe::square_sum", launch_sum, mutates_args=())


@_sum_op.register_fake
def _(x: Tensor) -> Tensor:
    return x.new_empty((), dtype=torch.float64)


run_triton = bypass_dispatcher(_sum_op, launch_sum)


def run_torch(x: Tensor) -> Tensor:
    """Compute the reference by torch's own norm, which holds if no square overflows."""
    # The square is taken of the fp32 norm, which is infinite if a square overflowed.
    wide = torch.promote_types(x.dtype, torch.float32)
    return torch.linalg.vector_norm(x, dtype=wide).double().square()


KERNEL = Kernel(
    "square_sum",
    run_reference,
    {
        "triton": Implementation("triton", run_triton, require_nothing, refuse_types),
        "torch": Implementation("torch", run_torch, require_nothing, refuse_nothing),
    },
)
