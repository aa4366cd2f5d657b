"""What recurrent mixers launch: block sizes, and the order of the kernels."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megaframe_kernels.device import ceil_div, launch, next_power_of_2
from megaframe_kernels.recurrent.backward_device import (
    differentiate_chunks,
    differentiate_corrections,
    return_through_chunks,
)
from megaframe_kernels.recurrent.forward_device import pass_chunks, prepare_chunks

WIDEST = 256
_LEAST = 16
"""Rows and columns of the smallest matrix product."""


def choose_chunk(key: Tensor, channels: bool) -> int:
    """Return how many tokens a chunk has; what is computed does not depend on it.

    Args:
        key: [B, S, G, K].
        channels: Whether channels decay by themselves.
    """
    # What registers hold: tiles of a chunk are as wide as keys, and those of decays may be, too.
    most = 64 if _is_easy(key, channels) else 32
    most = _LEAST if key.dtype == torch.float32 else most
    return max(min(most, next_power_of_2(key.shape[1])), _LEAST)


def _is_easy(key: Tensor, channels: bool) -> bool:
    narrow = key.shape[-1] <= WIDEST // 2
    return narrow and not channels and key.dtype != torch.float32


def _choose_constants(query: Tensor, strength: Tensor | None, sums: Tensor) -> dict[str, Any]:
    channels = sums.shape[-1] > 1
    return {
        "CORRECTS": strength is not None,
        "CHANNELS": channels,
        "L": choose_chunk(query, channels),
        "WIDTH": max(next_power_of_2(query.shape[-1]), _LEAST),
        "PRECISION": "ieee" if query.dtype == torch.float32 else "tf32",
        "warps": 8,
        "stages": 2 if _is_easy(query, channels) else 1,
    }


def _choose_columns(value: Tensor) -> int:
    """Return how many columns of its state a program keeps."""
    return 16 if value.dtype == torch.float32 else 32


def launch_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    strength: Tensor | None,
    sums: Tensor,
    documents: Tensor,
    initial: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the outputs, the final states, and what the backward pass needs: scores, inverses,
    corrections, and the states before chunks; all as `pass_chunks` describes them."""
    batch, length, groups, width = query.shape
    heads, value_width = value.shape[2:]
    query, key, value, sums = (x.contiguous() for x in (query, key, value, sums))
    strength = None if strength is None else strength.contiguous()
    initial = None if initial is None else initial.contiguous()
    constants = _choose_constants(query, strength, sums)
    size = constants["L"]
    chunks = ceil_div(length, size)
    scores = query.new_empty(batch, heads, chunks, size, size)
    inverse, corrections = (query.new_empty(0), query.new_empty(0))
    if strength is not None:
        inverse, corrections = torch.empty_like(scores), torch.empty_like(value)
    out, states = (
        torch.empty_like(value),
        query.new_empty(batch, heads, chunks, width, value_width),
    )
    final = query.new_zeros(batch, heads, width, value_width, dtype=torch.float32)
    launch(
        prepare_chunks,
        (batch * heads, chunks),
        *(query, key, strength, sums, documents, scores, inverse),
        *(length, heads, groups, width),
        LEVELS=size.bit_length() - 1,
        **constants,
    )
    columns = _choose_columns(value)
    launch(
        pass_chunks,
        (batch * heads, ceil_div(value_width, columns)),
        *(query, key, value, strength, sums, documents, initial, scores, inverse),
        *(out, corrections, states, final),
        *(length, heads, groups, width, value_width, chunks),
        COLUMNS=columns,
        **constants,
    )
    return out, final, scores, inverse, corrections, states


def launch_backward(
    d_out: Tensor,
    d_final: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    strength: Tensor | None,
    sums: Tensor,
    documents: Tensor,
    scores: Tensor,
    inverse: Tensor,
    corrections: Tensor,
    states: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of queries, keys, values, strengths (empty without any), sums, and the
    states before all tokens.

    Args:
        d_out: Gradient of the outputs.
        d_final: That of the final states, or None.
        query: As for `launch_forward`, and so are the others.
        key: Keys.
        value: Values.
        strength: Strengths of corrections, or None.
        sums: Logarithms of decays since the start of each chunk.
        documents: Of the tokens.
        scores: As `launch_forward` returned them, and so are the others.
        inverse: Inverses of the systems.
        corrections: Solutions of the systems.
        states: Before each chunk.
    """
    batch, length, groups, width = query.shape
    heads, value_width = value.shape[2:]
    d_out, query, key, value, sums = (x.contiguous() for x in (d_out, query, key, value, sums))
    strength = None if strength is None else strength.contiguous()
    d_final = None if d_final is None else d_final.contiguous()
    constants = _choose_constants(query, strength, sums)
    chunks = states.shape[2]
    d_value, d_states, d_sums = (torch.empty_like(x) for x in (value, states, sums))
    d_corrections, d_strength = (query.new_empty(0), sums.new_empty(0))
    if strength is not None:
        d_corrections, d_strength = torch.empty_like(value), torch.empty_like(strength)
    d_initial = sums.new_zeros(batch, heads, width, value_width)
    columns = _choose_columns(value)
    launch(
        return_through_chunks,
        (batch * heads, ceil_div(value_width, columns)),
        *(d_out, d_final, query, key, strength, sums, documents, scores, inverse),
        *(d_corrections, d_value, d_states, d_initial),
        *(length, heads, groups, width, value_width, chunks),
        COLUMNS=columns,
        **constants,
    )
    # Of each value head; those that share a key head are added up.
    d_query, d_key = (query.new_empty(batch, length, heads, width) for _ in range(2))
    sizes = length, heads, groups, width, value_width
    options = {**constants, "LEVELS": constants["L"].bit_length() - 1, "COLUMNS": columns}
    options["stages"] = 1
    corrects = options.pop("CORRECTS")
    launch(
        differentiate_chunks,
        (batch * heads, chunks),
        *(d_out, query, key, sums, documents, corrections if corrects else value),
        *(states, d_states, d_query, d_key, d_sums),
        *sizes,
        **options,
    )
    if strength is not None:
        d_more_key, d_more_sums = torch.empty_like(d_key), torch.empty_like(d_sums)
        launch(
            differentiate_corrections,
            (batch * heads, chunks),
            *(key, value, strength, sums, documents, corrections, d_corrections, states),
            *(d_more_key, d_strength, d_more_sums),
            *sizes,
            **options,
        )
        d_key, d_sums = d_key + d_more_key, d_sums + d_more_sums
    if heads > groups:
        d_query, d_key = (x.unflatten(2, (groups, -1)).sum(3) for x in (d_query, d_key))
    return d_query, d_key, d_value, d_strength, d_sums, d_initial
