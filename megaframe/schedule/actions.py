"""Actions: the steps of a schedule, and their text form."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum

from megaframe.errors import UserError


class ActionKind(str, Enum):
    """What an action does.

    F: forward of one microbatch through one stage.
    B: its backward: both gradients, or only that of the input if a W of the same stage and
    microbatch follows.
    W: the gradient of the weights.
    SEND_F, RECV_F: send the output of the stage to the next stage; receive its input from the
    previous stage.
    SEND_B, RECV_B: send the gradient of its input to the previous stage; receive the gradient of
    its output from the next stage.
    REDUCE: from here on, the reduction of each gradient bucket of the stage starts as soon as the
    bucket is complete.
    UPDATE: the optimizer updates the weights of all stages of the rank.
    """

    F = "F"
    B = "B"
    W = "W"
    SEND_F = "SEND_F"
    RECV_F = "RECV_F"
    SEND_B = "SEND_B"
    RECV_B = "RECV_B"
    REDUCE = "REDUCE"
    UPDATE = "UPDATE"

    @property
    def is_compute(self) -> bool:
        """Whether generators emit actions of this kind; lowering adds the other kinds."""
        return self in _COMPUTE

    @property
    def per_microbatch(self) -> bool:
        """Whether an action of this kind belongs to one microbatch."""
        return self not in (ActionKind.REDUCE, ActionKind.UPDATE)

    @property
    def lane(self) -> str:
        """The lane (ordered stream of work) of actions of this kind."""
        return _LANES.get(self, "compute")


_COMPUTE = (ActionKind.F, ActionKind.B, ActionKind.W)
_LANES = {
    ActionKind.SEND_F: "send",
    ActionKind.SEND_B: "send",
    ActionKind.RECV_F: "recv",
    ActionKind.RECV_B: "recv",
    ActionKind.REDUCE: "grad",
}


@dataclass(frozen=True)
class Action:
    """One step of a rank's schedule.

    Its text form is stage, kind and microbatch, without numbers that do not apply: `2F0`,
    `2SEND_F0`, `2REDUCE`, `UPDATE`.
    """

    kind: ActionKind
    stage: int | None = None
    microbatch: int | None = None

    def __str__(self) -> str:
        stage = "" if self.stage is None else self.stage
        microbatch = "" if self.microbatch is None else self.microbatch
        return f"{stage}{self.kind.value}{microbatch}"


_PATTERN = re.compile(r"(\d{1,9})?([A-Z]+(?:_[A-Z])?)(\d{1,9})?")


def parse_action(text: str) -> Action:
    """Return the action whose text form is `text`.

    Raises:
        UserError: If there is none.
    """
    match = _PATTERN.fullmatch(text)
    kinds = {kind.value: kind for kind in ActionKind}
    if match is None or match[2] not in kinds:
        raise UserError(
            f"{text!r} is not an action; write STAGE KIND MICROBATCH such as 0F3, "
            f"with KIND one of {', '.join(kinds)}"
        )
    kind = kinds[match[2]]
    for number, needed, name in (
        (match[1], kind is not ActionKind.UPDATE, "stage"),
        (match[3], kind.per_microbatch, "microbatch"),
    ):
        if needed != (number is not None):
            wants = "needs a" if needed else "takes no"
            raise UserError(f"action {text!r}: {kind.value} {wants} {name} number")
    stage, microbatch = (None if n is None else int(n) for n in (match[1], match[3]))
    return Action(kind, stage, microbatch)
