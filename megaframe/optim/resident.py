"""Residents: the units whose values are whole on this rank, where ZeRO stage 3 divides them.

A block's values stay until another block needs the room, because a backward pass begins where the
forward pass ended. The large tables at the ends of the model are used once and go at once.
"""

from __future__ import annotations

from collections.abc import Sequence

from megaframe.optim.bucket import Bucket
from megaframe.plan.lent import BLOCKS

TABLES = ("embedding", "head")
"""Roles of what is used at one end of the model only."""


class Residents:
    """Fetches values ahead of their use, and lets others go for them. A unit is given as its
    buckets, always the same list. Of blocks, the one taken last and the one fetched last are never
    let go."""

    def __init__(self) -> None:
        self._blocks: list[Sequence[Bucket]] = []

    def fetch(self, unit: Sequence[Bucket]) -> None:
        """Start bringing the unit's values, if they are not here."""
        if not _at_the_ends(unit):
            self._blocks = [other for other in self._blocks if other is not unit]
            if len(self._blocks) == BLOCKS:
                _drop(self._blocks.pop(0))
            self._blocks.append(unit)
        for bucket in unit:
            bucket.fetch()

    def take(self, unit: Sequence[Bucket], without: Sequence[Bucket] = ()) -> None:
        """Return when the unit's values are here, or are on their way."""
        self.fetch(unit)
        for bucket in unit:
            if bucket not in without:
                bucket.take()

    def leave(self, unit: Sequence[Bucket]) -> None:
        """The unit's values are not used until they are taken again."""
        if _at_the_ends(unit):
            _drop(unit)

    def clear(self) -> None:
        """Let everything go."""
        while self._blocks:
            _drop(self._blocks.pop())


def _at_the_ends(unit: Sequence[Bucket]) -> bool:
    return any(b.parameters[0].spec.role in TABLES for b in unit)


def _drop(unit: Sequence[Bucket]) -> None:
    for bucket in unit:
        bucket.drop()
