"""Generators: make a schedule by its name, compute actions only.

The limits of each schedule are checked first, so that a generator never gets an impossible size.
"""

from __future__ import annotations

from pathlib import Path

from megaframe.errors import UserError
from megaframe.schedule.building_blocks import Placement
from megaframe.schedule.check import check
from megaframe.schedule.costs import ActionCosts, Seconds
from megaframe.schedule.limits import FILE_PREFIX, find_group_mistakes, find_name_mistakes
from megaframe.schedule.named import build_named_schedule
from megaframe.schedule.schedule import Schedule, read_schedule
from megaframe.schedule.search import search_schedule


def generate(
    name: str,
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
        name: One of `NAMES`, or `file:PATH`.
        ranks: Pipeline ranks.
        chunks: Stages per rank.
        microbatches: Microbatches per step.
        group: Microbatches per turn of a chunk; for `interleaved` only, default `ranks`.
        costs, memory_limit, placement: For `search_schedule` only, see there.

    Raises:
        UserError: Naming every limit that is broken, with the nearest valid values.
    """
    mistakes = find_schedule_mistakes(name, ranks, chunks, microbatches, group=group)
    if mistakes:
        raise UserError("\n  ".join(mistakes))
    if name.startswith(FILE_PREFIX):
        return read_schedule(Path(name.removeprefix(FILE_PREFIX)))
    if name == "search":
        return search_schedule(
            ranks, chunks, microbatches, costs or ActionCosts(), memory_limit, placement
        )
    return build_named_schedule(name, ranks, chunks, microbatches, group)


def find_schedule_mistakes(
    name: str, ranks: int, chunks: int, microbatches: int, *, group: int | None = None
) -> list[str]:
    """Return a message for each reason why `generate` would refuse, an empty list if it would not.

    For `file:PATH`, the file is read and checked.

    Args:
        name, ranks, chunks, microbatches, group: As in `generate`.
    """
    if not name.startswith(FILE_PREFIX):
        return list(find_name_mistakes(name, ranks, chunks, microbatches, group))
    try:
        schedule = read_schedule(Path(name.removeprefix(FILE_PREFIX)))
        check(schedule)
    except UserError as error:
        return [f"parallel.schedule={name}: {error}"]
    per_rank = [len(schedule.list_stages(rank)) for rank in range(len(schedule.ranks))]
    sizes = {
        "parallel.pipeline": (ranks, [len(schedule.ranks)]),
        "parallel.chunks": (chunks, sorted(set(per_rank))),
        "the microbatches of a step": (microbatches, [schedule.microbatches]),
    }
    return [
        f"parallel.schedule={name} is made for {', '.join(map(str, valid))}, but {key} is "
        f"{requested}"
        for key, (requested, valid) in sizes.items()
        if valid != [requested]
    ] + list(find_group_mistakes(name, ranks, group))
