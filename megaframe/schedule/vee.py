"""Named schedules with two stages per rank in a V, whose first rank also has the last stage."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from megaframe.schedule.actions import Action, ActionKind
from megaframe.schedule.building_blocks import (
    Placement,
    alternate,
    drop_missing_microbatches,
    get_stage_of_chunk,
    list_passes,
    split_backwards,
)
from megaframe.schedule.limits import ScheduleLimits
from megaframe.schedule.named_schedule import (
    HeldActivations,
    NamedSchedule,
    Number,
    PipelineSizes,
    RanksHeld,
)

_LIMITS = ScheduleLimits(2, 2, needs_full_pipeline=True)


class ZeroBubbleV(NamedSchedule):
    """Two chunks in a V (Qi et al. 2023, section 6).

    Bubble (p-1)(B-W) for m >= 2p-1 and W <= F <= B, so 0 at F=B=W; live p. At the end, weight
    gradients are deferred until after the backwards that come back through the V, except after the
    first of these backwards.
    """

    name = "zb-v"
    limits: ClassVar[ScheduleLimits] = _LIMITS
    placement: ClassVar[Placement] = "vee"

    def list_actions(self, rank: int, sizes: PipelineSizes) -> list[Action]:
        """Return the actions of one rank."""
        order = _order_vee(rank, sizes)
        first = 2 * sizes.microbatches - _count_trailing_backwards(order) + 1
        return split_backwards(order, deferred=range(first, first + 2 * rank))

    def estimate_bubble(
        self, sizes: PipelineSizes, forward: Number, backward: Number, weight: Number
    ) -> Number:
        """Return the idle seconds. They are more than the bubble, because ranks start and end at
        different times."""
        return (sizes.ranks - 1) * np.maximum(backward / 2, backward - weight)

    def count_live(self, sizes: PipelineSizes) -> Number:
        """Return the most activations."""
        return 2 * np.minimum(sizes.ranks, sizes.microbatches)

    def count_held(self, sizes: PipelineSizes) -> RanksHeld:
        """Return what ranks hold: the last one waits for weight passes."""
        return _hold_in_vee(sizes, waiting=2 * sizes.ranks - 2)


class DualPipeV(NamedSchedule):
    """DualPipe (DeepSeek-AI 2024) cut in half: the order of zb-v, in which only the first p-1-rank
    and the last p backwards of a rank are split. Bubble p/2 at F=B=W=1; live p."""

    name = "dualpipe-v"
    limits: ClassVar[ScheduleLimits] = _LIMITS
    placement: ClassVar[Placement] = "vee"

    def list_actions(self, rank: int, sizes: PipelineSizes) -> list[Action]:
        """Return the actions of one rank."""
        passes = 2 * sizes.microbatches
        tail = range(max(0, passes - sizes.ranks), passes)
        return split_backwards(
            _order_vee(rank, sizes),
            chosen={*range(sizes.ranks - 1 - rank), *tail},
            deferred=tail[: rank + 1],
        )

    def estimate_bubble(
        self, sizes: PipelineSizes, forward: Number, backward: Number, weight: Number
    ) -> Number:
        """Return the idle seconds. They are more than the bubble, because ranks start and end at
        different times."""
        return sizes.ranks * (backward - weight / 2) - (backward - weight)

    def count_live(self, sizes: PipelineSizes) -> Number:
        """Return the most activations."""
        return 2 * np.minimum(sizes.ranks, sizes.microbatches)

    def count_held(self, sizes: PipelineSizes) -> RanksHeld:
        """Return what ranks hold: the last one waits for weight passes."""
        return _hold_in_vee(sizes, waiting=sizes.ranks - 1)


class VHalf(NamedSchedule):
    """Two chunks in a V whose activations live half as long as in 1F1B (Qi et al. 2024, "Pipeline
    Parallelism with Controllable Memory"). A block of six slots repeats. A chunk's forward and
    backward together take three slots to move on by one rank. At F=B=W=1, bubble (7p-4)/4 for even
    p and 7(p-1)/4 for odd p; live (p+2)//2."""

    name = "v-half"
    limits: ClassVar[ScheduleLimits] = _LIMITS
    placement: ClassVar[Placement] = "vee"

    def list_actions(self, rank: int, sizes: PipelineSizes) -> list[Action]:
        """Return the actions of one rank."""
        ranks = sizes.ranks
        apart = 3 * (1 - ranks % 2)
        slots = {
            (ActionKind.F, 0): 2 * rank,
            (ActionKind.F, 1): 3 * ranks - 2 - rank,
            (ActionKind.B, 1): 3 * ranks - 1 + apart + 2 * rank,
            (ActionKind.B, 0): 6 * ranks - 2 + apart - rank,
        }
        # A block has six slots, one for each of F, B and W of both chunks. Each W takes the first
        # one that is free after its B.
        taken_slots = {slot % 6 for slot in slots.values()}
        for chunk in (1, 0):
            slot = slots[ActionKind.B, chunk] + 1
            while slot % 6 in taken_slots:
                slot += 1
            slots[ActionKind.W, chunk] = slot
            taken_slots.add(slot % 6)
        stages = [get_stage_of_chunk(rank, chunk, ranks, "vee") for chunk in (0, 1)]
        timed = sorted(
            (slot + 6 * microbatch, kind, stages[chunk], microbatch)
            for (kind, chunk), slot in slots.items()
            for microbatch in range(sizes.microbatches)
        )
        return [Action(kind, stage, microbatch) for _, kind, stage, microbatch in timed]

    def estimate_bubble(
        self, sizes: PipelineSizes, forward: Number, backward: Number, weight: Number
    ) -> Number:
        """Return the idle seconds: exact if all passes are equal and the number of ranks is
        even."""
        return sizes.ranks * (forward / 2 + 1.5 * backward - weight / 4) - forward

    def count_live(self, sizes: PipelineSizes) -> Number:
        """Return the most activations."""
        return 2 * np.minimum((sizes.ranks + 2) // 2, sizes.microbatches)

    def count_held(self, sizes: PipelineSizes) -> RanksHeld:
        """Return what ranks hold."""
        live = np.minimum(sizes.ranks + 2, sizes.microbatches + 1)
        return RanksHeld(HeldActivations(live - 2, 0, 2), HeldActivations(1))


def _hold_in_vee(sizes: PipelineSizes, waiting: Number) -> RanksHeld:
    """Return what ranks hold under zb-v and dualpipe-v.

    Args:
        sizes: Those of the pipeline.
        waiting: Activations that wait for weight passes on the last rank.
    """
    live = np.minimum(2 * sizes.ranks, sizes.microbatches + 1)
    return RanksHeld(
        HeldActivations(live - 1, 0, 1), HeldActivations(1), HeldActivations(0, waiting, 1)
    )


def _order_vee(rank: int, sizes: PipelineSizes) -> list[Action]:
    """Return the forwards and backwards of zb-v and dualpipe-v: 2p-1 forwards, then forwards and
    backwards in turn, then the other backwards."""
    ranks, microbatches = sizes.ranks, sizes.microbatches
    down, up = (get_stage_of_chunk(rank, chunk, ranks, "vee") for chunk in (0, 1))
    endless = [microbatches + 2 * ranks]
    f_down, f_up, b_down, b_up = (
        list_passes(kind, [stage], endless)
        for kind in (ActionKind.F, ActionKind.B)
        for stage in (down, up)
    )
    ranks_after = ranks - rank
    ahead = 2 * ranks_after - 1
    forwards = [
        *f_down[:ahead],
        *_interleave(f_up[:rank], f_down[ahead:]),
        *f_up[rank : rank + ranks_after],
        *_interleave(f_down[ahead + rank :], f_up[rank + ranks_after :]),
    ]
    backwards = [*b_up[:ranks_after], *_interleave(b_down, b_up[ranks_after:])]
    return drop_missing_microbatches(alternate(forwards, backwards, 2 * ranks - 1), microbatches)


def _interleave(first: Sequence[Action], second: Sequence[Action]) -> list[Action]:
    return [action for pair in zip(first, second, strict=False) for action in pair]


def _count_trailing_backwards(order: Sequence[Action]) -> int:
    """Number of backwards after the last forward."""
    return next(n for n, action in enumerate(reversed(order)) if action.kind is ActionKind.F)
