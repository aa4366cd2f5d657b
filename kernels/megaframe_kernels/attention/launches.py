"""Launches of the attention kernels, and their block sizes for each generation of chips.

The shape legend is in `attention.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from megaframe_kernels.attention import backward_device, forward_device
from megaframe_kernels.device import ceil_div, launch, next_power_of_2, read_generation
from megaframe_kernels.installed import choose_for_triton

PADDING: int = backward_device.PADDING.value
_CACHED = 32 * 2**20
"""How many bytes programs that start together may read, so that the cache of a large chip holds
them."""


@dataclass(frozen=True)
class Tiling:
    """Size of a kernel's blocks.

    Attributes:
        queries: Per block.
        keys: Per block.
        warps: Triton's launch option.
        stages: Triton's launch option.
    """

    queries: int
    keys: int
    warps: int
    stages: int


Table: TypeAlias = dict[int, Tiling]
"""Blocks by width of a head. A width that is not listed uses the next larger one."""

FORWARD: dict[int, Table] = {
    8: {64: Tiling(128, 64, 8, 3), 128: Tiling(128, 64, 8, 3), 256: Tiling(64, 64, 8, 2)},
    9: {64: Tiling(128, 128, 8, 3), 128: Tiling(128, 64, 8, 3), 256: Tiling(128, 64, 8, 2)},
    10: {64: Tiling(128, 64, 8, 3), 128: Tiling(128, 128, 8, 2), 256: Tiling(64, 64, 8, 2)},
}
"""For 16-bit types, by generation of the chip."""
BACKWARD_QUERIES: dict[int, Table] = {
    8: {64: Tiling(128, 64, 8, 2), 128: Tiling(128, 64, 8, 2), 256: Tiling(64, 32, 8, 2)},
    9: {64: Tiling(128, 64, 8, 3), 128: Tiling(128, 64, 8, 3), 256: Tiling(64, 32, 8, 3)},
    10: {
        64: Tiling(128, 64, 8, 3),
        128: choose_for_triton(Tiling(128, 64, 8, 3), before_3_7=Tiling(128, 32, 8, 3)),
        256: Tiling(64, 32, 8, 3),
    },
}
"""With three stages, the loads of a visit are in flight during the whole previous visit. With two,
they start only at its end and are waited for at once. The smaller chips of generation 8 (Ampere)
have room for two only."""
BACKWARD_KEYS: dict[int, Table] = {
    8: {64: Tiling(32, 128, 8, 2), 128: Tiling(64, 64, 8, 2), 256: Tiling(32, 32, 8, 2)},
    9: {64: Tiling(64, 128, 8, 3), 128: Tiling(32, 128, 8, 3), 256: Tiling(32, 64, 8, 1)},
    10: {64: Tiling(64, 128, 8, 3), 128: Tiling(64, 128, 8, 2), 256: Tiling(32, 64, 8, 1)},
}
"""The largest blocks that stay in registers, which the assembler allocates differently on each
generation."""
WIDE_NUMBERS, WIDE_NUMBERS_OF_GRADIENTS = Tiling(32, 32, 8, 1), Tiling(32, 16, 8, 1)
"""Blocks for fp32, whose products use the slow units whatever the block size. The second is for the
passes that compute gradients of queries, which keep the most in registers."""


def scale_or_default(query: Tensor, scale: float | None) -> float:
    """Return the factor of the scores: `scale`, or D^(-1/2) if it is None."""
    return query.shape[-1] ** -0.5 if scale is None else scale


def choose_blocks(table: Table, x: Tensor, wide_numbers: Tiling = WIDE_NUMBERS) -> Tiling:
    """Return the blocks for the head width and type of x.

    Args:
        table: Blocks by head width, for 16-bit types.
        x: The queries.
        wide_numbers: The blocks for fp32.
    """
    if x.dtype == torch.float32:
        return wide_numbers
    return table[min(wide for wide in table if wide >= x.shape[-1])]


def _choose_constants(x: Tensor, scale: float | None, softcap: float | None) -> dict[str, Any]:
    # Tiles are powers of two wide, and matrix products take at least 16.
    width = next_power_of_2(max(x.shape[-1], 16))
    return {
        "CAP": softcap is not None,
        "WIDTH": width,
        "EVEN": width == x.shape[-1],
        # fp32 operands are not rounded to tf32; 16-bit operands ignore this option.
        "PRECISION": "ieee" if x.dtype == torch.float32 else "tf32",
    }


def _make_adjacent(x: Tensor) -> Tensor:
    # Only elements of a head must be adjacent. The kernels take all other strides, so views of a
    # larger tensor are not copied.
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def _count_together(pairs: int, rows: Tensor, shared: float) -> int:
    """Return how many pairs of a head and a sample start together.

    Args:
        pairs: Number of pairs.
        rows: What a pair reads, [B, length, heads, D], besides a second tensor of this shape.
        shared: How many pairs read the same head of both; below 1 if a pair reads several heads.
    """
    # Both tensors that a pair reads, divided by the pairs that read the same.
    read = 2 * rows.shape[1] * rows.shape[3] * rows.element_size() / shared
    return max(min(int(_CACHED / max(read, 1)), pairs), 1)


def launch_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    starts: Tensor,
    stops: Tensor,
    sinks: Tensor | None,
    scale: float | None,
    softcap: float | None,
    blocks: Tiling | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute the forward pass in Triton.

    Args:
        query: [B, Q, N, D].
        key: [B, K, G, D].
        value: [B, K, G, D].
        starts: First key that each query sees, int32 [B, Q].
        stops: End of the keys that each query sees, int32 [B, Q].
        sinks: One extra score per head, [N], or None.
        scale: Factor of the scores, by default D^(-1/2).
        softcap: Scores s become cap tanh(s / cap), unless it is None.
        blocks: By default those of `FORWARD`.

    Returns:
        Out [B, Q, N, D], and the log-sum-exp, fp32 [B, N, Q].
    """
    # No copy of keys and values for each query head: a program finds the shared head itself.
    query, key, value = _make_adjacent(query), _make_adjacent(key), _make_adjacent(value)
    batch, queries, heads, width = query.shape
    per_group = heads // key.shape[2]
    out = torch.empty_like(query, memory_format=torch.contiguous_format)
    lse = query.new_empty(batch, heads, queries, dtype=torch.float32)
    blocks = blocks or choose_blocks(FORWARD[read_generation(query)], query)
    launch(
        forward_device.forward,
        (ceil_div(queries, blocks.queries) * heads * batch,),
        query,
        key,
        value,
        sinks,
        starts,
        stops,
        out,
        lse,
        queries,
        key.shape[1],
        _count_together(heads * batch, key, per_group),
        heads,
        per_group,
        width,
        *query.stride()[:3],
        *key.stride()[:3],
        *value.stride()[:3],
        scale_or_default(query, scale),
        softcap or 1.0,
        # A scale above 0 keeps the order of products, so the maximum can be taken before scaling.
        RAW=softcap is None and scale_or_default(query, scale) > 0.0,
        LATE=read_generation(query) > 8,  # matrix products are asynchronous there
        M=blocks.queries,
        N=blocks.keys,
        warps=blocks.warps,
        stages=blocks.stages,
        **_choose_constants(query, scale, softcap),
    )
    return out, lse


