"""Order: compares every operation that ranks start on a group with that of the other ranks.

The n-th operation that a rank starts on a group must be the n-th operation of every other member.
The first rank to start it writes it to the store, and later ranks compare theirs with it. No rank
waits for another, a hang becomes two lines that differ, and correct schedules may still run ahead.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence

from torch.distributed import Store

from megaframe.comm.place import Place
from megaframe.errors import OutOfStep

_KEPT = 512
"""Entries of a group to keep in the store; members are never this many operations apart."""


class Order:
    """This rank's side of the comparison. store: shared by all ranks."""

    def __init__(self, store: Store, rank: int, place: Place) -> None:
        self._store: Store = store.clone()  # type: ignore[attr-defined]  # not in torch's stubs
        self._rank, self._place = rank, place
        self._begun: Counter[str] = Counter()

    def begin(self, group: str, axes: str, first: bool, what: Sequence[str], alike: bool) -> None:
        """Compare an operation that this rank is about to start on a group.

        group: the name of the group, the same on all members.
        axes: the axes of the group, for messages.
        first: this rank is the first member of the group.
        what: kind, type and shape.
        alike: all members are in the same action when they start it.
        Raises `OutOfStep` if a member has started something else.
        """
        number = self._begun[group]
        self._begun[group] += 1
        action = self._place.action
        compared = [*what, action if alike else ""]
        mine = json.dumps([compared, self._rank, action])
        key = f"order/{group}/{number}"
        theirs = self._store.compare_set(key, "", mine).decode()
        if first and number >= _KEPT:
            self._store.delete_key(f"order/{group}/{number - _KEPT}")
        other, rank, where = json.loads(theirs)
        if other != compared:
            raise OutOfStep(
                f"the ranks over {axes} do not start the same thing: rank {self._rank} starts "
                f"{_shown(what, action)}, rank {rank} started {_shown(other, where)}",
                (self._rank, rank),
            )


def _shown(what: Sequence[str], action: str) -> str:
    """Return for example `all_reduce of torch.float32 [4, 8] in action 0B1`."""
    kind, *rest = what[:3]
    return f"{kind} of {' '.join(rest)}" + (f" in action {action}" if action else "")
