"""Tiles of grouped products: their sizes, which rows belong to each, and in which order they are
computed.

Each expert's rows are divided into tiles starting at its first row, so no tile has rows of two
experts. The tiles of all experts are numbered consecutively.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from megaframe_kernels.device import read_generation


@dataclass(frozen=True)
class Tiles:
    """Rows, columns and depth of a tile; warps and stages in Triton's sense."""

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int


TILES = {
    8: Tiles(128, 128, 64, 8, 3),
    9: Tiles(128, 256, 64, 8, 3),
    10: Tiles(128, 256, 64, 8, 3),
}
"""For 16-bit types, by generation of the chip."""
_FP32_TILES = Tiles(32, 32, 32, 4, 2)
"""For fp32."""


def choose_tiles(x: Tensor, tiles: Tiles | None) -> tuple[Tiles, str]:
    """Return the tiles for the type and chip of x, unless they are given, and the precision of
    products in Triton's sense."""
    wide = x.dtype == torch.float32
    chosen = _FP32_TILES if wide else TILES[read_generation(x)]
    # fp32 operands are not rounded to tf32; 16-bit operands ignore this option.
    return tiles or chosen, "ieee" if wide else "tf32"


@triton.jit
def _count_tiles(
    ends: tl.tensor,
    count: tl.tensor,
    places: tl.tensor,
    ROWS: tl.constexpr,
    EXPERTS: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """Return every expert, where its places start and end, and its number of tiles. Places beyond
    the last end belong to an extra expert numbered `count`."""
    expert = tl.arange(0, EXPERTS)
    # One more than the experts: the last has the places beyond the last end.
    exists = expert <= count
    end = tl.load(ends + expert, mask=expert < count, other=places)
    # An expert starts where the one before ends.
    start = tl.load(ends + expert - 1, mask=exists & (expert > 0), other=0)
    return expert, start, end, tl.where(exists, tl.cdiv(end - start, ROWS), 0)


@triton.jit
def find_tile(
    ends: tl.tensor,
    tile: tl.tensor,
    count: tl.tensor,
    places: tl.tensor,
    ROWS: tl.constexpr,
    EXPERTS: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Return which rows a tile has.

    Args:
        ends: Where each expert's places end.
        tile: Number of the tile among those of all experts.
        count: Number of experts.
        places: Number of places.
        ROWS: Rows of a tile.
        EXPERTS: A power of two above `count`.

    Returns:
        The expert of the tile (more than `count` if there is no such tile), the tile's first place,
        and where the expert's places end.
    """
    expert, start, end, tiles = _count_tiles(ends, count, places, ROWS, EXPERTS)
    # The tile's expert is the number of experts whose tiles all come before it.
    until = tl.cumsum(tiles, 0)
    selected = tl.sum(tl.where((expert <= count) & (until <= tile), 1, 0), 0)
    is_selected = expert == selected
    # One element is left, so the sum selects it. until - tiles is the number of the expert's first
    # tile.
    first = tl.sum(tl.where(is_selected, start + (tile - until + tiles) * ROWS, 0), 0)
    return selected, first, tl.sum(tl.where(is_selected, end, 0), 0)


@triton.jit
def find_tiles(
    ends: tl.tensor,
    selected: tl.tensor,
    count: tl.tensor,
    ROWS: tl.constexpr,
    EXPERTS: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Return the first tile of an expert, and its number of tiles.

    Args:
        ends: Where each expert's places end.
        selected: Number of the expert, below `count`.
        count: Number of experts.
        ROWS: Rows of a tile.
        EXPERTS: A power of two above `count`.
    """
    expert, _, _, tiles = _count_tiles(ends, count, 0, ROWS, EXPERTS)
    before = tl.sum(tl.where(expert < selected, tiles, 0), 0)
    return before, tl.sum(tl.where(expert == selected, tiles, 0), 0)


@triton.jit
def walk(program: tl.tensor, down: tl.tensor, across: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """Return a program's tile. Programs that run at the same time share eight rows of tiles, or
    fewer at the end, so what they read of both operands stays in the cache.

    Args:
        program: Number of the program.
        down: Rows of tiles.
        across: Columns of tiles.
    """
    together = 8 * across
    # Bands of eight rows of tiles; within a band, programs go down before they go right.
    first = program // together * 8
    tall = tl.minimum(down - first, 8)
    in_band = program % together
    return first + in_band % tall, in_band // tall
