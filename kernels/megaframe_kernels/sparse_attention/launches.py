"""What attention to the latents of chosen keys launches: block sizes, and the order of kernels."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megaframe_kernels.device import ceil_div, launch, next_power_of_2
from megaframe_kernels.sparse_attention import device

WIDEST = 512
"""Columns of the summed part of a latent that registers hold for a block of heads."""
_LEAST = 16
"""Rows and columns of the smallest matrix product."""


def _choose_constants(query: Tensor, values: int) -> dict[str, Any]:
    width = query.shape[-1]
    wide = query.dtype == torch.float32
    return {
        # The gradient of queries has three tiles of so many rows and 512 columns in registers, one
        # of them in fp32; that of latents has one tile of keys in fp32.
        "M": _LEAST,
        "N": _LEAST if wide else 32,
        "SHARED": max(next_power_of_2(width - values), _LEAST),
        "VALUES": max(next_power_of_2(values), _LEAST),
        "PRECISION": "ieee" if wide else "tf32",
        "warps": 8,
        "stages": 1,
    }


def find_ends(places: Tensor) -> Tensor:
    """Return of each query the number of chosen keys after which it sees none, int32 [Q]."""
    numbers = torch.arange(1, places.shape[1] + 1, device=places.device, dtype=torch.int32)
    return ((places >= 0) * numbers).amax(1)


def launch_forward(
    query: Tensor, latents: Tensor, places: Tensor, value_width: int, scale: float
) -> tuple[Tensor, Tensor]:
    """Return the outputs [Q, H, V] and the log-sum-exps [Q, H] in fp32. The arguments are those of
    the reference."""
    query, latents, places = (x.contiguous() for x in (query, latents, places))
    number, heads, width = query.shape
    constants = _choose_constants(query, value_width)
    out = query.new_empty(number, heads, value_width)
    lse = query.new_empty(number, heads, dtype=torch.float32)
    launch(
        device.attend,
        (number, ceil_div(heads, constants["M"])),
        *(query, latents, places, find_ends(places), out, lse),
        *(heads, places.shape[1], width - value_width, value_width, scale),
        **constants,
    )
    return out, lse


def launch_backward(
    d_out: Tensor,
    query: Tensor,
    latents: Tensor,
    places: Tensor,
    out: Tensor,
    lse: Tensor,
    value_width: int,
    scale: float,
    together: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the gradients of queries and latents.

    What queries add to the gradient of a latent is written for some queries at a time, sorted by
    key and summed, so that no two programs add to the same place and results are bitwise
    repeatable.

    Args:
        d_out: Gradient of the outputs.
        query: As for the reference, and so are the others.
        latents: Latents.
        places: Of chosen keys.
        out: Outputs.
        lse: Log-sum-exps.
        value_width: Columns that are summed.
        scale: Of the scores.
        together: Queries whose parts are written before they are summed; None for as many as take
            no more memory than all queries do.
    """
    d_out, query, latents, places = (x.contiguous() for x in (d_out, query, latents, places))
    (number, heads, width), chosen = query.shape, places.shape[1]
    constants = _choose_constants(query, value_width)
    ends = find_ends(places)
    mean = torch.linalg.vecdot(d_out.float(), out.float())
    sizes = heads, chosen, width - value_width, value_width, scale
    known = d_out, query, latents, places, ends, lse.contiguous(), mean
    d_query = torch.empty_like(query)
    grid = number, ceil_div(heads, constants["M"])
    launch(device.differentiate_queries, grid, *known, d_query, *sizes, **constants)
    d_latents = latents.new_zeros(latents.shape, dtype=torch.float32)
    row = chosen * width * d_latents.element_size()
    step = together or max(1, min(number, query.numel() * query.element_size() // row))
    parts = d_latents.new_empty(step * chosen, width)
    columns = max(next_power_of_2(width), _LEAST)
    for first in range(0, number, step):
        some = places[first : first + step]
        grid = len(some), ceil_div(chosen, constants["N"])
        launch(device.differentiate_latents, grid, *known, parts, first, *sizes, **constants)
        order, starts = _sort_by_key(some, len(latents))
        known_parts = parts, order, starts, d_latents, width
        launch(device.add_parts, (len(latents),), *known_parts, WIDTH=columns)
    return d_query, d_latents.to(latents.dtype)


def _sort_by_key(places: Tensor, keys: int) -> tuple[Tensor, Tensor]:
    """Return the numbers of chosen keys, those of the same key together and in order, and where
    those of each key start, int32 [keys + 1]."""
    sorted_places, order = places.flatten().sort(stable=True)
    numbers = torch.arange(keys + 1, device=places.device, dtype=places.dtype)
    return order.int(), torch.searchsorted(sorted_places, numbers).int()


def launch_shares(
    query: Tensor, latents: Tensor, places: Tensor, lse: Tensor, value_width: int, scale: float
) -> Tensor:
    """Return the sums over heads of the shares of chosen keys, fp32 [Q, C]. The arguments are those
    of the reference."""
    query, latents, places, lse = (x.contiguous() for x in (query, latents, places, lse))
    (number, heads, width), chosen = query.shape, places.shape[1]
    constants = _choose_constants(query, value_width)
    shares = query.new_empty(number, chosen, dtype=torch.float32)
    launch(
        device.sum_shares,
        (number, ceil_div(chosen, constants["N"])),
        *(query, latents, places, lse, shares),
        *(heads, chosen, width - value_width, value_width, scale),
        **{**constants, "warps": 4},
    )
    return shares
