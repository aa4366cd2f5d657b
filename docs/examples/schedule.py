"""A schedule of one's own: 1F1B that begins with more forwards, so that transfers can hide.

python docs/examples/schedule.py --ranks 4 --microbatches 8 > runs/eager.txt
"""

from __future__ import annotations

import argparse

from megaframe.schedule import Action, ActionKind, Schedule
from megaframe.schedule.check import check


def eager(ranks: int, microbatches: int) -> Schedule:
    """Rank r runs 2 (p - 1 - r) + 1 forwards before its first backward, of m at most, then one of
    each by turns. 1F1B begins with p - r, so each rank keeps more activations here, the first one
    2p - 1; in exchange what is sent has a pass's time to arrive."""
    lists = []
    for rank in range(ranks):
        ahead = min(microbatches, 2 * (ranks - 1 - rank) + 1)
        actions = [Action(ActionKind.F, rank, number) for number in range(ahead)]
        for number in range(microbatches):
            actions.append(Action(ActionKind.B, rank, number))
            if ahead + number < microbatches:
                actions.append(Action(ActionKind.F, rank, ahead + number))
        lists.append(tuple(actions))
    return Schedule(tuple(lists))


def main() -> None:
    """Make it, have it checked, print it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--microbatches", type=int, default=8)
    given = parser.parse_args()
    schedule = eager(given.ranks, given.microbatches)
    check(schedule)
    print(schedule)


if __name__ == "__main__":
    main()