def launch_backward(
    d_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    starts: Tensor,
    stops: Tensor,
    first: Tensor,
    last: Tensor,
    sinks: Tensor | None,
    scale: float | None,
    softcap: float | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute the backward pass in Triton.

    In a ring, `out` and `lse` are those over all keys, and `key` and `value` are a part of them.

    Args:
        d_out: Gradient of the output, [B, Q, N, D].
        query: [B, Q, N, D].
        key: [B, K, G, D].
        value: [B, K, G, D].
        out: Output of the forward pass, [B, Q, N, D].
        lse: Log-sum-exp of the scores, fp32 [B, N, Q].
        starts: First key that each query sees, int32 [B, Q].
        stops: End of the keys that each query sees, int32 [B, Q].
        first: First query that sees each key, int32 [B, K].
        last: End of the queries that see each key, int32 [B, K].
        sinks: One extra score per head, [N], or None.
        scale: Factor of the scores, by default D^(-1/2).
        softcap: As in the forward pass.

    Returns:
        The gradients of query, key, value and sinks (empty without sinks).
    """
    query, key, value = _make_adjacent(query), _make_adjacent(key), _make_adjacent(value)
    d_out = _make_adjacent(d_out)
    shift, delta = _prepare(d_out, out, lse)
    factor = scale_or_default(query, scale)
    operands = _BackwardOperands(query, key, value, d_out, shift, delta)
    numbers = (*_list_sizes(query, key, value, d_out), factor, softcap or 1.0)
    options = _choose_constants(query, scale, softcap)
    # Bitwise repeatable: each gradient is the sum of one program, over keys in ascending order of
    # visits.
    d_query = _launch_queries(operands, starts, stops, numbers, options)
    d_key, d_value = _launch_keys(operands, first, last, numbers, options)
    d_sinks = query.new_empty(0)
    if sinks is not None:
        # A sink has the value 0, so its d_p is 0 and d_s = share (0 - delta).
        share = (sinks.float()[None, :, None] - lse).exp()
        d_sinks = -(share * delta[:, :, : query.shape[1]]).sum((0, 2)).to(sinks.dtype)
    return d_query, d_key, d_value, d_sinks


class _BackwardOperands(NamedTuple):
    """What both kernels of the backward pass read; `shift` and `delta` are those of `_prepare`."""

    query: Tensor
    key: Tensor
    value: Tensor
    d_out: Tensor
    shift: Tensor
    delta: Tensor


def _list_sizes(query: Tensor, key: Tensor, value: Tensor, d_out: Tensor) -> tuple[int, ...]:
    """Return heads, heads per group, the width of a head, and the strides of all four."""
    heads, width = query.shape[2:]
    return (
        heads,
        heads // key.shape[2],
        width,
        *query.stride()[:3],
        *key.stride()[:3],
        *value.stride()[:3],
        *d_out.stride()[:3],
    )


def _launch_queries(
    operands: _BackwardOperands,
    starts: Tensor,
    stops: Tensor,
    numbers: tuple[float, ...],
    options: dict[str, Any],
) -> Tensor:
    """Return the gradient of the queries."""
    query, key = operands.query, operands.key
    batch, queries, heads, _ = query.shape
    table = BACKWARD_QUERIES[read_generation(query)]
    blocks = choose_blocks(table, query, WIDE_NUMBERS_OF_GRADIENTS)
    # Gradients are contiguous, whatever the strides of the inputs.
    d_query = torch.empty_like(query, memory_format=torch.contiguous_format)
    launch(
        backward_device.backward_queries,
        (ceil_div(queries, blocks.queries) * heads * batch,),
        *operands,
        starts,
        stops,
        d_query,
        queries,
        key.shape[1],
        _count_together(heads * batch, key, heads // key.shape[2]),
        *numbers,
        M=blocks.queries,
        N=blocks.keys,
        warps=blocks.warps,
        stages=blocks.stages,
        **options,
    )
    return d_query


def _launch_keys(
    operands: _BackwardOperands,
    first: Tensor,
    last: Tensor,
    numbers: tuple[float, ...],
    options: dict[str, Any],
) -> tuple[Tensor, Tensor]:
    """Return the gradients of keys and values."""
    query, key = operands.query, operands.key
    batch, keys, groups, _ = key.shape
    d_key = torch.empty_like(key, memory_format=torch.contiguous_format)
    d_value = torch.empty_like(operands.value, memory_format=torch.contiguous_format)
    blocks = choose_blocks(BACKWARD_KEYS[read_generation(query)], query)
    launch(
        backward_device.backward_keys,
        (ceil_div(keys, blocks.keys) * groups * batch,),
        *operands,
        first,
        last,
        d_key,
        d_value,
        query.shape[1],
        keys,
        _count_together(groups * batch, query, groups / query.shape[2]),
        *numbers,
        M=blocks.queries,
        N=blocks.keys,
        warps=blocks.warps,
        stages=blocks.stages,
        **options,
    )
    return d_key, d_value


def _prepare(d_out: Tensor, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """Return what the scores of each query need in the backward pass, fp32 [B, N, padded queries]:
    the shift of its exponents, and what is subtracted from the gradients of its shares."""
    batch, queries, heads, width = d_out.shape
    padded = PADDING * ceil_div(queries, PADDING)
    # Padding included, which the kernel also writes: later loads need no mask.
    shift, delta = lse.new_empty(2, batch, heads, padded)
    tall = 32  # with more rows, heads of 256 would not fit in registers
    launch(
        backward_device.prepare_backward,
        (padded // tall * heads * batch,),
        d_out,
        out.contiguous(),
        lse,
        shift,
        delta,
        queries,
        heads,
        width,
        *d_out.stride()[:3],
        M=tall,
        WIDTH=next_power_of_2(width),
    )
    return shift, delta
