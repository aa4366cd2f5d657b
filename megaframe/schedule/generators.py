"""Generators: the order of forward and backward passes of each rank, compute only."""

from __future__ import annotations

from megaframe.schedule.actions import Action, Kind


def one_stage(microbatches: int) -> tuple[Action, ...]:
    """Gradient accumulation without a pipeline: each microbatch forward, then backward."""
    kinds = (Kind.F, Kind.B)
    return tuple(Action(kind, 0, number) for number in range(microbatches) for kind in kinds)
