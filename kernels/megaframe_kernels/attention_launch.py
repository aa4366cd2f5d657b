"""Launches of attention's kernels, and the blocks they work in on each generation of chips.

The shape legend is that of `attention.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from megaframe_kernels import attention_backward_device, attention_device
from megaframe_kernels.device import ceil_div, generation, launch, power_of_2

PADDING: int = attention_backward_device.PADDING.value
_CACHED = 32 * 2**20
"""Bytes of what programs that start together read, which the cache of a large chip holds."""


@dataclass(frozen=True)
class Blocks:
    """queries, keys: of a block. warps, stages: as Triton has them."""

    queries: int
    keys: int
    warps: int
    stages: int


Table: TypeAlias = dict[int, Blocks]
"""By the padded width of a head; what is in between takes the next."""

FORWARD: dict[int, Table] = {
    8: {64: Blocks(128, 64, 8, 3), 128: Blocks(128, 64, 8, 3), 256: Blocks(64, 64, 8, 2)},
    9: {64: Blocks(128, 128, 8, 3), 128: Blocks(128, 64, 8, 3), 256: Blocks(128, 64, 8, 2)},
    10: {64: Blocks(128, 64, 8, 3), 128: Blocks(128, 128, 8, 2), 256: Blocks(64, 64, 8, 2)},
}
"""Of 16-bit numbers, by generation of the chip."""
BACKWARD_QUERIES: dict[int, Table] = {
    8: {64: Blocks(128, 64, 8, 2), 128: Blocks(128, 64, 8, 2), 256: Blocks(64, 32, 8, 2)},
    9: {64: Blocks(128, 64, 8, 3), 128: Blocks(128, 64, 8, 3), 256: Blocks(64, 32, 8, 3)},
    10: {64: Blocks(128, 64, 8, 3), 128: Blocks(128, 64, 8, 3), 256: Blocks(64, 32, 8, 3)},
}
"""With three stages the loads of a visit are under way during the whole visit before it; with two
they start at its end, and are waited for at once. Ampere's smaller chips have room for two."""
BACKWARD_KEYS: dict[int, Table] = {
    8: {64: Blocks(32, 128, 8, 2), 128: Blocks(64, 64, 8, 2), 256: Blocks(32, 32, 8, 2)},
    9: {64: Blocks(64, 128, 8, 3), 128: Blocks(32, 128, 8, 3), 256: Blocks(32, 64, 8, 1)},
    10: {64: Blocks(64, 128, 8, 3), 128: Blocks(64, 128, 8, 2), 256: Blocks(32, 64, 8, 1)},
}
"""The largest blocks that stay in registers, which each assembler fills in its own way."""
BACKWARD_FUSED: dict[int, Table] = {
    8: {64: Blocks(32, 128, 8, 2), 128: Blocks(64, 64, 8, 2), 256: Blocks(32, 32, 8, 2)},
    9: {64: Blocks(64, 128, 8, 3), 128: Blocks(64, 128, 8, 3), 256: Blocks(64, 32, 8, 2)},
    10: {64: Blocks(64, 128, 8, 3), 128: Blocks(64, 64, 8, 3), 256: Blocks(32, 64, 8, 1)},
}
"""Of the pass that makes all three gradients. The more keys a block has, the fewer sums of queries
travel to memory; with fewer than 64 queries Hopper makes those of queries by the slower units of
the generation before. Blackwell's blocks fill its tensor memory."""
BACKWARD_FUSED_CAPPED = BACKWARD_FUSED | {9: BACKWARD_FUSED[9] | {128: Blocks(64, 64, 8, 3)}}
"""With a softcap, whose hyperbolic tangent takes registers of its own."""
WIDE_NUMBERS, WIDE_NUMBERS_BY_QUERIES = Blocks(32, 32, 8, 1), Blocks(32, 16, 8, 1)
"""For fp32, whose products take the slow units whatever the blocks are. The backward pass by
queries keeps most in registers."""


def scale_or_default(query: Tensor, scale: float | None) -> float:
    """What scores are multiplied by: D^(-1/2) where nothing is given."""
    return query.shape[-1] ** -0.5 if scale is None else scale


def choose_blocks(table: Table, x: Tensor, wide_numbers: Blocks = WIDE_NUMBERS) -> Blocks:
    """Return the blocks of a table for heads as wide as those of x."""
    if x.dtype == torch.float32:
        return wide_numbers
    return table[min(wide for wide in table if wide >= x.shape[-1])]


def _options(x: Tensor, scale: float | None, softcap: float | None) -> dict[str, Any]:
    width = power_of_2(max(x.shape[-1], 16))
    return {
        "CAP": softcap is not None,
        "WIDTH": width,
        "EVEN": width == x.shape[-1],
        "PRECISION": "ieee" if x.dtype == torch.float32 else "tf32",
    }


