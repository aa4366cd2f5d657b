"""Event simulation: executes the lists of all ranks as far as order and transfers allow, on plain
integers.

The checker, the simulator and the drawers share this one pass. A rank computes in the order of its
list, sends never block it, and it waits until the input of an action has arrived. Under these rules
the times do not depend on the order in which ranks are visited. The simulation therefore needs only
a stack of the ranks that can continue; ranks that still wait when it is empty wait forever.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property

from megaframe.schedule.actions import Action, ActionKind
from megaframe.schedule.costs import Seconds
from megaframe.schedule.schedule import Schedule

KINDS = (ActionKind.F, ActionKind.B, ActionKind.W, ActionKind.SEND_F, ActionKind.SEND_B)
"""Kinds that the simulation executes. Receives are left out: posting one takes no time, and its
consumer waits."""


@dataclass(frozen=True)
class EncodedSchedule:
    """A schedule as integers.

    The code of an action is (kind * stages + stage) * microbatches + microbatch, where kind is the
    index in `KINDS`.

    Attributes:
        rank_of: The rank of each stage.
        microbatches: Number of microbatches.
        steps: The codes of each rank, in order.
        lowered: Whether sends are separate actions; otherwise each starts when its producer is
            done.
    """

    rank_of: tuple[int, ...]
    microbatches: int
    steps: tuple[Sequence[int], ...]
    lowered: bool = False

    @property
    def block(self) -> int:
        """Number of codes of one kind."""
        return len(self.rank_of) * self.microbatches

    @cached_property
    def split_backwards(self) -> Sequence[bool]:
        """Whether a backward has a separate W, by stage * microbatches + microbatch."""
        start, stop = 2 * self.block, 3 * self.block
        separate = [False] * self.block
        for steps in self.steps:
            for code in steps:
                if start <= code < stop:
                    separate[code - start] = True
        return separate

    def decode_action(self, code: int) -> Action:
        """Return the action with this code."""
        row, microbatch = divmod(code, self.microbatches)
        kind, stage = divmod(row, len(self.rank_of))
        return Action(KINDS[kind], stage, microbatch)

    def list_links(self) -> list[tuple[int, tuple[int, int] | None]]:
        """Return, for each code // microbatches, the difference from the code of an action to the
        code of the action that waits for its result (0 if none does), and the (sending, receiving)
        ranks of the transfer in between (None if there is none)."""
        stages, ranks = len(self.rank_of), self.rank_of
        size, block = self.microbatches, self.block
        rows: list[tuple[int, tuple[int, int] | None]] = [(0, None)] * (len(KINDS) * stages)
        # A forward feeds the next stage, a backward the previous one.
        for kind, neighbour in ((0, 1), (1, -1)):
            for stage, rank in enumerate(ranks):
                row, other = kind * stages + stage, stage + neighbour
                if not 0 <= other < stages:
                    continue
                if ranks[other] == rank:
                    rows[row] = (neighbour * size, None)
                elif self.lowered:
                    # The send starts the transfer; its code is 3 blocks after its producer's.
                    rows[row + 3 * stages] = (neighbour * size - 3 * block, (rank, ranks[other]))
                else:
                    rows[row] = (neighbour * size, (rank, ranks[other]))
        # The last stage's forward feeds its own backward.
        rows[stages - 1] = (block, None)
        return rows


def encode_schedule(schedule: Schedule) -> EncodedSchedule:
    """Return a schedule as integers; it must have all its actions (see `check`)."""
    stages, size = len(schedule.rank_of), schedule.microbatches
    base = {kind: number * stages * size for number, kind in enumerate(KINDS)}
    steps = tuple(
        [
            base[action.kind] + action.stage * size + action.microbatch
            for action in actions
            if action.kind in base and action.stage is not None and action.microbatch is not None
        ]
        for actions in schedule.ranks
    )
    lowered = any(not action.kind.is_compute for actions in schedule.ranks for action in actions)
    return EncodedSchedule(schedule.rank_of, size, steps, lowered)


def count_live_activations(schedule: Schedule | EncodedSchedule) -> tuple[Fraction, ...]:
    """Return the maximum number of activations that each rank holds at once, in units of one
    microbatch on all stages of the rank: one stage counts 1 / (stages of the rank). An activation
    lives from its F until its W, or until its B if there is no separate W."""
    encoded = schedule if isinstance(schedule, EncodedSchedule) else encode_schedule(schedule)
    block, split = encoded.block, encoded.split_backwards
    return tuple(
        Fraction(_count_peak(steps, block, split), encoded.rank_of.count(rank))
        for rank, steps in enumerate(encoded.steps)
    )


def _count_peak(steps: Sequence[int], block: int, split: Sequence[bool]) -> int:
    live = peak = 0
    for code in steps:
        if code < block:
            live += 1
            if live > peak:
                peak = live
        elif code < 2 * block:
            # After a split backward, the activation lives on until its W.
            if not split[code - block]:
                live -= 1
        elif code < 3 * block:
            live -= 1
    return peak


@dataclass(frozen=True)
class EventTimes:
    """The result of a simulation.

    Attributes:
        starts: When each action starts, by code; None if it never does.
        arrivals: When the input of each action arrives, by code; None if it never does.
        ends: When the last action of each rank ends.
        stuck: The position in its steps at which a rank waits forever, by rank.
    """

    starts: Sequence[Seconds | None]
    arrivals: Sequence[Seconds | None]
    ends: Sequence[Seconds]
    stuck: Mapping[int, int]


def simulate_events(
    encoded: EncodedSchedule, durations: Sequence[Seconds], comm: Seconds
) -> EventTimes:
    """Execute a schedule.

    Takes about half a microsecond per action.

    Args:
        encoded: The schedule.
        durations: Duration of each action, by code.
        comm: Duration of a transfer between ranks.
    """
    size, ranks = encoded.microbatches, len(encoded.steps)
    links = encoded.list_links()
    free: dict[tuple[int, int] | None, Seconds] = {edge: 0 for _, edge in links}
    codes = len(links) * size
    # Only backwards, and forwards after the first stage, wait for an arrival.
    arrivals: list[Seconds | None] = [0] * codes
    arrivals[size : 2 * encoded.block] = [None] * (2 * encoded.block - size)
    starts: list[Seconds | None] = [None] * codes
    at = [0] * ranks
    clocks: list[Seconds] = [0] * ranks
    waiting: dict[int, int] = {}
    ready = list(range(ranks))
    while ready:
        rank = ready.pop()
        clock = clocks[rank]
        steps = encoded.steps[rank]
        for position in range(at[rank], len(steps)):
            code = steps[position]
            arrival = arrivals[code]
            if arrival is None:
                waiting[code] = rank
                at[rank] = position
                break
            if arrival > clock:
                clock = arrival
            starts[code] = clock
            clock += durations[code]
            reach, edge = links[code // size]
            if reach:
                target = code + reach
                if edge is None:
                    arrivals[target] = clock
                else:
                    # Transfers of one edge follow each other.
                    begin = free[edge]
                    arrivals[target] = free[edge] = (clock if clock > begin else begin) + comm
                # Its rank is blocked on exactly this input, and can continue.
                if target in waiting:
                    ready.append(waiting.pop(target))
        clocks[rank] = clock
    return EventTimes(starts, arrivals, clocks, {rank: at[rank] for rank in waiting.values()})


def find_deadlock_cycle(
    encoded: EncodedSchedule, stuck: Mapping[int, int]
) -> list[tuple[int, int, int]]:
    """Return a cycle of a deadlock as (rank, waiting code, code that it waits for).

    Args:
        encoded: The schedule.
        stuck: Where the ranks of a complete schedule are stuck.
    """
    size = encoded.microbatches
    makers = {
        row + reach // size: row for row, (reach, _) in enumerate(encoded.list_links()) if reach
    }
    chain: dict[int, tuple[int, int, int]] = {}
    rank = next(iter(stuck))
    while rank not in chain:
        code = encoded.steps[rank][stuck[rank]]
        row, microbatch = divmod(code, size)
        made_by = makers[row]
        chain[rank] = (rank, code, made_by * size + microbatch)
        rank = encoded.rank_of[made_by % len(encoded.rank_of)]
    links = list(chain.values())
    return links[list(chain).index(rank) :]
