"""Lowering: adds to a rank's compute the communication and the update that it needs."""

from __future__ import annotations

from collections.abc import Sequence

from megaframe.schedule.actions import Action, Kind


def lower(compute: Sequence[Action]) -> tuple[Action, ...]:
    """The full list of one rank.

    REDUCE is posted before the last backward of its stage, as a receive is posted before its
    consumer, so that each bucket's reduction starts while earlier blocks still run backward.
    """
    last = {action.stage: i for i, action in enumerate(compute) if action.kind is Kind.B}
    lowered: list[Action] = []
    for i, action in enumerate(compute):
        if last.get(action.stage) == i:
            lowered.append(Action(Kind.REDUCE, action.stage))
        lowered.append(action)
    return (*lowered, Action(Kind.UPDATE))