def _adjacent(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def _together(pairs: int, rows: Tensor, shared: float) -> int:
    """How many pairs of a head and a sample start together, where `shared` of them read the same
    head of rows [B, length, heads, D] and of others like them."""
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
    blocks: Blocks | None = None,
) -> tuple[Tensor, Tensor]:
    """Out [B, Q, N, D] and log-sum-exp, fp32 [B, N, Q]."""
    query, key, value = _adjacent(query), _adjacent(key), _adjacent(value)
    batch, queries, heads, width = query.shape
    per_group = heads // key.shape[2]
    out = torch.empty_like(query, memory_format=torch.contiguous_format)
    lse = query.new_empty(batch, heads, queries, dtype=torch.float32)
    blocks = blocks or choose_blocks(FORWARD[generation(query)], query)
    launch(
        attention_device.forward,
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
        _together(heads * batch, key, per_group),
        heads,
        per_group,
        width,
        *query.stride()[:3],
        *key.stride()[:3],
        *value.stride()[:3],
        scale_or_default(query, scale),
        softcap or 1.0,
        RAW=softcap is None and scale_or_default(query, scale) > 0.0,
        LATE=generation(query) > 8,  # where matrix units work by themselves
        M=blocks.queries,
        N=blocks.keys,
        warps=blocks.warps,
        stages=blocks.stages,
        **_options(query, scale, softcap),
    )
    return out, lse


def launch_backward(
    d_out: Tensor,
    d_lse: Tensor | None,
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
    fused: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of query, key, value and sinks (empty without them); `fused`: all in one pass.

    Of a ring, `out` and `lse` are those over all keys, and the keys here a part of them.
    """
    query, key, value, d_out = (_adjacent(x) for x in (query, key, value, d_out))
    batch, queries, heads, width = query.shape
    padded = PADDING * ceil_div(queries, PADDING)
    shift, delta = lse.new_empty(2, batch, heads, padded)
    tall = 32  # of heads of 256, more rows would leave the registers
    launch(
        attention_backward_device.prepare_backward,
        (padded // tall * heads * batch,),
        d_out,
        out.contiguous(),
        lse,
        None if d_lse is None else d_lse.contiguous(),
        shift,
        delta,
        queries,
        heads,
        width,
        *d_out.stride()[:3],
        M=tall,
        WIDTH=power_of_2(width),
    )
    groups, per_group = key.shape[2], heads // key.shape[2]
    strides = (s for x in (query, key, value, d_out) for s in x.stride()[:3])
    lengths = queries, key.shape[1]
    numbers = (heads, per_group, width, *strides, scale_or_default(query, scale), softcap or 1.0)
    d_query, d_key, d_value = (
        torch.empty_like(x, memory_format=torch.contiguous_format) for x in (query, key, value)
    )
    options = _options(query, scale, softcap)
    saved = (query, key, value, d_out, shift, delta)
    by_key = _key_blocks(query, softcap, fused)
    sums = None
    if fused:
        sums = lse.new_zeros(max(batch * heads * padded, 1), options["WIDTH"])
    else:
        table = BACKWARD_QUERIES[generation(query)]
        by_query = choose_blocks(table, query, WIDE_NUMBERS_BY_QUERIES)
        launch(
            attention_backward_device.backward_queries,
            (ceil_div(queries, by_query.queries) * heads * batch,),
            *saved,
            starts,
            stops,
            d_query,
            *lengths,
            _together(heads * batch, key, per_group),
            *numbers,
            M=by_query.queries,
            N=by_query.keys,
            warps=by_query.warps,
            stages=by_query.stages,
            **options,
        )
    bulk = fused and generation(query) > 8 and query.device.type != "cpu"  # not interpreted
    launch(
        attention_backward_device.backward_keys,
        (ceil_div(key.shape[1], by_key.keys) * groups * batch,),
        *saved,
        first,
        last,
        d_key,
        d_value,
        TensorDescriptor.from_tensor(sums, [by_key.queries, options["WIDTH"]]) if bulk else sums,
        *lengths,
        _together(groups * batch, query, 1 / per_group),
        *numbers,
        BULK=bulk,
        M=by_key.queries,
        N=by_key.keys,
        warps=by_key.warps,
        stages=by_key.stages,
        **options,
    )
    if sums is not None and d_query.numel():
        made = sums.view(batch, heads, padded, -1)[:, :, :queries, :width]
        torch.mul(made.transpose(1, 2), scale_or_default(query, scale), out=d_query)
    d_sinks = query.new_empty(0)
    if sinks is not None:
        share = (sinks.float()[None, :, None] - lse).exp()
        d_sinks = -(share * delta[:, :, :queries]).sum((0, 2)).to(sinks.dtype)
    return d_query, d_key, d_value, d_sinks


def _key_blocks(query: Tensor, softcap: float | None, fused: bool) -> Blocks:
    tables = BACKWARD_KEYS
    if fused:
        tables = BACKWARD_FUSED if softcap is None else BACKWARD_FUSED_CAPPED
    return choose_blocks(tables[generation(query)], query)
