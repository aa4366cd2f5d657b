"""What a named schedule is: its lists of actions, its limits, and what a planner reads of it.

Closed forms are computed from whole numbers, or for many layouts at once from numpy arrays of them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from megaframe.schedule.actions import Action
from megaframe.schedule.building_blocks import Placement
from megaframe.schedule.limits import ScheduleLimits
from megaframe.schedule.schedule import Schedule

Number = Any
"""A number, or a numpy array of them."""


@dataclass(frozen=True)
class PipelineSizes:
    """What a schedule is made for.

    Attributes:
        ranks: Pipeline ranks (p).
        chunks: Stages per rank (v).
        microbatches: Microbatches per step (m).
        group: Microbatches per turn of a chunk, for a schedule that takes turns; None for as many
            as ranks.
    """

    ranks: Number
    chunks: Number
    microbatches: Number
    group: int | None = None


class HeldActivations(NamedTuple):
    """The most that a rank holds at once, in activations of one microbatch on one stage.

    Attributes:
        backward: Those that wait for a backward pass.
        weight_pass: Those that a backward pass left for a weight pass.
        either: Those that wait for one of the two; each counts as the larger.
    """

    backward: Number = 0
    weight_pass: Number = 0
    either: Number = 0


class RanksHeld(NamedTuple):
    """What three ranks of a pipeline hold. One of them needs most memory.

    Attributes:
        first: The rank with the first stage.
        last: The rank with the last stage, where that is not the first rank.
        inner: The rank between them where weight passes wait longest; nothing, if it never holds
            more than the first one.
    """

    first: HeldActivations
    last: HeldActivations
    inner: HeldActivations = HeldActivations()


class NamedSchedule(ABC):
    """A schedule for all sizes that its limits allow. Everything that knows of it reads it here.

    "Bubble" below is the idle time of a rank between its first and last action, at its maximum over
    the ranks. This is how the papers measure it; ranks need not end at the same time. "Live" counts
    activations in units of a rank's share. F, B and W are the times of a rank's whole share, of
    which a chunk takes 1/v. Closed forms hold without communication time.

    Attributes:
        limits: The sizes that it supports.
        placement: How stages are placed on ranks: a "vee" puts the head on the rank of the
            embedding.
        is_looped: Whether microbatches go through all ranks before they come to a rank's next
            stage, so that data ranks communicate behind more passes.
        takes_turns: Whether `PipelineSizes.group` has an effect.
    """

    limits: ClassVar[ScheduleLimits] = ScheduleLimits()
    placement: ClassVar[Placement] = "loop"
    is_looped: ClassVar[bool] = False
    takes_turns: ClassVar[bool] = False

    @property
    @abstractmethod
    def name(self) -> str:
        """The value of `parallel.schedule` that asks for it."""

    @abstractmethod
    def list_actions(self, rank: int, sizes: PipelineSizes) -> list[Action]:
        """Return the compute actions of one rank, in order.

        Args:
            rank: The rank.
            sizes: Within the limits.
        """

    @abstractmethod
    def estimate_bubble(
        self, sizes: PipelineSizes, forward: Number, backward: Number, weight: Number
    ) -> Number:
        """Return the seconds of a step in which a rank is idle, from its start to the end of the
        last rank.

        Args:
            sizes: Numbers or arrays, of two ranks or more.
            forward, backward, weight: Seconds of F, B and W of a rank's whole share, for one
                microbatch.
        """

    @abstractmethod
    def count_live(self, sizes: PipelineSizes) -> Number:
        """Return how many activations the rank that holds most of them holds at once, in
        activations of one microbatch on one stage.

        Args:
            sizes: Numbers or arrays.
        """

    def count_held(self, sizes: PipelineSizes) -> RanksHeld:
        """Return what ranks hold of activations, for an estimate of memory.

        By default any rank may hold the most, all for backward passes.

        Args:
            sizes: Numbers or arrays, of two ranks or more.
        """
        most = HeldActivations(self.count_live(sizes))
        return RanksHeld(most, most)

    def is_worth_trying(self, ranks: int, chunks: int, microbatches: int) -> bool:
        """Return whether a search of layouts tries this size: False if another schedule takes as
        long there and holds less."""
        return True

    def build(self, sizes: PipelineSizes) -> Schedule:
        """Return the lists of all ranks.

        Args:
            sizes: Within the limits.
        """
        return Schedule(tuple(tuple(self.list_actions(rank, sizes)) for rank in range(sizes.ranks)))
