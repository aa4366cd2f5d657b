"""Schedule: a list of actions for each rank of a pipeline; plain data with a text form.

The rank of a stage is not stored separately: it is the rank whose list contains its actions.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from megaframe.schedule.actions import Action, Kind


@dataclass(frozen=True)
class Schedule:
    """The lists of all ranks of one pipeline, in rank order."""

    ranks: tuple[tuple[Action, ...], ...]

    @cached_property
    def rank_of(self) -> tuple[int, ...]:
        """The rank of every stage, by stage number."""
        found = {
            action.stage: rank
            for rank, actions in enumerate(self.ranks)
            for action in actions
            if action.stage is not None
        }
        return tuple(found[stage] for stage in sorted(found))

    @cached_property
    def microbatches(self) -> int:
        """Number of microbatches."""
        numbers = (a.microbatch for actions in self.ranks for a in actions)
        return 1 + max((n for n in numbers if n is not None), default=-1)

    @cached_property
    def split(self) -> frozenset[tuple[int, int]]:
        """(stage, microbatch) of every backward whose weight gradient is a separate action."""
        return frozenset(
            (action.stage, action.microbatch)
            for actions in self.ranks
            for action in actions
            if action.kind is Kind.W and action.stage is not None and action.microbatch is not None
        )

    def stages(self, rank: int) -> tuple[int, ...]:
        """Return the stages of one rank, ascending."""
        return tuple(stage for stage, owner in enumerate(self.rank_of) if owner == rank)

    def __str__(self) -> str:
        return "\n".join(" ".join(map(str, actions)) for actions in self.ranks)
