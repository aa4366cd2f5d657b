"""Desync check: compares everything that ranks start on a group with what the other ranks start.

The n-th collective that a rank starts on a group must be the n-th one of every other member, and
the n-th message that a rank sends to another one must be the n-th that this one receives from it.
The first rank to start it writes it to the store, and later ranks compare theirs with it. No rank
waits for another, a hang becomes two lines that differ, and correct schedules may still run ahead.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed import Store

from megaframe.distributed.rank_progress import RankProgress
from megaframe.errors import CollectiveMismatch

_STORED_ENTRIES = 512
"""Entries of a group or of a pair of ranks to keep in the store; members are never this many
operations apart."""
_PACKAGE = Path(__file__).parent
_ROOT = _PACKAGE.parent.parent


class DesyncCheck:
    """This rank's side of the comparison.

    Args:
        store: Shared by all ranks.
        rank: This rank.
        progress: Where this rank is in its work, for messages.
    """

    def __init__(self, store: Store, rank: int, progress: RankProgress) -> None:
        self._store: Store = store.clone()  # type: ignore[attr-defined]  # not in torch's stubs
        self._rank, self._progress = rank, progress
        self._begun: Counter[str] = Counter()

    def check_collective(
        self, group: str, axes: str, kind: str, tensor: Tensor | None, first: bool
    ) -> None:
        """Compare a collective that this rank is about to start on a group.

        Args:
            group: The name of the group, the same on all members.
            axes: The axes of the group, for messages.
            kind: The name of the collective.
            tensor: A tensor whose type and shape are the same on all members; None for any shape.
            first: Whether this rank is the first member of the group.

        Raises:
            CollectiveMismatch: A member has started something else.
        """
        # All members are in the same action when they start a collective.
        description = "any shape" if tensor is None else describe_tensor(tensor.dtype, tensor.shape)
        terms = [kind, description, self._progress.action]
        self._compare(group, axes, f"{kind} of {description}", terms, first)

    def check_message(
        self, group: str, axes: str, description: str, source: int, target: int
    ) -> None:
        """Compare a send or a receive with its other end.

        Args:
            group: The name of the group, the same on all members.
            axes: The axes of the group, for messages.
            description: Type and shape.
            source: The sending rank.
            target: The receiving rank; one of the two is this rank.

        Raises:
            CollectiveMismatch: The other end expects a message of another type or shape, or at
                another place between the collectives of the group.
        """
        after = self._begun[group]
        sends = self._rank == source
        call = f"send of {description} to rank {target}"
        if not sends:
            call = f"receive of {description} from rank {source}"
        if after:
            call += f" after collective {after} of the group"
        self._compare(f"{group}/{source}-{target}", axes, call, [description, after], sends)

    def _compare(
        self, channel: str, axes: str, call: str, terms: Sequence[object], first: bool
    ) -> None:
        """Compare this rank's next call on a channel.

        Args:
            channel: Those who use it must start the same calls in the same order.
            axes: For messages.
            call: What this rank starts, in words.
            terms: What must be the same for all.
            first: Whether this rank deletes old entries.
        """
        number = self._begun[channel]
        self._begun[channel] += 1
        action = self._progress.action
        call += f" in action {action}" * bool(action) + f" at {_call_site()}"
        own_entry = json.dumps([terms, self._rank, call])
        key = f"order/{channel}/{number}"
        # The first rank to start the call writes it; later ones get its text and compare. No rank
        # waits for another.
        first_entry = self._store.compare_set(key, "", own_entry).decode()
        if first and number >= _STORED_ENTRIES:
            self._store.delete_key(f"order/{channel}/{number - _STORED_ENTRIES}")
        first_terms, rank, started = json.loads(first_entry)
        if first_terms != list(terms):
            raise CollectiveMismatch(
                f"the ranks over {axes} do not start the same thing: rank {self._rank} starts "
                f"{call}, rank {rank} started {started}",
                (self._rank, rank),
            )


def describe_tensor(dtype: torch.dtype, shape: Sequence[int]) -> str:
    """Return type and shape in words: `torch.float32 [4, 8]`."""
    return f"{dtype} {[*shape]}"


def _call_site() -> str:
    """Return file and line of the call into this package, relative to the project."""
    frame = sys._getframe(1)
    while frame.f_back is not None and Path(frame.f_code.co_filename).parent == _PACKAGE:
        frame = frame.f_back
    path = Path(frame.f_code.co_filename)
    inside = path.is_relative_to(_ROOT)
    return f"{path.relative_to(_ROOT) if inside else path.name}:{frame.f_lineno}"
