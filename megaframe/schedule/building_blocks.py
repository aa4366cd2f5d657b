"""Orders: the building blocks of the named schedules, for one rank.

A schedule is determined by the order of its forwards, the order of its backwards, the number of
forwards before the first backward, and when weight gradients run. With functions for these, no
schedule needs its own loop.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Literal

from megaframe.schedule.actions import Action, ActionKind

Placement = Literal["loop", "vee"]
"""How stages are placed on ranks. loop: each chunk starts again at rank 0. vee: the direction
alternates, so that a rank at either end has two consecutive stages where it turns."""


def get_stage_of_chunk(rank: int, chunk: int, ranks: int, placement: Placement) -> int:
    """Return the stage that is chunk `chunk` of `rank`.

    Args:
        rank: Pipeline rank.
        chunk: Number of the chunk on its rank.
        ranks: Pipeline ranks.
        placement: How stages are placed on ranks: "vee" reverses every other pass over them.
    """
    reversed_direction = placement == "vee" and chunk % 2
    return chunk * ranks + (ranks - 1 - rank if reversed_direction else rank)


def list_ranks_by_stage(ranks: int, chunks: int, placement: Placement) -> tuple[int, ...]:
    """Return the rank of every stage, by stage number.

    Args:
        ranks: Pipeline ranks.
        chunks: Stages per rank.
        placement: Where stages are.
    """
    direction = range(ranks)
    return tuple(
        rank
        for chunk in range(chunks)
        for rank in (direction[::-1] if placement == "vee" and chunk % 2 else direction)
    )


def list_passes(kind: ActionKind, stages: Sequence[int], turns: Iterable[int]) -> list[Action]:
    """Return actions of one kind in turns: in each turn, every stage in order runs the turn's
    microbatches.

    Args:
        kind: Kind of all actions.
        stages: Stages in the order of a turn.
        turns: Number of microbatches of each turn.
    """
    actions: list[Action] = []
    first = 0
    for size in turns:
        numbers = range(first, first + size)
        actions += [Action(kind, stage, number) for stage in stages for number in numbers]
        first += size
    return actions


def divide_into_turns(microbatches: int, group: int) -> list[int]:
    """Divide the microbatches into as many turns of at least `group` as possible (at least one
    turn), as evenly as possible. Returns the size of each turn."""
    turns = max(1, microbatches // group)
    return [microbatches // turns + (turn < microbatches % turns) for turn in range(turns)]


def alternate(
    forwards: Sequence[Action], backwards: Sequence[Action], warm_up: int
) -> list[Action]:
    """Return `warm_up` forwards, then forwards and backwards in turn, then the other backwards.

    Args:
        forwards: Forwards of a rank, in order.
        backwards: Its backwards, in order.
        warm_up: How many forwards come before the first backward.
    """
    order = list(forwards[:warm_up])
    for forward, backward in zip(forwards[warm_up:], backwards, strict=False):
        order += (forward, backward)
    return order + list(backwards[max(0, len(forwards) - warm_up) :])


def drop_missing_microbatches(order: Iterable[Action], microbatches: int) -> list[Action]:
    """Remove the microbatches that do not exist from a repeating order that was made for more of
    them. The rest is a valid order, because no microbatch depends on another one."""
    return [a for a in order if a.microbatch is not None and a.microbatch < microbatches]


def split_backwards(
    order: Sequence[Action], chosen: Collection[int] | None = None, deferred: Collection[int] = ()
) -> list[Action]:
    """Split backwards into B and W.

    Each chosen backward (by default all) puts its W into a queue. After every backward that is not
    in `deferred`, the oldest W in the queue runs. The remaining ones run at the end.

    Args:
        chosen, deferred: Numbers of backwards, counted in the order of the list.
    """
    split_order: list[Action] = []
    queue: list[Action] = []
    number = 0
    for action in order:
        split_order.append(action)
        if action.kind is not ActionKind.B:
            continue
        if chosen is None or number in chosen:
            queue.append(Action(ActionKind.W, action.stage, action.microbatch))
        if queue and number not in deferred:
            split_order.append(queue.pop(0))
        number += 1
    return split_order + queue
