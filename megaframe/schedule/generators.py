"""Generators: make a schedule by its name, compute actions only.

The limits of each schedule are checked first, so that a generator never gets an impossible size.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from megaframe.errors import UserError
from megaframe.schedule.building_blocks import Placement
from megaframe.schedule.check import check
from megaframe.schedule.costs import ActionCosts, Seconds
from megaframe.schedule.named import (
    FILE_PREFIX,
    NAMED_SCHEDULES,
    SEARCH,
    find_group_mistakes,
    find_name_mistakes,
)
from megaframe.schedule.named_schedule import NamedSchedule, PipelineSizes
from megaframe.schedule.schedule import Schedule, read_schedule
from megaframe.schedule.search import search_schedule


def generate(
    schedule: str | NamedSchedule,
    ranks: int,
    chunks: int,
    microbatches: int,
    *,
    group: int | None = None,
    costs: ActionCosts | None = None,
    memory_limit: Seconds | None = None,
    placement: Placement | None = None,
) -> Schedule:
    """Return the compute actions of a schedule.

    Args:
        schedule: One of `SCHEDULE_NAMES`, `file:PATH`, or the schedule itself, which is checked
            after it is made.
        ranks: Pipeline ranks.
        chunks: Stages per rank.
        microbatches: Microbatches per step.
        group: Microbatches per turn of a chunk; for `interleaved` only, default `ranks`.
        costs, memory_limit, placement: For `search_schedule` only, see there.

    Raises:
        UserError: Naming every limit that is broken, with the nearest valid values.
    """
    mistakes = find_schedule_mistakes(schedule, ranks, chunks, microbatches, group=group)
    if mistakes:
        raise UserError("\n  ".join(mistakes))
    sizes = PipelineSizes(ranks, chunks, microbatches, group)
    if not isinstance(schedule, str):
        built = schedule.build(sizes)
        check(built)
        return built
    if schedule.startswith(FILE_PREFIX):
        return read_schedule(Path(schedule.removeprefix(FILE_PREFIX)))
    if schedule == SEARCH:
        return search_schedule(
            ranks, chunks, microbatches, costs or ActionCosts(), memory_limit, placement
        )
    return NAMED_SCHEDULES[schedule].build(sizes)


def find_schedule_mistakes(
    schedule: str | NamedSchedule,
    ranks: int,
    chunks: int,
    microbatches: int,
    *,
    group: int | None = None,
    registered: Collection[str] = (),
) -> list[str]:
    """Return a message for each reason why `generate` would refuse, an empty list if it would not.

    For `file:PATH`, the file is read and checked.

    Args:
        schedule, ranks, chunks, microbatches, group: As in `generate`.
        registered: Names of extensions' schedules, for the message about an unknown name.
    """
    if not isinstance(schedule, str) or not schedule.startswith(FILE_PREFIX):
        return list(find_name_mistakes(schedule, ranks, chunks, microbatches, group, registered))
    try:
        read = read_schedule(Path(schedule.removeprefix(FILE_PREFIX)))
        check(read)
    except UserError as error:
        return [f"parallel.schedule={schedule}: {error}"]
    per_rank = [len(read.list_stages(rank)) for rank in range(len(read.ranks))]
    sizes = {
        "parallel.pipeline": (ranks, [len(read.ranks)]),
        "parallel.chunks": (chunks, sorted(set(per_rank))),
        "the microbatches of a step": (microbatches, [read.microbatches]),
    }
    return [
        f"parallel.schedule={schedule} is made for {', '.join(map(str, valid))}, but {key} is "
        f"{requested}"
        for key, (requested, valid) in sizes.items()
        if valid != [requested]
    ] + list(find_group_mistakes(schedule, ranks, group))
