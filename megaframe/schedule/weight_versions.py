"""What a pipeline without flushes does to gradients: which version of its weights each stage uses.

A schedule ends with a flush: all gradients of a step are there before any stage updates. Without
it, as in PipeDream (Narayanan et al. 2019), a stage updates after some of its backward passes while
other microbatches are under way, and never waits. Each backward pass then needs the weights of its
own forward pass, which the stage keeps (weight stashing), and its gradient is late. Both follow
from the order of a schedule's actions alone. Nothing here trains; `docs/guides/pipeline.md` says
why not.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from megaframe.errors import UserError
from megaframe.schedule.actions import Action, ActionKind
from megaframe.schedule.schedule import Schedule


@dataclass
class StageVersions:
    """The weights that one stage uses.

    Attributes:
        used: By microbatch, the number of updates before its forward pass.
        staleness: Most updates between the weights of a gradient and those that it changes.
        kept: Most versions of the weights that are needed at once, the newest one included.
    """

    used: dict[int, int] = field(default_factory=dict)
    staleness: int = 0
    kept: int = 1


def count_weight_versions(schedule: Schedule, update_every: int) -> list[StageVersions]:
    """Return what each stage uses if it updates on its own, and nothing is flushed.

    Args:
        schedule: One step of many microbatches, to be seen as many steps.
        update_every: Microbatches of an update.

    Raises:
        UserError: If the microbatches are not a multiple of `update_every`.
    """
    count = schedule.microbatches
    if update_every < 1 or count % update_every:
        nearest = min(
            (divisor for divisor in range(1, count + 1) if count % divisor == 0),
            key=lambda divisor: abs(divisor - update_every),
        )
        raise UserError(
            f"{count} microbatches are no multiple of {update_every} for each update; the nearest "
            f"that is: {nearest}"
        )
    rank_of = schedule.rank_of
    return [
        _follow_stage(
            [action for action in schedule.ranks[rank_of[stage]] if action.stage == stage],
            schedule.split_backwards,
            update_every,
        )
        for stage in range(len(rank_of))
    ]


def _follow_stage(
    actions: Sequence[Action], split: frozenset[tuple[int, int]], update_every: int
) -> StageVersions:
    versions, under_way = StageVersions(), Counter[int]()
    ended = 0
    for action in actions:
        assert action.stage is not None and action.microbatch is not None
        version = ended // update_every
        if action.kind is ActionKind.F:
            versions.used[action.microbatch] = version
            under_way[version] += 1
            versions.kept = max(versions.kept, len(under_way.keys() | {version}))
        elif action.kind is ActionKind.W or (action.stage, action.microbatch) not in split:
            used = versions.used[action.microbatch]
            versions.staleness = max(versions.staleness, version - used)
            ended += 1
            under_way[used] -= 1
            under_way += Counter()  # forgets versions that no microbatch under way needs
            newest = ended // update_every
            versions.kept = max(versions.kept, len(under_way.keys() | {newest}))
    return versions


def find_largest_stable_rate(staleness: int) -> float:
    """Return the learning rate, times the curvature, from which on gradient descent diverges if
    its gradients are so many updates late.

    w ← w − r c w' with w' from d updates ago has the characteristic equation z^(d+1) − z^d + r c =
    0, whose roots are inside of the unit circle for r c < 2 sin(π / (4d + 2)): 2 without delay, and
    about π / (2d + 1) for a long one (Levin and May 1976; used for pipelines by PipeMare, Yang et
    al. 2021).
    """
    return 2 * math.sin(math.pi / (4 * staleness + 2))
