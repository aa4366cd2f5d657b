"""Device code of grouped products: whose rows a tile has, and in which order tiles are computed.

The rows of an expert are cut into tiles from its first one on, so no tile has rows of two experts,
and the tiles of all lie one after the other.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _tiles(
    ends: tl.tensor,
    count: tl.tensor,
    places: tl.tensor,
    ROWS: tl.constexpr,
    EXPERTS: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """Every expert, where its places start and end, and its tiles. Places that no expert has are
    those of the expert `count`."""
    expert = tl.arange(0, EXPERTS)
    known = expert <= count
    end = tl.load(ends + expert, mask=expert < count, other=places)
    start = tl.load(ends + expert - 1, mask=known & (expert > 0), other=0)
    return expert, start, end, tl.where(known, tl.cdiv(end - start, ROWS), 0)


@triton.jit
def find_tile(
    ends: tl.tensor,
    tile: tl.tensor,
    count: tl.tensor,
    places: tl.tensor,
    ROWS: tl.constexpr,
    EXPERTS: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Expert of a tile of rows (more than `count` if there is no such tile), its first place, and
    where the expert's places end."""
    expert, start, end, tiles = _tiles(ends, count, places, ROWS, EXPERTS)
    until = tl.cumsum(tiles, 0)
    mine = tl.sum(tl.where((expert <= count) & (until <= tile), 1, 0), 0)
    here = expert == mine
    first = tl.sum(tl.where(here, start + (tile - until + tiles) * ROWS, 0), 0)
    return mine, first, tl.sum(tl.where(here, end, 0), 0)


@triton.jit
def tiles_of(
    ends: tl.tensor, mine: tl.tensor, count: tl.tensor, ROWS: tl.constexpr, EXPERTS: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """The first tile of an expert below `count`, and the number of its tiles."""
    expert, _, _, tiles = _tiles(ends, count, 0, ROWS, EXPERTS)
    before = tl.sum(tl.where(expert < mine, tiles, 0), 0)
    return before, tl.sum(tl.where(expert == mine, tiles, 0), 0)


@triton.jit
def walk(program: tl.tensor, down: tl.tensor, across: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """A program's tile. Programs that run together share eight rows of tiles, or fewer at the end:
    what they read of either side stays in the cache."""
    together = 8 * across
    first = program // together * 8
    tall = tl.minimum(down - first, 8)
    rest = program % together
    return first + rest % tall, rest // tall
