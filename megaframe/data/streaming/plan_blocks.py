"""Which block is made next, and which one makes room: from what readers need and what is there.

Every block that a reader needs has a rank: 0 for one that a reader waits for or reads, then 1, 2
and so on for those that follow, and more for those that it may come back to. The block with the
lowest rank is made first, and only blocks with a higher rank make room for it. So what is made
ahead for one reader never keeps another one waiting.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from megaframe.data.streaming.block_cache import Demand
from megaframe.data.streaming.corpus import Block, StreamOrder

_RETURNING = 1 << 20
"""Rank of what a reader has read and may come back to."""
UNNEEDED = 1 << 30
"""Rank of what nobody needs."""

Key = tuple[str, Block]
"""The digest of a corpus, and a block of it."""


class StoredBlock(NamedTuple):
    """A block that is in the cache or being made: its bytes, and whether it is the last of its
    shard."""

    size: int
    is_last: bool


@dataclass(frozen=True)
class BlockRanks:
    """The blocks that readers need.

    Attributes:
        ranks: Rank of each block.
        missing: Those that are not there, the lowest rank first.
    """

    ranks: Mapping[Key, int]
    missing: Sequence[Key]


def rank_blocks(
    demands: Sequence[Demand],
    stored: Mapping[Key, StoredBlock],
    find_order: Callable[[str, int], StreamOrder],
    limit: int,
) -> BlockRanks:
    """Rank the blocks that readers need.

    Args:
        demands: Of the readers.
        stored: What is in the cache or being made.
        find_order: Returns the order of a corpus, by its digest, under a seed.
        limit: Bytes of the cache: how far ahead a reader can look.
    """
    ranks: dict[Key, int] = {}
    missing: dict[Key, int] = {}
    for demand in demands:
        order = find_order(demand.digest, demand.seed)
        for rank, key in _walk(demand, order, stored, limit):
            ranks[key] = min(rank, ranks.get(key, UNNEEDED))
            if key not in stored:
                missing[key] = min(rank, missing.get(key, UNNEEDED))
    return BlockRanks(ranks, sorted(missing, key=lambda key: (missing[key], key)))


def _walk(
    demand: Demand, order: StreamOrder, stored: Mapping[Key, StoredBlock], limit: int
) -> Iterator[tuple[int, Key]]:
    """Yield the rank of each block that a reader needs, up to the first one that is missing."""
    position, rank = demand.first, 0
    while position < demand.current:
        key = (demand.digest, order.find_block(position))
        if key not in stored:
            break
        yield _RETURNING + rank, key
        position, rank = order.find_next(position, is_last=stored[key].is_last), rank + 1
    position, size, seen = demand.current, 0, set[Key]()
    for rank in range(_RETURNING):
        key = (demand.digest, order.find_block(position))
        if key in seen or size > limit:
            return  # the whole corpus is there, or as much as there is room for
        seen.add(key)
        yield rank, key
        if key not in stored or not demand.reads_ahead:
            return
        size += stored[key].size
        position = order.find_next(position, is_last=stored[key].is_last)


def choose_victim(
    ranks: Mapping[Key, int], stored: Mapping[Key, StoredBlock], rank: int
) -> Key | None:
    """Return the block to delete for one of this rank: the one with the highest rank above it."""
    victim = max(stored, key=lambda key: ranks.get(key, UNNEEDED), default=None)
    return victim if victim is not None and ranks.get(victim, UNNEEDED) > rank else None
