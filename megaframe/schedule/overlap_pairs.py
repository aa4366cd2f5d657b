"""Pairs: forwards that can run in turns with the backward after them, so that each computes while
transfers of the other are in flight.

When a pair starts, it needs the inputs of both. A pair is therefore made only if, with every action
running as early as possible, the backward's gradient is available when the forward starts. Such
pairs cannot deadlock, because these start times increase along every edge of the schedule.
"""

from __future__ import annotations

from itertools import pairwise

from megaframe.schedule.actions import Action, ActionKind
from megaframe.schedule.costs import ActionCosts
from megaframe.schedule.schedule import Schedule
from megaframe.schedule.simulate import simulate


def find_overlap_pairs(schedule: Schedule, costs: ActionCosts) -> dict[Action, Action]:
    """Return the backward of each pair, by its forward, for a schedule that `check` accepts."""
    timeline = simulate(schedule, costs)
    intervals = {interval.action: interval for compute in timeline.compute for interval in compute}
    last = len(schedule.rank_of) - 1
    paired: dict[Action, Action] = {}
    for compute in timeline.compute:
        for first, second in pairwise(compute):
            forward, backward = first.action, second.action
            if (forward.kind, backward.kind) != (ActionKind.F, ActionKind.B):
                continue
            assert backward.stage is not None
            kind, stage = (
                (ActionKind.B, backward.stage + 1)
                if backward.stage < last
                else (ActionKind.F, last)
            )
            producer = intervals[Action(kind, stage, backward.microbatch)]
            if producer.end <= first.start:
                paired[forward] = backward
    return paired


def place_pairs_together(
    actions: tuple[Action, ...], paired: dict[Action, Action]
) -> tuple[Action, ...]:
    """Return a rank's lowered actions with those of each pair next to each other.

    Actions between the two are moved before the pair, except the forward's sends, which follow it.
    """
    ordered: list[Action] = []
    waiting: tuple[Action, Action] | None = None
    sends: list[Action] = []
    for action in actions:
        if action in paired:
            waiting = action, paired[action]
        elif waiting is None:
            ordered.append(action)
        elif action == waiting[1]:
            ordered += [*waiting, *sends]
            waiting, sends = None, []
        elif action.kind is ActionKind.SEND_F:
            sends.append(action)
        else:
            ordered.append(action)
    return tuple(ordered)
