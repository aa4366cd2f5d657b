"""Residents: the units whose values are whole on this rank while ZeRO stage 3 divides values.

A block's values stay until another block needs the space, because a backward pass begins where the
forward pass ended. The large tables at the ends of the model are released as soon as they are used.
"""

from __future__ import annotations

from collections.abc import Sequence

from megaframe.data_parallel.bucket import Bucket
from megaframe.data_parallel.grouping import TABLES
from megaframe.schedule.zero_buffers import BLOCKS_PRESENT


class Residents:
    """Fetches values ahead of their use, and drops others to make room. A unit is given as its
    buckets, always as the same list; blocks that share buckets are one unit. Of blocks, the one
    taken last and the one fetched last are always kept."""

    def __init__(self) -> None:
        self._blocks: list[Sequence[Bucket]] = []

    def fetch(self, unit: Sequence[Bucket]) -> None:
        """Start fetching the unit's values, if they are not here."""
        if not _at_the_ends(unit):
            self._blocks = [other for other in self._blocks if other is not unit]
            if len(self._blocks) == BLOCKS_PRESENT:
                _drop(self._blocks.pop(0))
            self._blocks.append(unit)
        for bucket in unit:
            bucket.fetch()

    def take(self, unit: Sequence[Bucket], without: Sequence[Bucket] = ()) -> None:
        """Return when the unit's values are here; those of `without` may still be on their way."""
        self.fetch(unit)
        for bucket in unit:
            if bucket not in without:
                bucket.take()

    def leave(self, unit: Sequence[Bucket]) -> None:
        """Say that the unit's values are not used until taken again. Tables are dropped."""
        if _at_the_ends(unit):
            _drop(unit)

    def clear(self) -> None:
        """Drop the values of all blocks."""
        while self._blocks:
            _drop(self._blocks.pop())


def _at_the_ends(unit: Sequence[Bucket]) -> bool:
    return any(b.parameters[0].spec.role in TABLES for b in unit)


def _drop(unit: Sequence[Bucket]) -> None:
    for bucket in unit:
        bucket.drop()
