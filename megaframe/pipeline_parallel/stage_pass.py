"""A rank's list of actions, and the passes that these order, as all steps have them in common.

They are made once for a schedule, and say everything about a pass but its data.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from megaframe.distributed.interleaving import HandOver
from megaframe.parameters.parameter import Module
from megaframe.schedule import Action, ActionKind, Schedule

OnBlock = Callable[[int, Tensor], None]
"""Called with the number of each block (-1 for the embedding) and the result of its pass, an output
or a gradient."""
FindFirstUnit = Callable[[int, bool], Module | None]
"""Returns the unit whose values a pass of a stage needs first, by the stage's index and whether
the pass is a backward pass; None if it needs none."""
_PASSES = (ActionKind.F, ActionKind.B, ActionKind.W)


@dataclass(frozen=True)
class StagePass:
    """A forward or backward pass of one microbatch through a stage, without its data.

    Attributes:
        microbatch_index: Of the microbatch in the step.
        last: No later microbatch adds to the gradients that the pass completes.
        next_unit: The unit whose values are needed first after this pass; None for none.
        split: A backward pass that leaves the weight gradients of matrices for a W.
        hand_over: Lets a pass that is interleaved with this one continue.
        on_block: Called with the result of each block; a backward pass has the gradient of its
            input.
    """

    microbatch_index: int
    last: bool = False
    next_unit: Module | None = None
    split: bool = False
    hand_over: HandOver | None = None
    on_block: OnBlock | None = None


@dataclass(frozen=True)
class PlannedAction:
    """An action of a rank's list.

    Attributes:
        action: The action.
        name: Name of its kind; BW for a backward that computes both gradients.
        counted: What its time is counted under; None if it is not counted.
        stage_pass: The pass; None for an action without a microbatch.
        partner: The backward that is interleaved with it; None for none.
    """

    action: Action
    name: str
    counted: str | None
    stage_pass: StagePass | None
    partner: PlannedAction | None = None


@dataclass(frozen=True)
class RankPlan:
    """What a rank does in every step of a schedule: its actions, with what follows each."""

    schedule: Schedule
    actions: Sequence[PlannedAction]


def plan_actions(
    schedule: Schedule, rank: int, find_first_unit: FindFirstUnit, paired: Mapping[Action, Action]
) -> RankPlan:
    """Return the plan of a rank.

    Args:
        schedule: A lowered schedule.
        rank: Whose list.
        find_first_unit: Of this rank's stages.
        paired: Forwards that are interleaved with the backward right after them in the list.
    """
    actions = iter(_iterate_planned(schedule, rank, find_first_unit))
    planned = []
    for one in actions:
        if one.action in paired:
            assert one.stage_pass is not None
            # What is needed next is what is needed after both.
            alone = replace(one.stage_pass, next_unit=None)
            one = replace(one, stage_pass=alone, partner=next(actions))
        planned.append(one)
    return RankPlan(schedule, planned)


def _iterate_planned(
    schedule: Schedule, rank: int, find_first_unit: FindFirstUnit
) -> Iterator[PlannedAction]:
    """Yield the actions of a rank, each on its own."""
    forwards, reducing = Counter[int | None](), set[int | None]()
    actions = schedule.ranks[rank]
    for action, next_unit in zip(actions, _find_next_units(actions, find_first_unit), strict=True):
        kind, stage, index = action.kind, action.stage, action.microbatch
        if kind is ActionKind.REDUCE:
            # The next backward of the stage completes its gradients. Nothing is sent yet: from that
            # backward on, each bucket's reduction starts as soon as its gradients are complete.
            reducing.add(stage)
        forwards[stage] += kind is ActionKind.F
        # The head's gradients are computed in the forward pass, so the last forward completes them.
        is_last_forward = forwards[stage] == schedule.microbatches
        last = is_last_forward if kind is ActionKind.F else stage in reducing
        split = kind is ActionKind.B and (stage, index) in schedule.split_backwards
        name = "BW" if kind is ActionKind.B and not split else kind.value
        stage_pass = None if index is None else StagePass(index, last, next_unit, split)
        yield PlannedAction(action, name, kind.value if kind in _PASSES else None, stage_pass)


def _find_next_units(
    actions: Sequence[Action], find_first_unit: FindFirstUnit
) -> list[Module | None]:
    """Return for each action the unit whose values are needed first by the next pass."""
    units: list[Module | None] = []
    next_unit: Module | None = None
    # Backwards, so that the pass after an action is known when the action is reached.
    for action in reversed(actions):
        units.append(next_unit)
        if action.stage is not None and action.kind in (ActionKind.F, ActionKind.B):
            # A W reads no values that must be gathered, so only F and B count.
            next_unit = find_first_unit(action.stage, action.kind is ActionKind.B)
    return units[::-1]
