"""Lent: the buffers of whole gradients and values that ZeRO 2 and 3 lend to the passes of a rank.

A pass borrows a buffer for the gradients of each bucket that it adds to. The buffer is returned
when the bucket's reduction is done, which a later reduction waits for. Values are present for the
unit that computes and for the next one. How many buffers are in use at once therefore depends on
the order of all passes, which this module walks through. Equal passes that start from the same
state are walked through once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from megaframe.schedule import Action, Kind

WAITED = 2
"""Number of reductions in flight: when one more starts, a transfer of the oldest is waited for."""
BLOCKS = 2
"""Number of blocks whose values are present: the one that computes, and the next one."""
_VECTORS = -1
"""Kind, in a bucket's name, of the gains and biases of a stage, whose gradients stay whole."""


class Bucket(NamedTuple):
    """A bucket. name: (part of the rank's blocks, kind), unique on the rank. size: elements."""

    name: tuple[int, int]
    size: int


@dataclass(frozen=True)
class Unit:
    """The buckets of a unit. late: matrices of its late part. rest: its other matrices. tables:
    tables that it uses. own: the tables whose gradients it reduces. ends: whether it completes the
    gradients of `rest`, which it may share with blocks before it."""

    late: tuple[Bucket, ...] = ()
    rest: tuple[Bucket, ...] = ()
    tables: tuple[Bucket, ...] = ()
    own: tuple[Bucket, ...] = ()
    ends: bool = True

    @property
    def buckets(self) -> tuple[Bucket, ...]:
        """All buckets whose values the unit needs."""
        return (*self.late, *self.rest, *self.tables)

    @property
    def reduced(self) -> tuple[Bucket, ...]:
        """The buckets whose gradients are complete after the unit, without its late part."""
        return (*(self.rest if self.ends else ()), *self.own)


@dataclass(frozen=True)
class StageUnits:
    """The units of a stage. blocks: its blocks, followed by its predictors."""

    embedding: Unit | None
    blocks: tuple[Unit, ...]
    head: Unit | None

    def units(self, *, backward: bool) -> tuple[Unit, ...]:
        """Return the units whose values a forward or backward pass needs, in its order."""
        if backward:
            return self.blocks[::-1]
        ends = [() if unit is None else (unit,) for unit in (self.embedding, self.head)]
        return (*ends[0], *self.blocks, *ends[1])


Stages = Mapping[int, StageUnits]


def lent(
    stages: Stages,
    actions: Sequence[Action],
    transfers: int = 1,
    *,
    values: bool,
    alike: bool = False,
) -> tuple[int, int]:
    """Return the elements of the buffers of values and of gradients that a rank allocates.

    stages: the rank's units, by stage. actions: its list. transfers: how many consecutive transfers
    a reduction takes until it needs no buffer. values: whether values are lent too. alike: whether
    values and gradients have the same type; they then share buffers, which count as gradients'.
    """
    state = _State((), frozenset(), (), frozenset())
    known: dict[tuple[_State, _Pass], _State] = {}
    most: Counter[tuple[bool, int]] = Counter()
    for one in _passes(stages, actions):
        if (state, one) not in known:
            walk = _Walk(state, WAITED * transfers, values, alike)
            walk.go(stages[one.stage], one)
            most |= walk.most
            known[state, one] = walk.state
        state = known[state, one]
    of_values, of_gradients = (
        sum(size * number for (kind, size), number in most.items() if kind == wanted)
        for wanted in (True, False)
    )
    return of_values, of_gradients


class _Pass(NamedTuple):
    """A pass. kind, stage: those of the action. split: whether its weight pass comes later. last:
    whether it is the stage's last pass that adds gradients, after which those of gains and biases
    are reduced. following: the unit whose values the next pass needs first."""

    kind: Kind
    stage: int
    split: bool
    last: bool
    following: Unit | None


def _passes(stages: Stages, actions: Sequence[Action]) -> list[_Pass]:
    """Return the passes of a list of actions, without the actions that compute nothing."""
    later = {(action.stage, action.microbatch) for action in actions if action.kind is Kind.W}
    found: list[_Pass] = []
    following: Unit | None = None
    open_stages = {action.stage for action in actions if action.kind is Kind.REDUCE}
    for action in reversed(actions):
        kind, stage = action.kind, action.stage
        if stage is None or kind not in (Kind.F, Kind.B, Kind.W):
            continue
        split = kind is Kind.B and (stage, action.microbatch) in later
        last = kind is not Kind.F and not split and stage in open_stages
        open_stages -= {stage} if last else set()
        found.append(_Pass(kind, stage, split, last, following))
        if kind is not Kind.W:
            following = next(iter(stages[stage].units(backward=kind is Kind.B)), None)
    return found[::-1]


