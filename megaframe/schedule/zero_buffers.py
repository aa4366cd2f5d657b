"""The buffers of whole gradients and values that ZeRO 2 and 3 need on a rank at once.

A pass takes a buffer from a pool for the gradients of each bucket that it adds to. The buffer is
returned when the bucket's reduction is done, which a later reduction waits for. Values are present
for the unit that computes and for the next one. How many buffers are in use at once therefore
depends on the order of all passes, which this module simulates. Equal passes that start from the
same state are simulated once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from megaframe.schedule import Action, ActionKind

REDUCTIONS_IN_FLIGHT = 2
"""Number of reductions in flight: when one more starts, a transfer of the oldest is waited for."""
BLOCKS_PRESENT = 2
"""Number of blocks whose values are present: the one that computes, and the next one."""
_VECTORS = -1
"""Kind, in a bucket's name, of the gains and biases of a stage, whose gradients stay whole."""


class BucketSize(NamedTuple):
    """Name and size of a bucket.

    Attributes:
        name: (part of the rank's blocks, kind), unique on the rank.
        size: Number of elements.
    """

    name: tuple[int, int]
    size: int


@dataclass(frozen=True)
class UnitBuckets:
    """The buckets of a unit.

    Attributes:
        second_half: Matrices of the second half of a block.
        first_half: Its other matrices.
        tables: Tables that it uses.
        own_tables: The tables whose gradients it reduces.
        ends: Whether it completes the gradients of `rest`, which it may share with blocks before
            it.
    """

    second_half: tuple[BucketSize, ...] = ()
    first_half: tuple[BucketSize, ...] = ()
    tables: tuple[BucketSize, ...] = ()
    own_tables: tuple[BucketSize, ...] = ()
    ends: bool = True

    @property
    def buckets(self) -> tuple[BucketSize, ...]:
        """All buckets whose values the unit needs."""
        return (*self.second_half, *self.first_half, *self.tables)

    @property
    def reduced(self) -> tuple[BucketSize, ...]:
        """The buckets whose gradients are complete after the unit, without its second half."""
        return (*(self.first_half if self.ends else ()), *self.own_tables)


@dataclass(frozen=True)
class StageBuckets:
    """The units of a stage.

    Attributes:
        blocks: Its blocks, followed by its predictors.
        embedding_multiplies: Whether the embedding has products, whose weights a backward pass
            needs.
    """

    embedding: UnitBuckets | None
    blocks: tuple[UnitBuckets, ...]
    head: UnitBuckets | None
    embedding_multiplies: bool = False

    def list_units(self, *, backward: bool) -> tuple[UnitBuckets, ...]:
        """Return the units whose values a forward or backward pass needs, in its order."""
        ends = [() if unit is None else (unit,) for unit in (self.embedding, self.head)]
        if backward:
            return (*self.blocks[::-1], *(ends[0] if self.embedding_multiplies else ()))
        return (*ends[0], *self.blocks, *ends[1])


BucketsByStage = Mapping[int, StageBuckets]


def compute_peak_zero_buffers(
    stages: BucketsByStage,
    actions: Sequence[Action],
    transfers: int = 1,
    *,
    values: bool,
    same_dtype: bool = False,
) -> tuple[int, int]:
    """Return the elements of the buffers of values and of gradients that a rank allocates.

    Args:
        stages: The rank's units, by stage.
        actions: The rank's lowered actions, in order.
        transfers: How many consecutive transfers a reduction takes until it needs no buffer.
        values: Whether values are in such buffers too (ZeRO 3).
        same_dtype: Whether values and gradients have the same type; they then share buffers, which
            count as gradients'.
    """
    state = _BufferState((), frozenset(), (), frozenset())
    reached: dict[tuple[_BufferState, _BucketPass], _BufferState] = {}
    most: Counter[tuple[bool, int]] = Counter()
    for bucket_pass in _list_passes(stages, actions):
        if (state, bucket_pass) not in reached:
            simulation = _BufferSimulation(
                state, REDUCTIONS_IN_FLIGHT * transfers, values, same_dtype
            )
            simulation.run(stages[bucket_pass.stage], bucket_pass)
            most |= simulation.most
            reached[state, bucket_pass] = simulation.state
        state = reached[state, bucket_pass]
    of_values, of_gradients = (
        sum(size * number for (kind, size), number in most.items() if kind == is_value)
        for is_value in (True, False)
    )
    return of_values, of_gradients


class _BucketPass(NamedTuple):
    """A pass.

    Attributes:
        kind, stage: Those of the action.
        split: Whether its weight pass comes later.
        last: Whether it is the stage's last pass that adds gradients, after which those of gains
            and biases are reduced.
        following: The unit whose values the next pass needs first.
    """

    kind: ActionKind
    stage: int
    split: bool
    last: bool
    following: UnitBuckets | None


def _list_passes(stages: BucketsByStage, actions: Sequence[Action]) -> list[_BucketPass]:
    """Return the passes of a list of actions, without the actions that compute nothing."""
    split_passes = {
        (action.stage, action.microbatch) for action in actions if action.kind is ActionKind.W
    }
    passes: list[_BucketPass] = []
    following: UnitBuckets | None = None
    open_stages = {action.stage for action in actions if action.kind is ActionKind.REDUCE}
    for action in reversed(actions):
        kind, stage = action.kind, action.stage
        if stage is None or kind not in (ActionKind.F, ActionKind.B, ActionKind.W):
            continue
        split = kind is ActionKind.B and (stage, action.microbatch) in split_passes
        last = kind is not ActionKind.F and not split and stage in open_stages
        open_stages -= {stage} if last else set()
        passes.append(_BucketPass(kind, stage, split, last, following))
        if kind is not ActionKind.W:
            following = next(iter(stages[stage].list_units(backward=kind is ActionKind.B)), None)
    return passes[::-1]


