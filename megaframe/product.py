"""Matrix products, by the fastest routine that torch has for the operands.

On a CPU torch uses MKL for fp32 products and oneDNN for bf16 products. On processors that are not
Intel's, MKL reaches less than half of the peak of the vector units; oneDNN does not depend on the
maker. This module therefore uses oneDNN for fp32 too, through the operator of torch's compiler: 320
to 470 instead of 197 GFLOP/s on the machine of docs/log.md. That operator always allocates its
result, so results that belong elsewhere are computed in pieces that stay in cache until copied.

Shape legend: M rows, K summed over, N columns.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

PIECE_BYTES = 4 << 20
"""Size of the pieces in which a result is computed that is then added or copied elsewhere."""
GPU_PIECE_BYTES = 256 << 20
"""The same on a GPU, where the product of one piece must be large enough to fill the GPU."""
ALONE = 1 << 22
"""From this many multiplications per matrix on, separate products by oneDNN are faster than MKL's
batched product."""

_ONEDNN = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def product(left_MK: Tensor, right_KN: Tensor, bias_N: Tensor | None = None) -> Tensor:
    """Return left [M, K] times right [K, N], plus a bias [N] if given, as [M, N]."""
    if _by_onednn(left_MK):
        transposed = right_KN.t()
        if not (transposed.is_contiguous() or right_KN.is_contiguous()):
            # For a slice of columns, oneDNN (3.x) takes a path that is a thousand times slower.
            transposed = right_KN.contiguous().t()
        return torch.ops.mkldnn._linear_pointwise(left_MK, transposed, bias_N, "none", [], "")
    if bias_N is None:
        return left_MK @ right_KN
    return torch.addmm(bias_N, left_MK, right_KN)


def fast_bf16() -> bool:
    """Return whether oneDNN supports bf16 products on this machine's CPU."""
    return _ONEDNN and torch.ops.mkldnn._is_mkldnn_bf16_supported()


def products(left_HMK: Tensor, right_HKN: Tensor) -> Tensor:
    """Return left [H, M, K] times right [H, K, N] for each H, as [H, M, N]."""
    heads, rows, inner = left_HMK.shape
    if _by_onednn(left_HMK) and rows * inner * right_HKN.shape[2] >= ALONE:
        made = [product(*pair) for pair in zip(left_HMK, right_HKN, strict=True)]
        return torch.stack(made) if heads > 1 else made[0][None]
    return torch.bmm(left_HMK, right_HKN)


def wide_products(left_HMK: Tensor, right_HKN: Tensor) -> Tensor:
    """Do the same as `products`, with a result in fp32 for bf16 operands."""
    if left_HMK.dtype is not torch.bfloat16:
        return products(left_HMK, right_HKN)
    # Make torch use oneDNN and let oneDNN treat the fp32 operands as bf16. They hold bf16 numbers,
    # so nothing is lost.
    matmul = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]  # put there at import
    before, matmul.fp32_precision = matmul.fp32_precision, "bf16"
    try:
        return torch.bmm(left_HMK.float(), right_HKN.float())
    finally:
        matmul.fp32_precision = before


def product_into(out_MN: Tensor, left_MK: Tensor, right_KN: Tensor, *, add: bool) -> None:
    """Compute out = left right, or with `add`, out += left right.

    `out` may have a higher precision than the operands. Its old content matters with `add` only.
    """
    if left_MK.is_cuda and out_MN.dtype is torch.float32 and _sums_wide(left_MK.dtype):
        beta = 1.0 if add else 0.0
        wide = torch.ops.aten.addmm.dtype_out
        wide(out_MN, left_MK, right_KN, torch.float32, beta=beta, out=out_MN)
        return
    if out_MN.dtype == left_MK.dtype and not _by_onednn(left_MK):
        beta = 1.0 if add else 0.0
        torch.addmm(out_MN, left_MK, right_KN, beta=beta, out=out_MN)
        return
    rows, columns = out_MN.shape
    by_rows = rows > columns
    short, long = sorted((rows, columns))
    size = PIECE_BYTES if left_MK.device.type == "cpu" else GPU_PIECE_BYTES
    step = max(1, size // max(1, short * out_MN.element_size()))
    for start in range(0, long, step):
        piece = slice(start, start + step)
        if by_rows:
            into, made = out_MN[piece], product(left_MK[piece], right_KN)
        else:
            into, made = out_MN[:, piece], product(left_MK, right_KN[:, piece])
        if add:
            into.add_(made)
        else:
            into.copy_(made)


@lru_cache
def _sums_wide(dtype: torch.dtype) -> bool:
    """Return whether torch can add a product of this type to fp32 sums in one operation on this
    GPU. The first call tries it, because torch before 2.10 may not be able to."""
    if dtype not in (torch.bfloat16, torch.float16):
        return False
    left = torch.ones(16, 16, dtype=dtype, device="cuda")
    out = torch.ones(16, 16, dtype=torch.float32, device="cuda")
    try:
        torch.ops.aten.addmm.dtype_out(out, left, left, torch.float32, beta=1.0, out=out)
    except (AttributeError, RuntimeError):
        return False
    return bool((out == 17.0).all())


def _by_onednn(left: Tensor) -> bool:
    return (
        _ONEDNN and left.dtype is torch.float32 and left.device.type == "cpu" and left.numel() > 0
    )
