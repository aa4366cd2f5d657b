"""Walk: executes the lists of all ranks as far as order and transfers allow, on plain integers.

The checker, the simulator and the drawers rest on this one pass. A rank computes in the order of
its list; sending never blocks it; what it consumes must have arrived. Such a network gives the same
times in whatever order the ranks are visited, so a stack of the ranks that can go on is all that
the walk needs, and whoever still waits when it is empty waits for ever.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property

from megaframe.schedule.actions import Action, Kind
from megaframe.schedule.costs import Seconds
from megaframe.schedule.schedule import Schedule

KINDS = (Kind.F, Kind.B, Kind.W, Kind.SEND_F, Kind.SEND_B)
"""What the walk executes. A receive is posted without waiting; its consumer waits."""


@dataclass(frozen=True)
class Program:
    """A schedule as integers: kind, stage and microbatch of an action are the digits of its code,
    (kind * stages + stage) * microbatches + microbatch, kind being its place in `KINDS`.

    steps: the codes of each rank, in order. rank_of: the rank of each stage. lowered: sends are
    actions of their own; otherwise each follows its producer at once.
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
    def split(self) -> Sequence[bool]:
        """By stage * microbatches + microbatch, whether the backward has a W of its own."""
        start, stop = 2 * self.block, 3 * self.block
        found = [False] * self.block
        for steps in self.steps:
            for code in steps:
                if start <= code < stop:
                    found[code - start] = True
        return found

    def action(self, code: int) -> Action:
        """The action that has this code."""
        row, microbatch = divmod(code, self.microbatches)
        kind, stage = divmod(row, len(self.rank_of))
        return Action(KINDS[kind], stage, microbatch)

    def links(self) -> list[tuple[int, tuple[int, int] | None]]:
        """For each code // microbatches: what to add to the code of an action for that of the one
        which waits for its result (0 for none), and the (sending, receiving) rank on the way."""
        stages, ranks = len(self.rank_of), self.rank_of
        size, block = self.microbatches, self.block
        rows: list[tuple[int, tuple[int, int] | None]] = [(0, None)] * (len(KINDS) * stages)
        for kind, neighbour in ((0, 1), (1, -1)):
            for stage, rank in enumerate(ranks):
                row, other = kind * stages + stage, stage + neighbour
                if not 0 <= other < stages:
                    continue
                if ranks[other] == rank:
                    rows[row] = (neighbour * size, None)
                elif self.lowered:
                    rows[row + 3 * stages] = (neighbour * size - 3 * block, (rank, ranks[other]))
                else:
                    rows[row] = (neighbour * size, (rank, ranks[other]))
        rows[stages - 1] = (block, None)
        return rows


def flatten(schedule: Schedule) -> Program:
    """The program of a schedule whose actions are known to be complete (`check`)."""
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
    return Program(schedule.rank_of, size, steps, lowered)


def live_activations(schedule: Schedule | Program) -> tuple[Fraction, ...]:
    """Most activations that each rank holds at once, in units of one microbatch's on all stages of
    the rank: one stage counts 1 / (stages of the rank). An activation lives from its F until its W,
    or its B where no W follows."""
    program = schedule if isinstance(schedule, Program) else flatten(schedule)
    block, split = program.block, program.split
    return tuple(
        Fraction(_peak(steps, block, split), program.rank_of.count(rank))
        for rank, steps in enumerate(program.steps)
    )


def _peak(steps: Sequence[int], block: int, split: Sequence[bool]) -> int:
    live = peak = 0
    for code in steps:
        if code < block:
            live += 1
            if live > peak:
                peak = live
        elif code < 2 * block:
            if not split[code - block]:
                live -= 1
        elif code < 3 * block:
            live -= 1
    return peak


@dataclass(frozen=True)
class Walk:
    """What a walk found. starts and arrivals: by code, when the action starts and when what it
    waits for has come, None where that never happens. ends: of each rank's last action.
    stuck: by rank, the position in its steps at which it waits for ever."""

    starts: Sequence[Seconds | None]
    arrivals: Sequence[Seconds | None]
    ends: Sequence[Seconds]
    stuck: Mapping[int, int]


def walk(program: Program, durations: Sequence[Seconds], comm: Seconds) -> Walk:
    """Execute `program` with the durations of its actions, by code, and `comm` from rank to rank.

    Takes about half a microsecond per action.
    """
    size, ranks = program.microbatches, len(program.steps)
    links = program.links()
    free: dict[tuple[int, int] | None, Seconds] = {edge: 0 for _, edge in links}
    codes = len(links) * size
    # Only a forward after the first stage and a backward wait for something to arrive.
    arrivals: list[Seconds | None] = [0] * codes
    arrivals[size : 2 * program.block] = [None] * (2 * program.block - size)
    starts: list[Seconds | None] = [None] * codes
    at = [0] * ranks
    clocks: list[Seconds] = [0] * ranks
    waiting: dict[int, int] = {}
    ready = list(range(ranks))
    while ready:
        rank = ready.pop()
        clock = clocks[rank]
        steps = program.steps[rank]
        for position in range(at[rank], len(steps)):
            code = steps[position]
            came = arrivals[code]
            if came is None:
                waiting[code] = rank
                at[rank] = position
                break
            if came > clock:
                clock = came
            starts[code] = clock
            clock += durations[code]
            reach, edge = links[code // size]
            if reach:
                target = code + reach
                if edge is None:
                    arrivals[target] = clock
                else:
                    begin = free[edge]
                    arrivals[target] = free[edge] = (clock if clock > begin else begin) + comm
                if target in waiting:
                    ready.append(waiting.pop(target))
        clocks[rank] = clock
    return Walk(starts, arrivals, clocks, {rank: at[rank] for rank in waiting.values()})


def cycle(program: Program, stuck: Mapping[int, int]) -> list[tuple[int, int, int]]:
    """Who waits for whom: (rank, code that waits, code that it waits for) around a circle, given
    where the ranks of a complete program are stuck."""
    size = program.microbatches
    makers = {row + reach // size: row for row, (reach, _) in enumerate(program.links()) if reach}
    chain: dict[int, tuple[int, int, int]] = {}
    rank = next(iter(stuck))
    while rank not in chain:
        code = program.steps[rank][stuck[rank]]
        row, microbatch = divmod(code, size)
        made_by = makers[row]
        chain[rank] = (rank, code, made_by * size + microbatch)
        rank = program.rank_of[made_by % len(program.rank_of)]
    links = list(chain.values())
    return links[list(chain).index(rank) :]
