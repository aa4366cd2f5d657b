"""Checks of an extension's pipeline schedule: whether it is what it says, before anything runs.

A schedule must be right at every size that its limits allow. All small ones are tried, and the size
of the run.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

import numpy as np

from megaframe.config.part_calls import call_part, describe_method
from megaframe.config.parts import PipelineSchedulePart
from megaframe.errors import UserError
from megaframe.schedule import Action, PipelineSizes, Schedule
from megaframe.schedule.check import check
from megaframe.schedule.costs import ActionCosts
from megaframe.schedule.event_simulation import count_live_activations
from megaframe.schedule.named_schedule import Number
from megaframe.schedule.simulate import simulate

_MOST_RANKS = 4
_CHUNK_COUNTS = 3
"""How many numbers of chunks are tried, from the smallest that the schedule supports."""
_TIMES = (3.0, 4.0, 2.0)
"""Seconds of F, B and W with which the bubble is compared."""


def refuse_faulty_schedule(part: PipelineSchedulePart) -> None:
    """Raise `UserError` if a schedule is not what it says at some small size."""
    fault = _find_fault(part)
    if fault is not None:
        raise UserError(fault)


def refuse_faulty_size(part: PipelineSchedulePart, sizes: PipelineSizes) -> None:
    """Raise `UserError` if a schedule cannot run at this size within its limits, or differs from
    what the part says of it."""
    try:
        _build_checked(part, sizes)
    except UserError as error:
        raise UserError(f"parallel.schedule={error}") from None


@lru_cache(64)
def _find_fault(part: PipelineSchedulePart) -> str | None:
    try:
        sizes = [*_list_small_sizes(part)]
        _check_closed_forms(part, sizes, [_build_checked(part, size) for size in sizes])
    except UserError as error:
        return f"parallel.schedule={error}"
    return None


def _list_small_sizes(part: PipelineSchedulePart) -> Iterator[PipelineSizes]:
    limits = part.limits
    numbers = range(limits.min_chunks, limits.min_chunks + _CHUNK_COUNTS)
    for ranks in range(1, _MOST_RANKS + 1):
        for chunks in sorted({*map(limits.find_nearest_chunks, numbers)}):
            for microbatches in range(ranks if limits.needs_full_pipeline else 1, 2 * ranks + 2):
                yield PipelineSizes(ranks, chunks, microbatches)


def _build_checked(part: PipelineSchedulePart, sizes: PipelineSizes) -> Schedule:
    place = (
        f"with parallel.pipeline={sizes.ranks}, parallel.chunks={sizes.chunks} and "
        f"{sizes.microbatches} microbatch{'es' * (sizes.microbatches != 1)}"
    )
    schedule = _build(part, sizes)
    problem = _find_problem(part, sizes, schedule)
    if problem is not None:
        raise UserError(
            f"{describe_method(part, 'list_actions')}: {place}, which its limits allow, {problem}"
        )
    live = int(max(count_live_activations(schedule)) * sizes.chunks)
    said = _call_for_numbers(part, "count_live", sizes)
    if said != live:
        raise UserError(
            f"{describe_method(part, 'count_live')} says {said:g} {place}, but a rank holds {live} "
            "activations"
        )
    return schedule


def _build(part: PipelineSchedulePart, sizes: PipelineSizes) -> Schedule:
    lists = []
    for rank in range(sizes.ranks):
        actions = call_part(part, "list_actions", list, rank, sizes)
        for action in actions:
            if not isinstance(action, Action) or not action.kind.is_compute:
                raise UserError(
                    f"{describe_method(part, 'list_actions')} returns {action}, "
                    "which is no F, B or W of a microbatch on a stage"
                )
        if actions != call_part(part, "list_actions", list, rank, sizes):
            raise UserError(
                f"{describe_method(part, 'list_actions')} returns something else "
                "the second time, but all ranks must find the same order"
            )
        lists.append(tuple(actions))
    return Schedule(tuple(lists))


def _find_problem(
    part: PipelineSchedulePart, sizes: PipelineSizes, schedule: Schedule
) -> str | None:
    try:
        check(schedule)
    except UserError as error:
        return f"it cannot run: {error}"
    if schedule.microbatches != sizes.microbatches:
        return f"it has {schedule.microbatches} microbatches"
    stages = {len(schedule.list_stages(rank)) for rank in range(sizes.ranks)}
    if stages != {sizes.chunks}:
        return f"ranks have {' or '.join(map(str, sorted(stages)))} stages"
    is_vee = schedule.rank_of[0] == schedule.rank_of[-1]
    if sizes.ranks > 1 and is_vee != (part.placement == "vee"):
        return (
            f"placement is {part.placement!r}, but rank {schedule.rank_of[0]} has the first stage "
            f"and rank {schedule.rank_of[-1]} the last one"
        )
    return None


def _check_closed_forms(
    part: PipelineSchedulePart, sizes: list[PipelineSizes], schedules: list[Schedule]
) -> None:
    """Check that closed forms take arrays, and that the bubble is right to one microbatch."""
    pairs = [(s, schedule) for s, schedule in zip(sizes, schedules, strict=True) if s.ranks > 1]
    ranks, chunks, microbatches = np.array(
        [(size.ranks, size.chunks, size.microbatches) for size, _ in pairs]
    ).T
    arrays = PipelineSizes(ranks, chunks, microbatches)
    _call_for_numbers(part, "count_live", arrays)
    held = call_part(part, "count_held", tuple, arrays)
    for number in (number for rank in held for number in rank):
        _as_numbers(part, "count_held", arrays, number)
    times = [np.full(len(pairs), seconds) for seconds in _TIMES]
    bubbles = _call_for_numbers(part, "estimate_bubble", arrays, *times)
    for (size, schedule), said in zip(pairs, np.broadcast_to(bubbles, len(pairs)), strict=True):
        timeline = simulate(schedule, ActionCosts(*_TIMES).divide_by_chunks(size.chunks))
        idle = float(timeline.time) - size.microbatches * sum(_TIMES)
        if not abs(said - idle) <= sum(_TIMES) * (1 + 1e-9):
            forward, backward, weight = _TIMES
            raise UserError(
                f"{describe_method(part, 'estimate_bubble')} says {said:g} s "
                f"with parallel.pipeline={size.ranks}, parallel.chunks={size.chunks}, "
                f"{size.microbatches} microbatches and F={forward:g}, B={backward:g}, "
                f"W={weight:g}, but a rank is idle for {idle:g} s"
            )


def _call_for_numbers(part: PipelineSchedulePart, method: str, *arguments: Number) -> Number:
    return _as_numbers(part, method, arguments[0], call_part(part, method, object, *arguments))


def _as_numbers(
    part: PipelineSchedulePart, method: str, sizes: PipelineSizes, answer: object
) -> Number:
    """Return what a closed form has said as one number, or one for each of several sizes."""
    try:
        numbers = np.asarray(answer, dtype=float)
        np.broadcast_to(numbers, np.shape(sizes.ranks))
    except (TypeError, ValueError):
        numbers = np.array(np.nan)
    if not (np.isfinite(numbers) & (numbers >= 0)).all():
        raise UserError(
            f"{describe_method(part, method)} returns {answer}, which is no "
            "number from 0 on for each size"
        )
    return numbers
