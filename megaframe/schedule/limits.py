"""Limits: for which sizes a schedule exists, known without making it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches

from megaframe.errors import join_or


@dataclass(frozen=True)
class ScheduleLimits:
    """The sizes that a schedule supports.

    Attributes:
        min_chunks, max_chunks: Chunks per rank; no upper limit if `max_chunks` is None.
        needs_full_pipeline: Whether it needs at least as many microbatches as ranks.
    """

    min_chunks: int = 1
    max_chunks: int | None = 1
    needs_full_pipeline: bool = False

    def find_nearest_chunks(self, chunks: int) -> int:
        """Return the supported number of chunks that is closest to `chunks`."""
        return max(
            self.min_chunks, chunks if self.max_chunks is None else min(chunks, self.max_chunks)
        )


SCHEDULE_LIMITS: Mapping[str, ScheduleLimits] = {
    "gpipe": ScheduleLimits(),
    "1f1b": ScheduleLimits(),
    "interleaved": ScheduleLimits(2, None, needs_full_pipeline=True),
    "breadth-first": ScheduleLimits(1, None),
    "zb-h1": ScheduleLimits(needs_full_pipeline=True),
    "zb-h2": ScheduleLimits(needs_full_pipeline=True),
    "zb-v": ScheduleLimits(2, 2, needs_full_pipeline=True),
    "v-half": ScheduleLimits(2, 2, needs_full_pipeline=True),
    "dualpipe-v": ScheduleLimits(2, 2, needs_full_pipeline=True),
    "search": ScheduleLimits(1, None),
}
SCHEDULE_NAMES = tuple(SCHEDULE_LIMITS)
FILE_PREFIX = "file:"


def find_name_mistakes(
    name: str, ranks: int, chunks: int, microbatches: int, group: int | None = None
) -> Iterator[str]:
    """Yield a message for each reason why there is no schedule `name` of this size.

    Args:
        name: Name of a schedule, which may be unknown.
        ranks: Pipeline ranks.
        chunks: Stages per rank.
        microbatches: Microbatches per step.
        group: Microbatches per turn of a chunk, for `interleaved` only.
    """
    for key, size in (("parallel.pipeline", ranks), ("parallel.chunks", chunks)):
        if size < 1:
            yield f"{key}={size} must be a whole number >= 1"
    if microbatches < 1:
        yield f"{_describe_count(microbatches)}, but needs at least 1; raise train.global_batch"
    if name not in SCHEDULE_LIMITS:
        near = get_close_matches(name, SCHEDULE_NAMES, n=2, cutoff=0.5)
        use = f"; did you mean {join_or(near)}?" if near else ""
        names = ", ".join(SCHEDULE_NAMES)
        yield f"parallel.schedule={name} is not one of {names} and file:PATH{use}"
        return
    limits = SCHEDULE_LIMITS[name]
    near_chunks = limits.find_nearest_chunks(chunks)
    if near_chunks != chunks >= 1:
        fitting = join_or(
            n for n, other in SCHEDULE_LIMITS.items() if other.find_nearest_chunks(chunks) == chunks
        )
        yield (
            f"parallel.schedule={name} does not run parallel.chunks={chunks}; "
            f"use parallel.chunks={near_chunks}, or parallel.schedule={fitting}"
        )
    if limits.needs_full_pipeline and 1 <= microbatches < ranks:
        free = join_or(
            n for n, other in SCHEDULE_LIMITS.items() if _allows_any_microbatches(other, chunks)
        )
        yield (
            f"{_describe_count(microbatches)}, but parallel.schedule={name} needs at least "
            f"parallel.pipeline={ranks}; use train.global_batch or train.microbatch for {ranks} "
            f"microbatches, parallel.pipeline={microbatches}, or parallel.schedule={free}"
        )
    yield from find_group_mistakes(name, ranks, group)


def find_group_mistakes(name: str, ranks: int, group: int | None) -> Iterator[str]:
    """Yield a message for each reason why `group` microbatches per turn of a chunk are not
    possible.

    Args:
        name: Of the schedule.
        ranks: Pipeline ranks.
        group: Microbatches per turn; None for the default.
    """
    if group is None:
        return
    if name != "interleaved":
        yield (
            f"parallel.schedule_microbatches={group}: a group of {group} microbatches has no "
            f"effect with {name}; leave it out, or use parallel.schedule=interleaved or search"
        )
    elif group < ranks:
        yield (
            f"parallel.schedule_microbatches={group}: a group of {group} microbatches would stop "
            f"interleaved on parallel.pipeline={ranks}; use {ranks} or more"
        )


def _allows_any_microbatches(limits: ScheduleLimits, chunks: int) -> bool:
    return limits.find_nearest_chunks(chunks) == chunks and not limits.needs_full_pipeline


def _describe_count(microbatches: int) -> str:
    return f"a step has {microbatches} microbatch{'es' * (microbatches != 1)}"
