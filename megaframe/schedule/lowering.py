"""Lowering: adds the necessary communication and the update to the compute actions of a schedule.

A send directly follows its producer. A receive is posted a few actions before its consumer, in the
order of the sends: everything that one rank sends to another uses a single ordered channel,
whatever the stage and direction.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from megaframe.schedule.actions import Action, ActionKind
from megaframe.schedule.schedule import Schedule

AHEAD = 2
"""Compute actions between the posting of a receive and its consumer: one that runs meanwhile, and
one in reserve."""

_PASSES = {
    ActionKind.F: (ActionKind.SEND_F, ActionKind.RECV_F, 1),
    ActionKind.B: (ActionKind.SEND_B, ActionKind.RECV_B, -1),
}

Posts = Mapping[int, Sequence[Action]]
"""The receives to post before each compute action of a rank, by position of the action."""


def lower(schedule: Schedule, ahead: int = AHEAD) -> Schedule:
    """Lower a schedule that `check` accepts: keep its compute actions in the same order and insert
    SEND, RECV, REDUCE and UPDATE. Existing ones are replaced.

    REDUCE comes directly before the action that completes the gradients of its stage, so that the
    reduction of each bucket starts while the backward pass of the remaining blocks runs.

    Args:
        schedule: Only its compute actions are used.
        ahead: Compute actions between the posting of a receive and its consumer.

    Returns:
        The lowered schedule, with UPDATE at the end of each rank's list.
    """
    compute = Schedule(tuple(tuple(a for a in r if a.kind.is_compute) for r in schedule.ranks))
    posts = _place_receives(compute, ahead)
    return Schedule(tuple(_lower_rank(compute, rank, posts[rank]) for rank in range(len(posts))))


def _lower_rank(schedule: Schedule, rank: int, posts: Posts) -> tuple[Action, ...]:
    actions, split = schedule.ranks[rank], schedule.split_backwards
    completes = {
        action.stage: i
        for i, action in enumerate(actions)
        if action.kind is ActionKind.W
        or (action.kind is ActionKind.B and (action.stage, action.microbatch) not in split)
    }
    lowered: list[Action] = []
    for i, action in enumerate(actions):
        lowered += posts.get(i, ())
        if completes.get(action.stage) == i:
            lowered.append(Action(ActionKind.REDUCE, action.stage))
        lowered.append(action)
        if passed := _find_transfer(action, schedule.rank_of):
            lowered.append(passed[0])
    return (*lowered, Action(ActionKind.UPDATE))


def _place_receives(schedule: Schedule, ahead: int) -> list[Posts]:
    """Return, for each rank, where its receives are posted."""
    position = {action: i for actions in schedule.ranks for i, action in enumerate(actions)}
    posts: list[dict[int, list[Action]]] = [defaultdict(list) for _ in schedule.ranks]
    for actions in schedule.ranks:
        latest: dict[int, int] = {}
        # Backwards, so that no receive is posted after one that the channel delivers later.
        for action in reversed(actions):
            passed = _find_transfer(action, schedule.rank_of)
            if passed is None:
                continue
            _, receive, consumer = passed
            assert consumer.stage is not None
            to, consumer_position = schedule.rank_of[consumer.stage], position[consumer]
            latest[to] = min(max(0, consumer_position - ahead), latest.get(to, consumer_position))
            posts[to][latest[to]].append(receive)
    return [{at: receives[::-1] for at, receives in rank.items()} for rank in posts]


def _find_transfer(action: Action, rank_of: Sequence[int]) -> tuple[Action, Action, Action] | None:
    """Return the send, the receive and the consumer of the result of `action`, or None if no other
    rank consumes it."""
    if action.kind not in _PASSES:
        return None
    send, receive, step = _PASSES[action.kind]
    stage, microbatch = action.stage, action.microbatch
    assert stage is not None
    other = stage + step
    if not 0 <= other < len(rank_of) or rank_of[other] == rank_of[stage]:
        return None
    return (
        Action(send, stage, microbatch),
        Action(receive, other, microbatch),
        Action(action.kind, other, microbatch),
    )