class _BufferState(NamedTuple):
    """State between two passes.

    Attributes:
        in_flight: The buckets of each reduction that may not be done, in the order of their starts.
        accumulating: Buckets with gradients whose reduction has not started.
        blocks: The buckets of blocks whose values are present, the most recently fetched last.
        present: All buckets whose values are present.
    """

    in_flight: tuple[tuple[BucketSize, ...], ...]
    accumulating: frozenset[BucketSize]
    blocks: tuple[tuple[BucketSize, ...], ...]
    present: frozenset[BucketSize]


class _BufferSimulation:
    """Simulates one pass in the order in which `Stage` does things. `most` counts the buffers
    that were in use at once, by (whether of values, size)."""

    def __init__(
        self, state: _BufferState, max_in_flight: int, values: bool, same_dtype: bool
    ) -> None:
        self.most: Counter[tuple[bool, int]] = Counter()
        self._max_in_flight, self._values, self._same_dtype = max_in_flight, values, same_dtype
        self._in_flight, self._blocks = list(state.in_flight), list(state.blocks)
        self._accumulating, self._present = set(state.accumulating), set(state.present)

    @property
    def state(self) -> _BufferState:
        """The current state."""
        return _BufferState(
            tuple(self._in_flight),
            frozenset(self._accumulating),
            tuple(self._blocks),
            frozenset(self._present),
        )

    def run(self, stage: StageBuckets, bucket_pass: _BucketPass) -> None:
        """Simulate the pass."""
        if bucket_pass.kind is ActionKind.F:
            self._run_forward(stage, bucket_pass)
        elif bucket_pass.kind is ActionKind.B:
            self._run_backward(stage, bucket_pass)
        else:
            self._run_weight_backward(stage)
        if bucket_pass.last:
            self._reduce((BucketSize((bucket_pass.stage, _VECTORS), 0),))

    def _run_forward(self, stage: StageBuckets, bucket_pass: _BucketPass) -> None:
        for unit in self._visit(stage.list_units(backward=False), bucket_pass.following):
            if unit is stage.head:
                self._add(unit.tables)
        if stage.head is not None:
            self._reduce(stage.head.own_tables)

    def _run_backward(self, stage: StageBuckets, bucket_pass: _BucketPass) -> None:
        """Simulate a backward pass; if its weight pass comes later, it adds to tables only."""
        for unit in self._visit(stage.list_units(backward=True), bucket_pass.following):
            if not bucket_pass.split:
                self._add(unit.second_half)
                self._reduce(unit.second_half)
                self._add(unit.first_half)
            self._add(unit.tables)
            if not bucket_pass.split:
                self._reduce(unit.reduced)
        if stage.embedding is not None and not stage.embedding_multiplies:
            self._add(stage.embedding.tables)
            if not bucket_pass.split:
                self._reduce(stage.embedding.own_tables)

    def _run_weight_backward(self, stage: StageBuckets) -> None:
        for unit in stage.list_units(backward=True):
            self._add(
                unit.second_half + unit.first_half
            )  # all gradients are added before any is reduced
            self._reduce(unit.second_half)
            self._reduce(unit.reduced)
        if stage.embedding is not None and not stage.embedding_multiplies:
            self._reduce(stage.embedding.own_tables)

    def _visit(
        self, units: Sequence[UnitBuckets], following: UnitBuckets | None
    ) -> Iterator[UnitBuckets]:
        """Yield each unit when its values are present and those of the next one are fetched."""
        for unit, after in zip(units, [*units[1:], following], strict=False):
            self._fetch(unit)
            self._fetch(after)
            yield unit
            if unit.tables:  # released as soon as they are used
                self._present -= {*unit.buckets}

    def _add(self, buckets: Sequence[BucketSize]) -> None:
        """Add to the gradients of these buckets."""
        self._accumulating |= {*buckets}
        self._count()

    def _reduce(self, buckets: tuple[BucketSize, ...]) -> None:
        """Start the reduction of these buckets. By then their previous reduction is done, and so
        are all but the latest reductions of others."""
        if buckets:
            in_flight = self._in_flight[-self._max_in_flight + 1 :]
            in_flight = [tuple(b for b in reduction if b not in buckets) for reduction in in_flight]
            self._in_flight = [*in_flight, buckets]
            self._accumulating -= {*buckets}

    def _fetch(self, unit: UnitBuckets | None) -> None:
        """Fetch the values of a unit; those of a block replace the values of the oldest block."""
        if unit is None or not self._values:
            return
        if not unit.tables:
            self._blocks = [block for block in self._blocks if block != unit.buckets]
            if len(self._blocks) == BLOCKS_PRESENT:
                self._present -= {*self._blocks.pop(0)}
            self._blocks.append(unit.buckets)
        self._present |= {*unit.buckets}
        self._count()

    def _count(self) -> None:
        in_flight = [bucket for reduction in self._in_flight for bucket in reduction]
        gradients = [(False, bucket.size) for bucket in (*in_flight, *self._accumulating)]
        # Values of the same type as gradients take buffers from the same pool.
        values = [(not self._same_dtype, bucket.size) for bucket in self._present]
        self.most |= Counter([*gradients, *values])
