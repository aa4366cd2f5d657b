"""Text form of a schedule: a line per rank, actions separated by white space, `#` for comments.

It contains only compute actions. Sends and receives are derived from them, so that a file cannot
contradict itself.
"""

from __future__ import annotations

from pathlib import Path

from megaframe.errors import UserError
from megaframe.io.untrusted import read_file
from megaframe.schedule.actions import Action, parse_action
from megaframe.schedule.schedule import Schedule

MAX_BYTES = 64 * 2**20
"""Larger files are refused without parsing; 64 ranks and 512 microbatches take 1 MiB."""

MAX_NUMBER = 10**6
"""Larger numbers of stages and microbatches are refused, because tables of that size are made."""


def parse_schedule(text: str, name: str = "schedule") -> Schedule:
    """Parse a schedule. name: what messages call the source of the text.

    Raises `UserError` with line and cell of the first mistake.
    """
    ranks = []
    for number, line in enumerate(text.splitlines(), 1):
        cells = line.partition("#")[0].split()
        if cells:
            where = f"{name}, line {number}"
            ranks.append(
                tuple(_cell(cell, f"{where}, cell {i}") for i, cell in enumerate(cells, 1))
            )
    if not ranks:
        raise UserError(f"{name} has no line of actions; write one for each rank, such as 0F0 0B0")
    return Schedule(tuple(ranks))


def read_schedule(path: Path) -> Schedule:
    """Read a schedule from a file. Raises `UserError` if the file cannot be read, is too large, or
    is not a schedule."""
    try:
        text = read_file(path, MAX_BYTES).decode()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"schedule file {path} cannot be read: {error}") from None
    return parse_schedule(text, str(path))


def _cell(cell: str, where: str) -> Action:
    try:
        action = parse_action(cell)
    except UserError as error:
        raise UserError(f"{where}: {error}") from None
    if not action.kind.is_compute:
        raise UserError(f"{where}: {cell} is added by lowering; write F, B and W only")
    for what, value in (("stage", action.stage), ("microbatch", action.microbatch)):
        if value is not None and value > MAX_NUMBER:
            raise UserError(f"{where}: {what} {value} of {cell} is above {MAX_NUMBER}")
    return action