class _State(NamedTuple):
    """State between two passes. travelling: the buckets of each reduction that may not be done, in
    the order of their starts. adding: buckets with gradients whose reduction has not started.
    blocks: the buckets of blocks whose values are present, the most recently fetched last. here:
    all buckets whose values are present."""

    travelling: tuple[tuple[Bucket, ...], ...]
    adding: frozenset[Bucket]
    blocks: tuple[tuple[Bucket, ...], ...]
    here: frozenset[Bucket]


class _Walk:
    """Walks through one pass in the order in which `Stage` does things. `most` counts the buffers
    that were in use at once, by (whether of values, size)."""

    def __init__(self, state: _State, waited: int, values: bool, alike: bool) -> None:
        self.most: Counter[tuple[bool, int]] = Counter()
        self._waited, self._values, self._alike = waited, values, alike
        self._travelling, self._blocks = list(state.travelling), list(state.blocks)
        self._adding, self._here = set(state.adding), set(state.here)

    @property
    def state(self) -> _State:
        """The current state."""
        return _State(
            tuple(self._travelling),
            frozenset(self._adding),
            tuple(self._blocks),
            frozenset(self._here),
        )

    def go(self, stage: StageUnits, one: _Pass) -> None:
        """Walk through the pass."""
        if one.kind is Kind.F:
            self._forward(stage, one)
        elif one.kind is Kind.B:
            self._backward(stage, one)
        else:
            self._weights(stage)
        if one.last:
            self._reduce((Bucket((one.stage, _VECTORS), 0),))

    def _forward(self, stage: StageUnits, one: _Pass) -> None:
        for unit in self._in_turn(stage.units(backward=False), one.following):
            if unit is stage.head:
                self._add(unit.tables)
        if stage.head is not None:
            self._reduce(stage.head.own)

    def _backward(self, stage: StageUnits, one: _Pass) -> None:
        """Walk through a backward pass; if its weight pass comes later, it adds to tables only."""
        for unit in self._in_turn(stage.units(backward=True), one.following):
            if not one.split:
                self._add(unit.late)
                self._reduce(unit.late)
                self._add(unit.rest)
            self._add(unit.tables)
            if not one.split:
                self._reduce(unit.reduced)
        if stage.embedding is not None:  # needs no values in backward
            self._add(stage.embedding.tables)
            if not one.split:
                self._reduce(stage.embedding.own)

    def _weights(self, stage: StageUnits) -> None:
        for unit in stage.units(backward=True):
            self._add(unit.late + unit.rest)  # all gradients are added before any is reduced
            self._reduce(unit.late)
            self._reduce(unit.reduced)
        if stage.embedding is not None:
            self._reduce(stage.embedding.own)

    def _in_turn(self, units: Sequence[Unit], following: Unit | None) -> Iterator[Unit]:
        """Yield each unit when its values are present and those of the next one are fetched."""
        for unit, after in zip(units, [*units[1:], following], strict=False):
            self._fetch(unit)
            self._fetch(after)
            yield unit
            if unit.tables:  # released as soon as they are used
                self._here -= {*unit.buckets}

    def _add(self, buckets: Sequence[Bucket]) -> None:
        """Add to the gradients of these buckets."""
        self._adding |= {*buckets}
        self._count()

    def _reduce(self, buckets: tuple[Bucket, ...]) -> None:
        """Start the reduction of these buckets. By then their previous reduction is done, and so
        are all but the latest reductions of others."""
        if buckets:
            others = self._travelling[-self._waited + 1 :]
            others = [tuple(b for b in some if b not in buckets) for some in others]
            self._travelling = [*others, buckets]
            self._adding -= {*buckets}

    def _fetch(self, unit: Unit | None) -> None:
        """Fetch the values of a unit; those of a block replace the values of the oldest block."""
        if unit is None or not self._values:
            return
        if not unit.tables:
            self._blocks = [block for block in self._blocks if block != unit.buckets]
            if len(self._blocks) == BLOCKS:
                self._here -= {*self._blocks.pop(0)}
            self._blocks.append(unit.buckets)
        self._here |= {*unit.buckets}
        self._count()

    def _count(self) -> None:
        travelling = [bucket for some in self._travelling for bucket in some]
        gradients = [(False, bucket.size) for bucket in (*travelling, *self._adding)]
        values = [(not self._alike, bucket.size) for bucket in self._here]
        self.most |= Counter([*gradients, *values])
