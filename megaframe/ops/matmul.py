"""Matrix products, by the fastest library that this machine has for them.

On a CPU torch multiplies fp32 matrices with MKL, and bf16 ones with oneDNN where the processor has
instructions for them, otherwise with a routine that is ten times slower than its products in fp32.
Which library is faster differs between processors, even of one maker, so nothing here assumes it:
`use_libraries` is called after a measurement (`model/autotune.py`), by a resumed run, or with
what the config names. On GPUs, in fp64 and for empty operands it is always torch.

What a library returns in memory of its own is computed in pieces that stay in cache until they are
copied or added where they belong.

Shape legend: M rows, K summed over, N columns, H matrices.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Literal, get_args

import torch
from torch import Tensor

MatmulKind = Literal["dense", "into", "gradient", "experts", "batched"]
"""Classes of products. dense: one matrix times many rows, into a new tensor. into: the same, but
written to memory that exists, such as logits. gradient: of a weight, which is written or added to
memory that exists. experts: few rows. batched: the small ones of attention."""
MatmulLibrary = Literal["torch", "onednn", "fp32-torch", "fp32-onednn"]
"""torch: whatever torch takes for operands of this type. onednn: oneDNN, through the operator of
torch's compiler. fp32-: operands of a narrower type are copied to fp32, multiplied by that library,
and the sums are rounded once, as the processors do that multiply narrow types themselves."""
KINDS: tuple[MatmulKind, ...] = get_args(MatmulKind)

PIECE_BYTES = 4 << 20
"""Size of the pieces in which results and copies are computed that are then used up. Half or twice
as much changes a step by less than its spread (benchmarks/cpu/cache_constants.py)."""
GPU_PIECE_BYTES = 256 << 20
"""The same on a GPU, where the product of one piece must be large enough to fill the GPU."""
MAX_EXPERT_ROWS = 256
"""Below this many rows a product is of the kind `experts`."""
MIN_LOOP_WORK = 1 << 22
"""From this many multiplications per matrix on, a loop over matrices costs less than what it can
save: 0.1 ms of a core, ten times a call of an operator."""
_ROW_MULTIPLE = 8
"""Few enough numbers of rows for all their routines to be kept, and few rows in vain: 4 of an
expert's on average, where 16 would be 8 (docs/log.md)."""
_MIN_SLICE = 64
"""Rows or columns of the smallest piece, below which products become slow."""

_ONEDNN = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")
_NARROW = (torch.bfloat16, torch.float16)


def has_fast_matmul(dtype: torch.dtype) -> bool:
    """Return whether torch has fast products of this type on this machine's CPU. Of a narrow type
    it has them only where oneDNN finds instructions for them; elsewhere they take ten times as long
    as those of fp32."""
    if dtype not in _NARROW:
        return True
    if not _ONEDNN:
        return False
    if dtype is torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())


def list_libraries(dtype: torch.dtype) -> tuple[MatmulLibrary, ...]:
    """Return the libraries that multiply this type fast on this CPU, torch's own choice first."""
    libraries: tuple[MatmulLibrary, ...] = ("torch",) if has_fast_matmul(dtype) else ()
    if dtype in _NARROW:
        libraries += ("fp32-torch",)
    if _ONEDNN and dtype is torch.float32:
        libraries += ("onednn",)
    if _ONEDNN and dtype in _NARROW:
        libraries += ("fp32-onednn",)
    return libraries


def get_default_library(dtype: torch.dtype) -> MatmulLibrary:
    """Return the library to take where nothing was measured: torch's, or copies in fp32."""
    return list_libraries(dtype)[0]


_library_of: dict[tuple[torch.dtype, MatmulKind], MatmulLibrary] = {}


def use_libraries(dtype: torch.dtype, libraries: Mapping[MatmulKind, MatmulLibrary]) -> None:
    """Multiply operands of a type on the CPU by these libraries from now on in this process, by
    kind of product; by `get_default_library` where none is given."""
    default = get_default_library(dtype)
    for kind in KINDS:
        _library_of[dtype, kind] = libraries.get(kind, default)
    if "gradient" not in libraries:
        # A checkpoint from before gradients were a kind of their own: they were `into`.
        _library_of[dtype, "gradient"] = _library_of[dtype, "into"]


