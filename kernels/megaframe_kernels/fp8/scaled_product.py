"""Product of two matrices in 8 bits, whose scales are per tensor, per row or per block, by torch.

Shape legend: M and N rows of the two matrices, K summed over.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megaframe_kernels.device import read_capability
from megaframe_kernels.fp8.quantize import SHARED, format_capability, refuse_chip
from megaframe_kernels.installed import check_cuda
from megaframe_kernels.kernel import Implementation, Kernel


def run_reference(
    a_MK: Tensor,
    b_NK: Tensor,
    a_scales: Tensor,
    b_scales: Tensor,
    dtype: torch.dtype = torch.bfloat16,
    fast: bool = False,
) -> Tensor:
    """Return a b^T of quantised matrices, rounded once to `dtype`.

    Args:
        a_MK: [M, K] in 8 bits.
        b_NK: [N, K] in 8 bits.
        a_scales: One per tensor, [1, 1], per row, [M, 1], or per 128 elements of a row,
            [M, ceil(K / 128)], as from `quantize.run_reference`.
        b_scales: Likewise, for N rows; in the last case 128 rows of b may share them.
        dtype: Type of the result.
        fast: Whether a GPU may keep sums in the fewer bits of its matrix units, as is usual for the
            forward pass and not for gradients (torchao, TransformerEngine). The reference does not.

    Returns:
        [M, N].
    """
    wide = torch.promote_types(dtype, torch.float32)
    # Restored, multiplied and summed in fp32 at least; rounded once to `dtype`.
    a, b = (_dequantize(x, s, wide) for x, s in ((a_MK, a_scales), (b_NK, b_scales)))
    return (a @ b.t()).to(dtype)


def _dequantize(x_RC: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    by = scales.to(dtype)
    if scales.shape[0] not in (1, x_RC.shape[0]):
        by = by.repeat_interleave(SHARED, 0)[: x_RC.shape[0]]
    if scales.shape[1] > 1:
        by = by.repeat_interleave(SHARED, 1)[:, : x_RC.shape[1]]
    return x_RC.to(dtype) * by


def run_torch(
    a_MK: Tensor,
    b_NK: Tensor,
    a_scales: Tensor,
    b_scales: Tensor,
    dtype: torch.dtype = torch.bfloat16,
    fast: bool = False,
) -> Tensor:
    """Compute the reference by torch's scaled product."""
    if a_scales.shape == b_scales.shape == (1, 1):
        scales = a_scales[0, 0], b_scales[0, 0]
    elif a_scales.shape[1] == 1 and b_scales.shape == (b_NK.shape[0], 1):
        scales = a_scales, b_scales.t()
    else:  # scales of blocks: torch expects those of adjacent rows to be adjacent
        fast = False  # each block is scaled and added in fp32
        # Strides change here, not the numbers.
        by_block = b_scales.shape[0] != b_NK.shape[0]
        scales = (
            a_scales.t().contiguous().t(),
            b_scales.t() if by_block else b_scales.t().contiguous(),
        )
    left, right = scales
    return torch._scaled_mm(
        a_MK, b_NK.t(), scale_a=left, scale_b=right, out_dtype=dtype, use_fast_accum=fast
    )


def _refuse_inputs(
    a_MK: Tensor,
    b_NK: Tensor,
    a_scales: Tensor,
    b_scales: Tensor,
    dtype: torch.dtype = torch.bfloat16,
    fast: bool = False,
) -> str | None:
    if not a_MK.is_cuda:
        return "torch's scaled product needs a GPU"
    if reason := refuse_chip(a_MK):
        return reason
    of_tensors = a_scales.shape == b_scales.shape == (1, 1)
    shared = not of_tensors and b_scales.shape[0] != b_NK.shape[0]
    if shared or a_scales.shape[1] > 1:
        if read_capability(a_MK.device.index)[0] != 9:
            return (
                "torch's scaled product takes scales of 128 on compute capability 9.0, and this "
                f"GPU has {format_capability(a_MK)}"
            )
        if _read_cuda_version() < (12, 9):  # whose cuBLASLt is the first that has them
            return "torch's scaled product takes scales of 128 from CUDA 12.9 on"
    if shared and b_scales.shape[1] % 4:  # torch either refuses these or reads them wrongly
        return f"a row has {b_scales.shape[1]} scales of 128 x 128; cuBLASLt takes groups of four"
    if a_MK.shape[1] % 16 or b_NK.shape[0] % 16:
        return "torch's scaled product needs dims divisible by 16"
    if dtype != torch.bfloat16:
        return f"results in {dtype} are left to the reference"
    return None


def _read_cuda_version() -> tuple[int, ...]:
    """The one that torch was built with; (0,) for another platform."""
    return tuple(map(int, (torch.version.cuda or "0").split(".")))


KERNEL = Kernel(
    "scaled_product",
    run_reference,
    {"torch": Implementation("torch", run_torch, check_cuda, _refuse_inputs)},
)
