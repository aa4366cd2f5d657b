"""Schedule: a list of actions for each rank of a pipeline; plain data with a text form.

The text form has a line per rank, actions separated by white space, and `#` for comments. It
contains only compute actions. Sends and receives are derived from them, so that a file cannot
contradict itself.

The rank of a stage is not stored separately: it is the rank whose list contains its actions.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from megaframe.errors import UserError
from megaframe.io.untrusted import read_file
from megaframe.schedule.actions import Action, ActionKind, parse_action

MAX_BYTES = 64 * 2**20
"""Larger files are refused without parsing; 64 ranks and 512 microbatches take 1 MiB."""

MAX_NUMBER = 10**6
"""Larger numbers of stages and microbatches are refused, because tables of that size are made."""


@dataclass(frozen=True)
class Schedule:
    """The lists of all ranks of one pipeline, in rank order."""

    ranks: tuple[tuple[Action, ...], ...]

    @cached_property
    def rank_of(self) -> tuple[int, ...]:
        """The rank of every stage, by stage number."""
        rank_by_stage = {
            action.stage: rank
            for rank, actions in enumerate(self.ranks)
            for action in actions
            if action.stage is not None
        }
        return tuple(rank_by_stage[stage] for stage in sorted(rank_by_stage))

    @cached_property
    def microbatches(self) -> int:
        """Number of microbatches."""
        numbers = (a.microbatch for actions in self.ranks for a in actions)
        return 1 + max((n for n in numbers if n is not None), default=-1)

    @cached_property
    def split_backwards(self) -> frozenset[tuple[int, int]]:
        """(stage, microbatch) of every backward whose weight gradient is a separate action."""
        return frozenset(
            (action.stage, action.microbatch)
            for actions in self.ranks
            for action in actions
            if action.kind is ActionKind.W
            and action.stage is not None
            and action.microbatch is not None
        )

    def list_stages(self, rank: int) -> tuple[int, ...]:
        """Return the stages of one rank, ascending."""
        return tuple(stage for stage, owner in enumerate(self.rank_of) if owner == rank)

    def __str__(self) -> str:
        return "\n".join(" ".join(map(str, actions)) for actions in self.ranks)


def parse_schedule(text: str, name: str = "schedule") -> Schedule:
    """Parse a schedule.

    Args:
        text: The schedule, as `str` shows it.
        name: What messages call the source of the text.

    Raises:
        UserError: With line and cell of the first mistake.
    """
    ranks = []
    for number, line in enumerate(text.splitlines(), 1):
        cells = line.partition("#")[0].split()
        if cells:
            where = f"{name}, line {number}"
            ranks.append(
                tuple(_parse_cell(cell, f"{where}, cell {i}") for i, cell in enumerate(cells, 1))
            )
    if not ranks:
        raise UserError(f"{name} has no line of actions; write one for each rank, such as 0F0 0B0")
    return Schedule(tuple(ranks))


def read_schedule(path: Path) -> Schedule:
    """Read a schedule from a file.

    Raises:
        UserError: If the file cannot be read, is too large, or is not a schedule.
    """
    try:
        text = read_file(path, MAX_BYTES).decode()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"schedule file {path} cannot be read: {error}") from None
    return parse_schedule(text, str(path))


def _parse_cell(cell: str, where: str) -> Action:
    try:
        action = parse_action(cell)
    except UserError as error:
        raise UserError(f"{where}: {error}") from None
    if not action.kind.is_compute:
        raise UserError(f"{where}: {cell} is added by lowering; write F, B and W only")
    for name, value in (("stage", action.stage), ("microbatch", action.microbatch)):
        if value is not None and value > MAX_NUMBER:
            raise UserError(f"{where}: {name} {value} of {cell} is above {MAX_NUMBER}")
    return action