def get_libraries_in_use(dtype: torch.dtype) -> dict[MatmulKind, MatmulLibrary]:
    """Return the library that multiplies operands of a type on the CPU, by kind of product."""
    return {kind: _get_library(dtype, kind) for kind in KINDS}


def _choose_library(left: Tensor, kind: MatmulKind) -> MatmulLibrary:
    """Return the library for a product with this left operand."""
    # On a GPU and for empty operands it is always torch.
    if left.device.type != "cpu" or not left.numel():
        return "torch"
    return _get_library(left.dtype, kind)


def _get_library(dtype: torch.dtype, kind: MatmulKind) -> MatmulLibrary:
    library = _library_of.get((dtype, kind))
    if library is None:
        library = _library_of[dtype, kind] = get_default_library(dtype)
    return library


def get_row_multiple(x: Tensor) -> int:
    """Return a number of which the rows of products should be a multiple if they differ from call
    to call, as those of an expert do.

    oneDNN prepares a routine for every shape and keeps the last 1,024. That takes as long as a
    product of a narrow expert, or longer, and 0.1 MB (docs/log.md).

    Args:
        x: A tensor like the rows.
    """
    if not _on_cpu(x):
        return 1
    prepares = {"onednn", "fp32-onednn"} | ({"torch"} if x.dtype in _NARROW else set())
    return 1 if prepares.isdisjoint(get_libraries_in_use(x.dtype).values()) else _ROW_MULTIPLE


def multiply(left_MK: Tensor, right_KN: Tensor, bias_N: Tensor | None = None) -> Tensor:
    """Return left [M, K] times right [K, N], plus a bias [N] if given, as [M, N].

    Args:
        left_MK: The left operand.
        right_KN: The right operand.
        bias_N: Added to each row.
    """
    library = _choose_library(left_MK, "experts" if left_MK.shape[0] < MAX_EXPERT_ROWS else "dense")
    if library in ("torch", "onednn"):
        return _multiply_by(library, left_MK, right_KN, bias_N)
    out_MN = left_MK.new_empty(len(left_MK), right_KN.shape[1])
    _multiply_widened_into(library, out_MN, left_MK, right_KN, add=False, bias_N=bias_N)
    return out_MN


def multiply_batched(left_HMK: Tensor, right_HKN: Tensor) -> Tensor:
    """Return left [H, M, K] times right [H, K, N] for each H, as [H, M, N]."""
    if not _on_cpu(left_HMK):
        return torch.bmm(left_HMK, right_HKN)
    library = _get_library(left_HMK.dtype, "batched")
    if library.startswith("fp32-"):
        # Sums in fp32, rounded once to the type of the operands.
        wide = _multiply_batched_by(library, left_HMK.float(), right_HKN.float())
        return wide.to(left_HMK.dtype)
    return _multiply_batched_by(library, left_HMK, right_HKN)


def multiply_batched_wide(left_HMK: Tensor, right_HKN: Tensor) -> Tensor:
    """Do the same as `multiply_batched`, with a result in fp32 for bf16 operands."""
    if left_HMK.dtype is not torch.bfloat16:
        return multiply_batched(left_HMK, right_HKN)
    library = _get_library(left_HMK.dtype, "batched")
    if library != "torch":
        return _multiply_batched_by(library, left_HMK.float(), right_HKN.float())
    # Make torch use oneDNN and let oneDNN treat the fp32 operands as bf16. They hold bf16 numbers,
    # so nothing is lost.
    matmul = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]  # put there at import
    # A setting of the process, so it is put back at once.
    before, matmul.fp32_precision = matmul.fp32_precision, "bf16"
    try:
        return torch.bmm(left_HMK.float(), right_HKN.float())
    finally:
        matmul.fp32_precision = before


