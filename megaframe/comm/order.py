"""Order: every rank's next collective compared with that of the others before it starts.

Of a group, the n-th thing that a rank starts has to be the n-th that every other member starts. The
first to come writes down what it starts, and whoever comes later compares: so nobody waits for
anybody, a hang becomes two lines that differ, and schedules that are right stay free to run ahead.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence

from torch.distributed import Store

from megaframe.comm.place import Place
from megaframe.errors import OutOfStep

_KEPT = 512
"""Entries of a group that stay in the store: members are never so far apart."""


class Order:
    """This rank's part in it. store: of all ranks."""

    def __init__(self, store: Store, rank: int, place: Place) -> None:
        self._store: Store = store.clone()  # type: ignore[attr-defined]  # not in torch's stubs
        self._rank, self._place = rank, place
        self._begun: Counter[str] = Counter()

    def begin(self, group: str, axes: str, first: bool, what: Sequence[str], alike: bool) -> None:
        """This rank is about to start something on a group. group: its name, the same on all
        members. first: whether this is its first member. what: kind, type and shape. alike: whether
        all members are in the same action then.

        Raises `OutOfStep` when a member has started something else.
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
    """`all_reduce of torch.float32 [4, 8] in action 0B1`."""
    kind, *rest = what[:3]
    return f"{kind} of {' '.join(rest)}" + (f" in action {action}" if action else "")
