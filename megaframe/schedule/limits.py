"""Limits: for which sizes a schedule exists, known without making it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches

from megaframe.errors import join_or


@dataclass(frozen=True)
class Limits:
    """The sizes that a schedule supports.

    fewest, most: chunks per rank; no upper limit if `most` is None.
    fill: it needs at least as many microbatches as ranks.
    """

    fewest: int = 1
    most: int | None = 1
    fill: bool = False

    def nearest_chunks(self, chunks: int) -> int:
        """Return the supported number of chunks that is closest to `chunks`."""
        return max(self.fewest, chunks if self.most is None else min(chunks, self.most))


LIMITS: Mapping[str, Limits] = {
    "gpipe": Limits(),
    "1f1b": Limits(),
    "interleaved": Limits(2, None, fill=True),
    "breadth-first": Limits(1, None),
    "zb-h1": Limits(fill=True),
    "zb-h2": Limits(fill=True),
    "zb-v": Limits(2, 2, fill=True),
    "v-half": Limits(2, 2, fill=True),
    "dualpipe-v": Limits(2, 2, fill=True),
    "search": Limits(1, None),
}
NAMES = tuple(LIMITS)
FILE = "file:"


def name_mistakes(
    name: str, ranks: int, chunks: int, microbatches: int, group: int | None = None
) -> Iterator[str]:
    """Yield a message for each reason why there is no schedule `name` of this size."""
    for key, size in (("parallel.pipeline", ranks), ("parallel.chunks", chunks)):
        if size < 1:
            yield f"{key}={size} must be a whole number >= 1"
    if microbatches < 1:
        yield f"{_count(microbatches)}, but needs at least 1; raise train.global_batch"
    if name not in LIMITS:
        near = get_close_matches(name, NAMES, n=2, cutoff=0.5)
        use = f"; did you mean {join_or(near)}?" if near else ""
        yield f"parallel.schedule={name} is not one of {', '.join(NAMES)} and file:PATH{use}"
        return
    limits = LIMITS[name]
    near_chunks = limits.nearest_chunks(chunks)
    if near_chunks != chunks >= 1:
        fitting = join_or(
            n for n, other in LIMITS.items() if other.nearest_chunks(chunks) == chunks
        )
        yield (
            f"parallel.schedule={name} does not run parallel.chunks={chunks}; "
            f"use parallel.chunks={near_chunks}, or parallel.schedule={fitting}"
        )
    if limits.fill and 1 <= microbatches < ranks:
        free = join_or(n for n, other in LIMITS.items() if _fits(other, chunks))
        yield (
            f"{_count(microbatches)}, but parallel.schedule={name} needs at least "
            f"parallel.pipeline={ranks}; use train.global_batch or train.microbatch for {ranks} "
            f"microbatches, parallel.pipeline={microbatches}, or parallel.schedule={free}"
        )
    yield from group_mistakes(name, ranks, group)


def group_mistakes(name: str, ranks: int, group: int | None) -> Iterator[str]:
    """Yield a message for each reason why `group` microbatches per turn of a chunk are not
    possible."""
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


def _fits(limits: Limits, chunks: int) -> bool:
    return limits.nearest_chunks(chunks) == chunks and not limits.fill


def _count(microbatches: int) -> str:
    return f"a step has {microbatches} microbatch{'es' * (microbatches != 1)}"
