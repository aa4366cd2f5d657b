"""Which runs of a queue start, and which leave for others: a pure function of what is known now.

It keeps nothing from one decision to the next, so a queue that was killed decides as before. Runs
are taken in the order of their priority and, within a priority, of the queue:

- A run starts as soon as its fewest ranks fit. Those that remain go to runs that can use more.
- Room for it is made by runs of lower priority only, from the lowest on, of which none is asked to
  leave in vain. Runs of the same priority never disturb each other.
- What a run waits for, no later run of its priority may take, so a large run is not starved by
  small ones. Runs of lower priority may: they leave when it can start.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

_WORTH_A_RESTART = 2
"""A run that could have this many times its ranks is restarted with more of them."""


@dataclass(frozen=True)
class QueuedRun:
    """What a decision needs to know about a run that is not done.

    Attributes:
        name: Its name.
        sizes: Numbers of ranks that it can have, ascending.
        priority: Higher goes first.
        ranks: Those that it has; 0 if it waits.
        is_leaving: Whether it was asked to leave, and has not left yet.
        may_grow: Whether what is left of it is worth a restart with more ranks.
    """

    name: str
    sizes: tuple[int, ...]
    priority: int = 0
    ranks: int = 0
    is_leaving: bool = False
    may_grow: bool = True


@dataclass
class Decision:
    """What to do now.

    Attributes:
        start: Runs to start, with their numbers of ranks.
        leave: Runs to ask to leave, with the run that each makes room for; its own name if it is
            to start again with more ranks.
    """

    start: dict[str, int] = field(default_factory=dict)
    leave: dict[str, str] = field(default_factory=dict)


def decide(runs: Sequence[QueuedRun], devices: int) -> Decision:
    """Return what to do now.

    Args:
        runs: The runs that are not done, in the order of the queue.
        devices: Of the machine or cluster, one for each rank.
    """
    decision = Decision()
    free = max(0, devices - sum(run.ranks for run in runs))
    promised = sum(run.ranks for run in runs if run.is_leaving)
    staying = [run for run in runs if run.ranks and not run.is_leaving]
    blocked = None
    for run in _sort_by_priority(run for run in runs if not run.ranks):
        if run.priority == blocked:
            continue
        least = run.sizes[0]
        victims = _choose_victims(staying, run.priority, least - free - promised)
        if victims is None:
            blocked = run.priority
            continue
        for victim in victims:
            staying.remove(victim)
            decision.leave[victim.name] = run.name
            promised += victim.ranks
        if least <= free:
            decision.start[run.name] = least
            free -= least
        else:  # what it takes of what is free is kept for it until others have left
            later = min(promised, least)
            promised -= later
            free -= least - later
    is_anybody_waiting = any(not run.ranks and run.name not in decision.start for run in runs)
    free = _grow_starting_runs(runs, decision, free)
    if free and not promised and not is_anybody_waiting:
        _restart_one_with_more_ranks(staying, decision, free)
    return decision


def _sort_by_priority(runs: Iterable[QueuedRun]) -> list[QueuedRun]:
    return sorted(runs, key=lambda run: -run.priority)


def _choose_victims(
    staying: Sequence[QueuedRun], priority: int, needed: int
) -> list[QueuedRun] | None:
    """Return the runs that are to leave so that as many ranks become free; None if there are not
    enough below this priority."""
    chosen: list[QueuedRun] = []
    # The lowest priority first and, within one, who came last.
    for run in sorted(reversed(staying), key=lambda run: run.priority):
        if needed > 0 and run.priority < priority:
            chosen.append(run)
            needed -= run.ranks
    if needed > 0:
        return None
    for run in reversed(chosen):  # a large one may have made smaller ones superfluous
        if run.ranks <= -needed:
            chosen.remove(run)
            needed += run.ranks
    return chosen


def _grow_starting_runs(runs: Sequence[QueuedRun], decision: Decision, free: int) -> int:
    """Give what is free to the runs that start; return what remains."""
    for run in _sort_by_priority(run for run in runs if run.name in decision.start):
        least = decision.start[run.name]
        decision.start[run.name] = max(size for size in run.sizes if size <= least + free)
        free -= decision.start[run.name] - least
    return free


def _restart_one_with_more_ranks(
    staying: Sequence[QueuedRun], decision: Decision, free: int
) -> None:
    """Let the first run leave that could have many more ranks."""
    for run in _sort_by_priority(run for run in staying if run.may_grow):
        most = max(size for size in run.sizes if size <= max(run.ranks + free, run.sizes[0]))
        if most >= _WORTH_A_RESTART * run.ranks:
            decision.leave[run.name] = run.name
            return
