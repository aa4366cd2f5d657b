"""Named schedules with one stage per rank."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from megaframe.schedule.actions import Action, ActionKind
from megaframe.schedule.building_blocks import alternate, list_passes, split_backwards
from megaframe.schedule.limits import ScheduleLimits
from megaframe.schedule.named_schedule import (
    HeldActivations,
    NamedSchedule,
    Number,
    PipelineSizes,
    RanksHeld,
)


class GPipe(NamedSchedule):
    """All forwards, then all backwards (Huang et al. 2019). Bubble (p-1)(F+B+W); live m."""

    name = "gpipe"

    def list_actions(self, rank: int, sizes: PipelineSizes) -> list[Action]:
        """Return the actions of one rank."""
        return _order_one_stage(rank, sizes, warm_up=sizes.microbatches)

    def estimate_bubble(
        self, sizes: PipelineSizes, forward: Number, backward: Number, weight: Number
    ) -> Number:
        """Return the idle seconds."""
        return (sizes.ranks - 1) * (forward + backward + weight)

    def count_live(self, sizes: PipelineSizes) -> Number:
        """Return the most activations."""
        return sizes.microbatches

    def is_worth_trying(self, ranks: int, chunks: int, microbatches: int) -> bool:
        """Return False, as 1f1b takes as long and holds less."""
        return False


class OneForwardOneBackward(NamedSchedule):
    """1F1B (Narayanan et al. 2019, PipeDream-Flush). Bubble (p-1)(F+B+W); live p - rank.

    With one rank this is gradient accumulation.
    """

    name = "1f1b"

    def list_actions(self, rank: int, sizes: PipelineSizes) -> list[Action]:
        """Return the actions of one rank."""
        return _order_one_stage(rank, sizes, warm_up=sizes.ranks - 1 - rank)

    def estimate_bubble(
        self, sizes: PipelineSizes, forward: Number, backward: Number, weight: Number
    ) -> Number:
        """Return the idle seconds."""
        return (sizes.ranks - 1) * (forward + backward + weight)

    def count_live(self, sizes: PipelineSizes) -> Number:
        """Return the most activations."""
        return np.minimum(sizes.ranks, sizes.microbatches)

    def count_held(self, sizes: PipelineSizes) -> RanksHeld:
        """Return what ranks hold."""
        return RanksHeld(HeldActivations(self.count_live(sizes)), HeldActivations(1))


class ZeroBubbleH1(NamedSchedule):
    """1F1B with weight gradients deferred as far as the memory of 1F1B's first rank allows
    (Qi et al. 2023, "Zero Bubble Pipeline Parallelism"). Bubble (p-1)(F+B-W) for m >= p and
    W <= F, B; live p."""

    name = "zb-h1"
    limits: ClassVar[ScheduleLimits] = ScheduleLimits(needs_full_pipeline=True)

    def list_actions(self, rank: int, sizes: PipelineSizes) -> list[Action]:
        """Return the actions of one rank."""
        return split_backwards(
            _order_one_stage(rank, sizes, sizes.ranks - 1 - rank), deferred=range(rank)
        )

    def estimate_bubble(
        self, sizes: PipelineSizes, forward: Number, backward: Number, weight: Number
    ) -> Number:
        """Return the idle seconds."""
        return (sizes.ranks - 1) * (forward + backward - weight)

    def count_live(self, sizes: PipelineSizes) -> Number:
        """Return the most activations."""
        return np.minimum(sizes.ranks, sizes.microbatches)

    def count_held(self, sizes: PipelineSizes) -> RanksHeld:
        """Return what ranks hold."""
        return _hold_for_weight_passes(sizes, self.count_live(sizes))


class ZeroBubbleH2(NamedSchedule):
    """Like zb-h1, with enough forwards in the warm-up to fill the pipeline.

    Bubble (p-1)(F+B-2W) for m >= 2p-1 and W <= F, B with 2W <= F+B, so 0 at F=B=W; live 2p-1.
    """

    name = "zb-h2"
    limits: ClassVar[ScheduleLimits] = ScheduleLimits(needs_full_pipeline=True)

    def list_actions(self, rank: int, sizes: PipelineSizes) -> list[Action]:
        """Return the actions of one rank."""
        return split_backwards(
            _order_one_stage(rank, sizes, 2 * (sizes.ranks - 1 - rank)), deferred=range(2 * rank)
        )

    def estimate_bubble(
        self, sizes: PipelineSizes, forward: Number, backward: Number, weight: Number
    ) -> Number:
        """Return the idle seconds. They are more than the bubble, because ranks start and end at
        different times."""
        return (sizes.ranks - 1) * np.maximum(forward, forward + backward - 2 * weight)

    def count_live(self, sizes: PipelineSizes) -> Number:
        """Return the most activations."""
        return np.minimum(2 * sizes.ranks - 1, sizes.microbatches)

    def count_held(self, sizes: PipelineSizes) -> RanksHeld:
        """Return what ranks hold."""
        return _hold_for_weight_passes(sizes, self.count_live(sizes))


def _hold_for_weight_passes(sizes: PipelineSizes, live: Number) -> RanksHeld:
    """Return what ranks hold under zb-h1 and zb-h2: the last rank has almost only what waits for
    weight passes, and the one before it nearly as much."""
    is_between = (sizes.ranks > 2) * 1
    return RanksHeld(
        HeldActivations(live - 1, 0, 1),
        HeldActivations(0, live - 1, 1),
        HeldActivations(is_between, (live - 2) * is_between, is_between),
    )


def _order_one_stage(rank: int, sizes: PipelineSizes, warm_up: int) -> list[Action]:
    turns = [sizes.microbatches]
    forwards, backwards = (
        list_passes(kind, [rank], turns) for kind in (ActionKind.F, ActionKind.B)
    )
    return alternate(forwards, backwards, warm_up)