def multiply_into(out_MN: Tensor, left_MK: Tensor, right_KN: Tensor) -> None:
    """Compute out = left right.

    Args:
        out_MN: The result, [M, N]. Its old content is not read.
        left_MK: [M, K].
        right_KN: [K, N].
    """
    _multiply_into("into", out_MN, left_MK, right_KN, add=False)


def write_weight_gradient(grad_OI: Tensor, dy_TO: Tensor, x_TI: Tensor, *, add: bool) -> None:
    """Compute grad = dy^T x, or with `add`, grad += dy^T x.

    Args:
        grad_OI: Gradient of a weight, [O, I]; may have a higher precision than the operands. Its
            old content is read with `add` only.
        dy_TO: Gradient of the outputs of T tokens, [T, O].
        x_TI: Their inputs, [T, I].
        add: Add to the old content instead of overwriting it.
    """
    _multiply_into("gradient", grad_OI, dy_TO.t(), x_TI, add=add)


def _multiply_into(
    kind: MatmulKind, out_MN: Tensor, left_MK: Tensor, right_KN: Tensor, *, add: bool
) -> None:
    """Compute out = left right, or with `add`, out += left right."""
    if left_MK.is_cuda and out_MN.dtype is torch.float32 and _can_accumulate_wide(left_MK.dtype):
        # With beta = 0 the old content is not read, even if it is NaN.
        beta = 1.0 if add else 0.0
        # Adds to fp32 sums in one operation, without a rounded product in between.
        wide = torch.ops.aten.addmm.dtype_out
        wide(out_MN, left_MK, right_KN, torch.float32, beta=beta, out=out_MN)
        return
    library = _choose_library(left_MK, kind)
    if library.startswith("fp32-"):
        _multiply_widened_into(library, out_MN, left_MK, right_KN, add=add)
    elif out_MN.dtype == left_MK.dtype and library == "torch":
        torch.addmm(out_MN, left_MK, right_KN, beta=1.0 if add else 0.0, out=out_MN)
    else:
        _multiply_in_pieces(library, out_MN, left_MK, right_KN, add=add)


