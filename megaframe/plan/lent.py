"""Lent: buffers of whole gradients and values where ZeRO divides them, as a rank's list uses them.

A pass takes one for the gradients of each bucket to which it adds, and gives it back when the
reduction is done, for which a later one waits; values are here for the unit that computes and for
the one that comes next. So what is in use at once depends on the order of all passes, and is
followed through it. Passes of a stage that begin alike are alike, and are followed once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from megaframe.schedule import Action, Kind

WAITED = 2
"""Reductions that are started until a transfer of the first of them is waited for."""
BLOCKS = 2
"""Whose values are here: the one that computes, and the next one."""
_VECTORS = -1
"""In the name of what holds the gains and biases of a stage, whose gradients stay whole."""


class Bucket(NamedTuple):
    """Of parameters that travel together: which one of the rank, and its elements."""

    name: tuple[int, int]
    size: int


@dataclass(frozen=True)
class Unit:
    """The buckets of a part of the model: matrices of its late part, the rest of them, and tables.
    own: those of the tables whose gradients leave with it."""

    late: tuple[Bucket, ...] = ()
    rest: tuple[Bucket, ...] = ()
    tables: tuple[Bucket, ...] = ()
    own: tuple[Bucket, ...] = ()

    @property
    def buckets(self) -> tuple[Bucket, ...]:
        """All."""
        return (*self.late, *self.rest, *self.tables)


@dataclass(frozen=True)
class StageUnits:
    """Those of a stage. blocks: predictors among them, behind the others."""

    embedding: Unit | None
    blocks: tuple[Unit, ...]
    head: Unit | None

    def units(self, *, backward: bool) -> tuple[Unit, ...]:
        """Those whose values a pass needs, in its order."""
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
    """Elements of the buffers of values and of gradients that a rank makes for its list. transfers:
    one after the other, of which a reduction consists until it needs no buffer. values: there are
    buffers of these too. alike: of one type with those of gradients, which are then the same."""
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
    """kind, stage: of the action. split: its weight pass comes later. last: with it the gradients
    of gains and biases leave. following: the unit whose values the next pass needs first."""

    kind: Kind
    stage: int
    split: bool
    last: bool
    following: Unit | None


def _passes(stages: Stages, actions: Sequence[Action]) -> list[_Pass]:
    """The list but for what computes nothing."""
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
    """travelling: buckets whose reductions are not known to be done, by start. adding: those with
    gradients that do not travel yet. blocks: whose values are here, the one used last behind. here:
    all values that are."""

    travelling: tuple[tuple[Bucket, ...], ...]
    adding: frozenset[Bucket]
    blocks: tuple[Unit, ...]
    here: frozenset[Bucket]


class _Walk:
    """One pass, in the order in which `Stage` does things; `most` is what was in use."""

    def __init__(self, state: _State, waited: int, values: bool, alike: bool) -> None:
        self.most: Counter[tuple[bool, int]] = Counter()
        self._waited, self._values, self._alike = waited, values, alike
        self._travelling, self._blocks = list(state.travelling), list(state.blocks)
        self._adding, self._here = set(state.adding), set(state.here)

    @property
    def state(self) -> _State:
        """As it is now."""
        return _State(
            tuple(self._travelling),
            frozenset(self._adding),
            tuple(self._blocks),
            frozenset(self._here),
        )

    def go(self, stage: StageUnits, one: _Pass) -> None:
        """Do the pass."""
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
        """Where weight passes come later it adds to tables only."""
        for unit in self._in_turn(stage.units(backward=True), one.following):
            if not one.split:
                self._add(unit.late)
                self._reduce(unit.late)
                self._add(unit.rest)
            self._add(unit.tables)
            if not one.split:
                self._reduce(unit.rest + unit.own)
        if stage.embedding is not None:  # which needs no values
            self._add(stage.embedding.tables)
            if not one.split:
                self._reduce(stage.embedding.own)

    def _weights(self, stage: StageUnits) -> None:
        for unit in stage.units(backward=True):
            self._add(unit.late + unit.rest)  # all of it, and then its parts leave
            self._reduce(unit.late)
            self._reduce(unit.rest + unit.own)
        if stage.embedding is not None:
            self._reduce(stage.embedding.own)

    def _in_turn(self, units: Sequence[Unit], following: Unit | None) -> Iterator[Unit]:
        """Each unit, whose values are here then, with those of the next one on their way."""
        for unit, after in zip(units, [*units[1:], following], strict=False):
            self._fetch(unit)
            self._fetch(after)
            yield unit
            if unit.tables:  # used once
                self._here -= {*unit.buckets}

    def _add(self, buckets: Sequence[Bucket]) -> None:
        """Add to their gradients."""
        self._adding |= {*buckets}
        self._count()

    def _reduce(self, buckets: tuple[Bucket, ...]) -> None:
        """Start their reduction: that of others before has had its time, and theirs is done."""
        if buckets:
            others = self._travelling[-self._waited + 1 :]
            others = [tuple(b for b in some if b not in buckets) for some in others]
            self._travelling = [*others, buckets]
            self._adding -= {*buckets}

    def _fetch(self, unit: Unit | None) -> None:
        """Bring its values, in place of those of the block that was used first."""
        if unit is None or not self._values:
            return
        if not unit.tables:
            self._blocks = [block for block in self._blocks if block != unit]
            if len(self._blocks) == BLOCKS:
                self._here -= {*self._blocks.pop(0).buckets}
            self._blocks.append(unit)
        self._here |= {*unit.buckets}
        self._count()

    def _count(self) -> None:
        travelling = [bucket for some in self._travelling for bucket in some]
        gradients = [(False, bucket.size) for bucket in (*travelling, *self._adding)]
        values = [(not self._alike, bucket.size) for bucket in self._here]
        self.most |= Counter([*gradients, *values])
