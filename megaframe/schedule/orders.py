"""Orders: what the named schedules are put together from, for one rank.

A schedule is its forwards in some order, its backwards in some order, the number of forwards before
the first backward, and when weight gradients run: with these, no schedule needs a loop of its own.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Literal

from megaframe.schedule.actions import Action, Kind

Placement = Literal["loop", "vee"]
"""How stages lie on ranks: round the ranks in loops, or to and fro, so that the last rank (and the
first one) holds two stages in a row."""


def stage_of(rank: int, chunk: int, ranks: int, placement: Placement) -> int:
    """The stage that is chunk `chunk` of `rank`."""
    back = placement == "vee" and chunk % 2
    return chunk * ranks + (ranks - 1 - rank if back else rank)


def ranks_of_stages(ranks: int, chunks: int, placement: Placement) -> tuple[int, ...]:
    """The rank of every stage, by stage number."""
    way = range(ranks)
    return tuple(
        rank
        for chunk in range(chunks)
        for rank in (way[::-1] if placement == "vee" and chunk % 2 else way)
    )


def passes(kind: Kind, stages: Sequence[int], turns: Iterable[int]) -> list[Action]:
    """Turn by turn, so many microbatches as it has of each of the stages."""
    actions: list[Action] = []
    first = 0
    for size in turns:
        numbers = range(first, first + size)
        actions += [Action(kind, stage, number) for stage in stages for number in numbers]
        first += size
    return actions


def even_turns(microbatches: int, group: int) -> list[int]:
    """As many turns of at least `group` microbatches as there can be, as even as they can be."""
    turns = max(1, microbatches // group)
    return [microbatches // turns + (turn < microbatches % turns) for turn in range(turns)]


def alternate(
    forwards: Sequence[Action], backwards: Sequence[Action], warm_up: int
) -> list[Action]:
    """`warm_up` forwards, then a forward and a backward in turn, then the rest of the backwards."""
    order = list(forwards[:warm_up])
    for forward, backward in zip(forwards[warm_up:], backwards, strict=False):
        order += (forward, backward)
    return order + list(backwards[max(0, len(forwards) - warm_up) :])


def keep(order: Iterable[Action], microbatches: int) -> list[Action]:
    """Strike out the microbatches that do not exist: an order that repeats itself is written for
    more than there are. What is left is valid, since a microbatch waits for no other one."""
    return [a for a in order if a.microbatch is not None and a.microbatch < microbatches]


def split(
    order: Sequence[Action],
    chosen: Collection[int] | None = None,
    held: Collection[int] = (),
) -> list[Action]:
    """Split the backwards: each chosen one (all by default) puts its W into a queue.

    chosen, held: numbers of backwards, in the order of the list. After every backward the oldest W
    in the queue runs, except after those in `held`; what is left in the end runs there.
    """
    weighed: list[Action] = []
    queue: list[Action] = []
    number = 0
    for action in order:
        weighed.append(action)
        if action.kind is not Kind.B:
            continue
        if chosen is None or number in chosen:
            queue.append(Action(Kind.W, action.stage, action.microbatch))
        if queue and number not in held:
            weighed.append(queue.pop(0))
        number += 1
    return weighed + queue
