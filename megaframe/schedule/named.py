"""The named schedules, and what may be wrong with a request for one."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from difflib import get_close_matches
from types import MappingProxyType

from megaframe.errors import join_or
from megaframe.schedule.limits import ScheduleLimits
from megaframe.schedule.looped import BreadthFirst, Interleaved
from megaframe.schedule.named_schedule import NamedSchedule
from megaframe.schedule.one_stage import GPipe, OneForwardOneBackward, ZeroBubbleH1, ZeroBubbleH2
from megaframe.schedule.vee import DualPipeV, VHalf, ZeroBubbleV

NAMED_SCHEDULES: Mapping[str, NamedSchedule] = MappingProxyType(
    {
        schedule.name: schedule
        for schedule in (
            GPipe(),
            OneForwardOneBackward(),
            Interleaved(),
            BreadthFirst(),
            ZeroBubbleH1(),
            ZeroBubbleH2(),
            ZeroBubbleV(),
            VHalf(),
            DualPipeV(),
        )
    }
)
"""Our own, by name. Those of extensions are parts of the config (`PipelineSchedulePart`)."""
SEARCH = "search"
SCHEDULE_NAMES = (*NAMED_SCHEDULES, SEARCH)
FILE_PREFIX = "file:"


def find_named_schedule(schedule: str | NamedSchedule) -> NamedSchedule | None:
    """Return the named schedule that a value of `parallel.schedule` asks for, or None for `search`,
    files and unknown names."""
    return NAMED_SCHEDULES.get(schedule) if isinstance(schedule, str) else schedule


def get_schedule_name(schedule: str | NamedSchedule) -> str:
    """Return the name of a value of `parallel.schedule`."""
    return schedule if isinstance(schedule, str) else schedule.name


def get_schedule_limits(schedule: str | NamedSchedule) -> ScheduleLimits | None:
    """Return the limits of a schedule; None for files and unknown names."""
    if schedule == SEARCH:
        return ScheduleLimits(1, None)
    named = find_named_schedule(schedule)
    return None if named is None else named.limits


def find_name_mistakes(
    schedule: str | NamedSchedule,
    ranks: int,
    chunks: int,
    microbatches: int,
    group: int | None = None,
    registered: Collection[str] = (),
) -> Iterator[str]:
    """Yield a message for each reason why there is no such schedule of this size.

    Args:
        schedule: The schedule, or a name, which may be unknown.
        ranks: Pipeline ranks.
        chunks: Stages per rank.
        microbatches: Microbatches per step.
        group: Microbatches per turn of a chunk, for `interleaved` only.
        registered: Names of extensions' schedules, for the message about an unknown name.
    """
    for key, size in (("parallel.pipeline", ranks), ("parallel.chunks", chunks)):
        if size < 1:
            yield f"{key}={size} must be a whole number >= 1"
    if microbatches < 1:
        yield f"{_describe_count(microbatches)}, but needs at least 1; raise train.global_batch"
    name, limits = get_schedule_name(schedule), get_schedule_limits(schedule)
    if limits is None:
        known = (*SCHEDULE_NAMES, *registered)
        near = get_close_matches(name, known, n=2, cutoff=0.5)
        use = f"; did you mean {join_or(near)}?" if near else ""
        yield f"parallel.schedule={name} is not one of {', '.join(known)} and file:PATH{use}"
        return
    near_chunks = limits.find_nearest_chunks(chunks)
    if near_chunks != chunks >= 1:
        fitting = join_or(
            n for n, other in _list_limits() if other.find_nearest_chunks(chunks) == chunks
        )
        yield (
            f"parallel.schedule={name} does not run parallel.chunks={chunks}; "
            f"use parallel.chunks={near_chunks}, or parallel.schedule={fitting}"
        )
    if limits.needs_full_pipeline and 1 <= microbatches < ranks:
        free = join_or(n for n, other in _list_limits() if other.allow_any_microbatches(chunks))
        yield (
            f"{_describe_count(microbatches)}, but parallel.schedule={name} needs at least "
            f"parallel.pipeline={ranks}; use train.global_batch or train.microbatch for {ranks} "
            f"microbatches, parallel.pipeline={microbatches}, or parallel.schedule={free}"
        )
    yield from find_group_mistakes(schedule, ranks, group)


def find_group_mistakes(
    schedule: str | NamedSchedule, ranks: int, group: int | None
) -> Iterator[str]:
    """Yield a message for each reason why `group` microbatches per turn of a chunk are not
    possible.

    Args:
        schedule: The schedule, or its name.
        ranks: Pipeline ranks.
        group: Microbatches per turn; None for the default.
    """
    if group is None:
        return
    name, named = get_schedule_name(schedule), find_named_schedule(schedule)
    if named is None or not named.takes_turns:
        yield (
            f"parallel.schedule_microbatches={group}: a group of {group} microbatches has no "
            f"effect with {name}; leave it out, or use parallel.schedule=interleaved or search"
        )
    elif group < ranks:
        yield (
            f"parallel.schedule_microbatches={group}: a group of {group} microbatches would stop "
            f"{name} on parallel.pipeline={ranks}; use {ranks} or more"
        )


def _list_limits() -> Iterator[tuple[str, ScheduleLimits]]:
    """Yield the names of all our schedules with their limits."""
    for name in SCHEDULE_NAMES:
        limits = get_schedule_limits(name)
        assert limits is not None
        yield name, limits


def _describe_count(microbatches: int) -> str:
    return f"a step has {microbatches} microbatch{'es' * (microbatches != 1)}"
