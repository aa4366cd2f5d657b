"""Named schedules whose microbatches go through all ranks before a rank's next stage."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from megaframe.schedule.actions import Action, ActionKind
from megaframe.schedule.building_blocks import (
    alternate,
    divide_into_turns,
    get_stage_of_chunk,
    list_passes,
)
from megaframe.schedule.limits import ScheduleLimits
from megaframe.schedule.named_schedule import (
    HeldActivations,
    NamedSchedule,
    Number,
    PipelineSizes,
    RanksHeld,
)


class Interleaved(NamedSchedule):
    """Interleaved 1F1B (Narayanan et al. 2021): chunks take turns of g microbatches (g >= p,
    default p), or a few more if m is not divisible.

    Bubble (p-1)(F+B+W)/v. With turns of at most g, live is (2p-1 + (v-1)g)/v, at most m; for g = p
    this is p + (p-1)/v.
    """

    name = "interleaved"
    limits: ClassVar[ScheduleLimits] = ScheduleLimits(2, None, needs_full_pipeline=True)
    is_looped = True
    takes_turns = True

    def list_actions(self, rank: int, sizes: PipelineSizes) -> list[Action]:
        """Return the actions of one rank."""
        turns = divide_into_turns(sizes.microbatches, sizes.group or sizes.ranks)
        forwards, backwards = _list_looped_passes(rank, sizes, turns)
        warm_up = 2 * (sizes.ranks - 1 - rank) + (sizes.chunks - 1) * max(turns)
        return alternate(forwards, backwards, warm_up)

    def estimate_bubble(
        self, sizes: PipelineSizes, forward: Number, backward: Number, weight: Number
    ) -> Number:
        """Return the idle seconds."""
        return (sizes.ranks - 1) * (forward + backward + weight) / sizes.chunks

    def count_live(self, sizes: PipelineSizes) -> Number:
        """Return the most activations."""
        later = (sizes.chunks - 1) * _compute_longest_turn(sizes)
        return np.minimum(sizes.microbatches * sizes.chunks, later + 2 * sizes.ranks - 1)

    def count_held(self, sizes: PipelineSizes) -> RanksHeld:
        """Return what ranks hold."""
        last = (sizes.chunks - 1) * _compute_longest_turn(sizes) + 1
        return RanksHeld(
            HeldActivations(self.count_live(sizes)),
            HeldActivations(np.minimum(sizes.microbatches * sizes.chunks, last)),
        )


class BreadthFirst(NamedSchedule):
    """All microbatches of one chunk before the next chunk, all forwards first (Lamy-Poirier 2022).

    Bubble (p-1)(F+B+W)/v for m >= p; live m. Each stage needs its weights only twice per step.
    """

    name = "breadth-first"
    limits: ClassVar[ScheduleLimits] = ScheduleLimits(1, None)
    is_looped = True

    def list_actions(self, rank: int, sizes: PipelineSizes) -> list[Action]:
        """Return the actions of one rank."""
        forwards, backwards = _list_looped_passes(rank, sizes, [sizes.microbatches])
        return forwards + backwards

    def estimate_bubble(
        self, sizes: PipelineSizes, forward: Number, backward: Number, weight: Number
    ) -> Number:
        """Return the idle seconds. With fewer microbatches than ranks, some ranks are idle in every
        round of chunks."""
        total = forward + backward + weight
        missing = np.maximum(0, sizes.ranks - sizes.microbatches) * total
        rounds = (sizes.chunks - 1) / sizes.chunks
        return (sizes.ranks - 1) * total / sizes.chunks + missing * rounds

    def count_live(self, sizes: PipelineSizes) -> Number:
        """Return the most activations."""
        return sizes.microbatches * sizes.chunks

    def is_worth_trying(self, ranks: int, chunks: int, microbatches: int) -> bool:
        """Return False where 1f1b or interleaved takes as long and holds less."""
        return chunks > 1 and microbatches < ranks


def _compute_longest_turn(sizes: PipelineSizes) -> Number:
    """Return the most microbatches of a turn, as `divide_into_turns` makes them."""
    group = sizes.ranks if sizes.group is None else sizes.group
    return -(-sizes.microbatches // np.maximum(1, sizes.microbatches // group))


def _list_looped_passes(
    rank: int, sizes: PipelineSizes, turns: Sequence[int]
) -> tuple[list[Action], list[Action]]:
    chunks = range(sizes.chunks)
    stages = [get_stage_of_chunk(rank, chunk, sizes.ranks, "loop") for chunk in chunks]
    return list_passes(ActionKind.F, stages, turns), list_passes(ActionKind.B, stages[::-1], turns)
