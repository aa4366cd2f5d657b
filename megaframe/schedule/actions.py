"""Actions: the steps of a schedule, with a text form."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum

from megaframe.errors import UserError


class Kind(str, Enum):
    """What an action does. F: forward of one microbatch through one stage. B: its backward.
    REDUCE: from here on each gradient bucket of the stage leaves as soon as it is complete.
    UPDATE: the optimizer updates the weights of all stages of the rank."""

    F = "F"
    B = "B"
    REDUCE = "REDUCE"
    UPDATE = "UPDATE"

    @property
    def per_microbatch(self) -> bool:
        """Whether the action belongs to one microbatch."""
        return self in (Kind.F, Kind.B)

    @property
    def lane(self) -> str:
        """The ordered stream of work that the action is issued to."""
        return "grad" if self is Kind.REDUCE else "compute"


@dataclass(frozen=True)
class Action:
    """One step of a rank's schedule. Text form: stage, kind and microbatch, the numbers left out
    where they do not apply: `2F0`, `2REDUCE`, `UPDATE`."""

    kind: Kind
    stage: int | None = None
    microbatch: int | None = None

    def __str__(self) -> str:
        numbers = ("" if n is None else str(n) for n in (self.stage, self.microbatch))
        return self.kind.value.join(numbers)


_PATTERN = re.compile(r"(\d{1,9})?([A-Z]+)(\d{1,9})?")


def parse_action(text: str) -> Action:
    """The action that prints as `text`.

    Raises `UserError` when there is none.
    """
    match = _PATTERN.fullmatch(text)
    kinds = {kind.value: kind for kind in Kind}
    if match is None or match[2] not in kinds:
        raise UserError(
            f"{text!r} is no action; write STAGE KIND MICROBATCH such as 0F3, "
            f"with KIND one of {', '.join(kinds)}"
        )
    kind = kinds[match[2]]
    for number, needed, what in (
        (match[1], kind is not Kind.UPDATE, "stage"),
        (match[3], kind.per_microbatch, "microbatch"),
    ):
        if needed != (number is not None):
            wants = "needs a" if needed else "takes no"
            raise UserError(f"action {text!r}: {kind.value} {wants} {what} number")
    stage, microbatch = (None if n is None else int(n) for n in (match[1], match[3]))
    return Action(kind, stage, microbatch)
