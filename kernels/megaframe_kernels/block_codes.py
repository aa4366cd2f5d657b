"""Values of weights that are kept as codes: numbers of levels, with the largest magnitude (absmax)
of each block of neighbours, as in QLoRA (Dettmers et al. 2023).

One kernel makes absmax of their shares and values of codes: codes are read once, values written
once, and nothing else is. Its products are those of the reference in fp32, in the same order.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from megaframe_kernels.device import ceil_div, launch
from megaframe_kernels.direct import bypass_dispatcher
from megaframe_kernels.installed import check_bitsandbytes, require_nothing
from megaframe_kernels.kernel import FLOATS, Implementation, Kernel, refuse_place, refuse_types

_TILE = 4096
"""Elements that a program makes."""
_WIDEST_CHUNK = 64
"""Elements of a block that are one row of a tile, and have one absmax."""
_LARGEST_SHARE = 255
_NF4_LEVELS = 16
_BITSANDBYTES_BLOCKS = tuple(2**power for power in range(5, 11))
"""It also takes 2048 and 4096, but for these it compiles plain code on a CPU, for half a minute."""


def run_reference(
    values: Tensor,
    codes: Tensor,
    levels: Tensor,
    scales: Tensor,
    shares: Tensor | None = None,
    *,
    block: int,
) -> Tensor:
    """Write the values of codes, level times absmax, and return them.

    Args:
        values: Receives them, [length].
        codes: [length] of uint8; [length / 2] with 16 levels, where a byte has two of them, the
            first in its upper half.
        levels: [16], those of nf4, or [255].
        scales: fp32 [length / block], the absmax of blocks; with shares the largest of each group
            of blocks, which are equally many.
        shares: [length / block] of uint8: absmax as multiples of 1/255 of their group's scale.
        block: Elements that have an absmax.
    """
    wide = torch.promote_types(values.dtype, torch.float32)
    if len(levels) == _NF4_LEVELS:
        codes = torch.stack((codes >> 4, codes & 15), 1).view(-1)
    looked_up = levels.to(wide)[codes.int()].view(-1, block)
    absmax = compute_absmax(scales, shares)
    torch.mul(looked_up, absmax[:, None], out=values.view(-1, block))
    return values


def compute_absmax(scales: Tensor, shares: Tensor | None) -> Tensor:
    """Return the absmax of each block. Arguments are those of `run_reference`."""
    if shares is None:
        return scales
    groups = shares.view(len(scales), -1).to(scales.dtype) / _LARGEST_SHARE
    return (groups * scales[:, None]).view(-1)


@triton.jit
def _decode(
    values: tl.tensor,
    codes: tl.tensor,
    levels: tl.tensor,
    scales: tl.tensor,
    shares: tl.tensor,
    chunks: tl.tensor,
    CHUNK: tl.constexpr,
    ROWS: tl.constexpr,
    PER_BLOCK: tl.constexpr,
    PER_GROUP: tl.constexpr,
    PACKED: tl.constexpr,
) -> None:
    """CHUNK: elements of a row of the tile, which divide a block. PER_BLOCK: rows of a block.
    PER_GROUP: blocks of a group. PACKED: a byte has two codes."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = row < chunks
    number = row // PER_BLOCK
    if shares is None:
        absmax = tl.load(scales + number, mask=inside, other=0.0)
    else:
        share = tl.load(shares + number, mask=inside, other=0).to(tl.float32)
        scale = tl.load(scales + number // PER_GROUP, mask=inside, other=0.0)
        absmax = tl.div_rn(share, 255.0) * scale
    if PACKED:
        place = row[:, None] * (CHUNK // 2) + tl.arange(0, CHUNK // 2)[None, :]
        pair = tl.load(codes + place, mask=inside[:, None], other=0)
        code = tl.reshape(tl.join(pair >> 4, pair & 15), (ROWS, CHUNK))
    else:
        place = row[:, None] * CHUNK + tl.arange(0, CHUNK)[None, :]
        code = tl.load(codes + place, mask=inside[:, None], other=0)
    # All levels are in the nearest cache after the first load.
    level = tl.load(levels + code.to(tl.int32))
    value = (level * absmax[:, None]).to(values.dtype.element_ty)
    place = row[:, None] * CHUNK + tl.arange(0, CHUNK)[None, :]
    tl.store(values + place, value, mask=inside[:, None])


def launch_decode(
    values: Tensor,
    codes: Tensor,
    levels: Tensor,
    scales: Tensor,
    shares: Tensor | None,
    block: int,
) -> None:
    """Compute the reference in Triton."""
    # The largest power of two that divides a block, so that no row of a tile has two absmax.
    chunk = min(block & -block, _WIDEST_CHUNK)
    chunks, rows = values.numel() // chunk, _TILE // chunk
    launch(
        _decode,
        (ceil_div(chunks, rows),),
        values,
        codes,
        levels,
        scales,
        shares,
        chunks,
        CHUNK=chunk,
        ROWS=rows,
        PER_BLOCK=block // chunk,
        PER_GROUP=1 if shares is None else shares.numel() // max(scales.numel(), 1),
        PACKED=levels.numel() == _NF4_LEVELS,
    )


_decode_op = torch.library.custom_op(
    "megaframe::decode_blocks_", launch_decode, mutates_args=("values",)
)
_direct_decode = bypass_dispatcher(_decode_op, launch_decode)


def run_triton(
    values: Tensor,
    codes: Tensor,
    levels: Tensor,
    scales: Tensor,
    shares: Tensor | None = None,
    *,
    block: int,
) -> Tensor:
    """Compute the reference in Triton."""
    _direct_decode(values, codes, levels, scales, shares, block)
    return values


def run_bitsandbytes(
    values: Tensor,
    codes: Tensor,
    levels: Tensor,
    scales: Tensor,
    shares: Tensor | None = None,
    *,
    block: int,
) -> Tensor:
    """Compute the reference for nf4 by bitsandbytes, whose levels are those of QLoRA's code: they
    differ from the quantiles by less than 2e-7. absmax of shares are made before, by torch."""
    from bitsandbytes import functional

    absmax = compute_absmax(scales, shares)
    state = functional.QuantState(
        absmax, values.shape, dtype=values.dtype, blocksize=block, quant_type="nf4"
    )
    column = codes.view(-1, 1)  # a single row would be a transposed matrix
    if values.is_cuda:
        functional.dequantize_4bit(column, state, out=values)
    else:  # only on a GPU are values written where they belong
        values.copy_(functional.dequantize_4bit(column, state).view_as(values))
    return values


@lru_cache
def _explain_broken_bitsandbytes() -> str | None:
    """Return why bitsandbytes, which is installed, does not work, or None."""
    try:
        from bitsandbytes import cextension
    except Exception as error:  # whatever its import does
        return f"bitsandbytes cannot be imported: {error}"
    if isinstance(cextension.lib, cextension.ErrorHandlerMockBNBNativeLibrary):
        return "bitsandbytes has no library for this machine (python -m bitsandbytes says why)"
    return None


def _refuse_for_triton(
    values: Tensor,
    codes: Tensor,
    levels: Tensor,
    scales: Tensor,
    shares: Tensor | None = None,
    *,
    block: int,
) -> str | None:
    if len(levels) == _NF4_LEVELS and block % 2:
        return f"a byte of codes is of two blocks, which have {block} elements each"
    return refuse_types(values, levels, scales) or refuse_place(codes, shares)


def _refuse_for_bitsandbytes(
    values: Tensor,
    codes: Tensor,
    levels: Tensor,
    scales: Tensor,
    shares: Tensor | None = None,
    *,
    block: int,
) -> str | None:
    if len(levels) != _NF4_LEVELS:
        return "the codes are of 8 bits, and it is asked for those of nf4 only"
    if block not in _BITSANDBYTES_BLOCKS:
        return f"blocks of {block} are none of {', '.join(map(str, _BITSANDBYTES_BLOCKS))}"
    if values.dtype not in FLOATS:
        return f"{values.dtype} is not one of {', '.join(map(str, FLOATS))}"
    return _explain_broken_bitsandbytes()


KERNEL = Kernel(
    "decode_blocks",
    run_reference,
    {
        "triton": Implementation("triton", run_triton, require_nothing, _refuse_for_triton),
        "bitsandbytes": Implementation(
            "bitsandbytes", run_bitsandbytes, check_bitsandbytes, _refuse_for_bitsandbytes
        ),
    },
)