def _multiply_in_pieces(
    library: MatmulLibrary, out_MN: Tensor, left_MK: Tensor, right_KN: Tensor, *, add: bool
) -> None:
    """Compute `_multiply_into` from results in memory of their own, along the longer dim of
    `out`."""
    rows, columns = out_MN.shape
    by_rows = rows > columns
    short, long = sorted((rows, columns))
    size = PIECE_BYTES if left_MK.device.type == "cpu" else GPU_PIECE_BYTES
    # On a CPU a piece stays in cache until it is copied or added where it belongs.
    step = max(1, size // max(1, short * out_MN.element_size()))
    for start in range(0, long, step):
        piece = slice(start, start + step)
        if by_rows:
            into, result = out_MN[piece], _multiply_by(library, left_MK[piece], right_KN)
        else:
            into, result = out_MN[:, piece], _multiply_by(library, left_MK, right_KN[:, piece])
        _write(into, result, add)


def _multiply_widened_into(
    library: MatmulLibrary,
    out_MN: Tensor,
    left_MK: Tensor,
    right_KN: Tensor,
    *,
    add: bool,
    bias_N: Tensor | None = None,
) -> None:
    """Compute `_multiply_into` from copies of the operands in fp32, in pieces along the longest of
    M, K and N, so that the copy of the longer operand is never whole. A bias is added before the
    sums are rounded."""
    M, K, N = *left_MK.shape, right_KN.shape[1]
    wide: MatmulLibrary = "onednn" if library == "fp32-onednn" else "torch"
    # Only addmm with an fp32 result can add to `out` directly.
    in_place = out_MN.dtype is torch.float32 and wide == "torch" and bias_N is None
    bias_N = None if bias_N is None else bias_N.float()
    # Pieces along K are summed in fp32, and rounded once after the last one.
    if max(M, N) <= K:
        sums_MN = out_MN if in_place else out_MN.new_empty(M, N, dtype=torch.float32)
        for piece in _iterate_slices(K, M + N):
            # The first piece overwrites, unless the sums are `out` itself and are to be added to.
            accumulates = piece.start > 0 or (add and in_place)
            left, right = left_MK[:, piece].float(), right_KN[piece].float()
            if wide == "torch":
                torch.addmm(sums_MN, left, right, beta=1.0 if accumulates else 0.0, out=sums_MN)
            else:
                _multiply_in_pieces(wide, sums_MN, left, right, add=accumulates)
        if not in_place:
            _write(out_MN, sums_MN if bias_N is None else sums_MN.add_(bias_N), add)
        return
    by_rows = M >= N
    # The shorter operand is copied once; of the longer one a piece at a time.
    shorter = (right_KN if by_rows else left_MK).float()
    for piece in _iterate_slices(max(M, N), K + min(M, N)):
        if by_rows:
            into, left, right, bias = out_MN[piece], left_MK[piece].float(), shorter, bias_N
        else:
            into, left, right = out_MN[:, piece], shorter, right_KN[:, piece].float()
            bias = None if bias_N is None else bias_N[piece]
        if in_place:
            torch.addmm(into, left, right, beta=1.0 if add else 0.0, out=into)
        else:
            _write(into, _multiply_by(wide, left, right, bias), add)


def _iterate_slices(length: int, others_per_element: int) -> Iterator[slice]:
    """Yield slices of a dim such that each, with `others_per_element` fp32 numbers for each of its
    elements, has about `PIECE_BYTES`."""
    step = max(_MIN_SLICE, PIECE_BYTES // (4 * others_per_element))
    for start in range(0, length, step):
        yield slice(start, start + step)


def _write(into: Tensor, result: Tensor, add: bool) -> None:
    if add:
        into.add_(result)
    else:
        into.copy_(result)


def _multiply_by(
    library: MatmulLibrary, left_MK: Tensor, right_KN: Tensor, bias_N: Tensor | None = None
) -> Tensor:
    """Return left right plus the bias, by torch or oneDNN."""
    if library == "onednn":
        transposed = right_KN.t()
        if not (transposed.is_contiguous() or right_KN.is_contiguous()):
            # For a slice of columns, oneDNN (3.x) takes a path that is a thousand times slower.
            transposed = right_KN.contiguous().t()
        return torch.ops.mkldnn._linear_pointwise(left_MK, transposed, bias_N, "none", [], "")
    if bias_N is None:
        return left_MK @ right_KN
    return torch.addmm(bias_N, left_MK, right_KN)


def _multiply_batched_by(library: MatmulLibrary, left_HMK: Tensor, right_HKN: Tensor) -> Tensor:
    """Return the products of fp32 operands, or by torch of operands of any type."""
    heads, rows, inner = left_HMK.shape
    if library.endswith("onednn") and rows * inner * right_HKN.shape[2] >= MIN_LOOP_WORK:
        by_matrix = [
            _multiply_by("onednn", *pair) for pair in zip(left_HMK, right_HKN, strict=True)
        ]
        # A single matrix needs no copy.
        return torch.stack(by_matrix) if heads > 1 else by_matrix[0][None]
    return torch.bmm(left_HMK, right_HKN)


@lru_cache
def _can_accumulate_wide(dtype: torch.dtype) -> bool:
    """Return whether torch can add a product of this type to fp32 sums in one operation on this
    GPU. The first call tries it, because torch before 2.10 may not be able to."""
    if dtype not in _NARROW:
        return False
    left = torch.ones(16, 16, dtype=dtype, device="cuda")
    out = torch.ones(16, 16, dtype=torch.float32, device="cuda")
    try:
        torch.ops.aten.addmm.dtype_out(out, left, left, torch.float32, beta=1.0, out=out)
    except (AttributeError, RuntimeError):
        return False
    # Also checks the result: 16 ones plus the old 1.
    return bool((out == 17.0).all())


def _on_cpu(left: Tensor) -> bool:
    return left.device.type == "cpu" and left.numel() > 0
