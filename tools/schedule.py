"""Show what a pipeline schedule costs: `python tools/schedule.py --help`."""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction

from rich.console import Console
from rich.table import Table

from megaframe.errors import UserError, explain_failed_write, report_errors
from megaframe.extensions import add_extension_option, load_named_extensions
from megaframe.io.closed_output import allow_closed_output
from megaframe.io.regular_file import write_file
from megaframe.planner.searched_schedules import make_registered_schedules
from megaframe.schedule import (
    SCHEDULE_NAMES,
    NamedSchedule,
    Schedule,
    find_schedule_mistakes,
    generate,
    lower,
)
from megaframe.schedule.check import check
from megaframe.schedule.costs import ActionCosts, Seconds, parse_costs
from megaframe.schedule.draw_svg import draw_svg
from megaframe.schedule.draw_text import draw_text, format_number
from megaframe.schedule.draw_trace import draw_trace
from megaframe.schedule.named import find_named_schedule, get_schedule_limits, get_schedule_name
from megaframe.schedule.simulate import Timeline, simulate
from megaframe.schedule.weight_versions import count_weight_versions, find_largest_stable_rate

_MOST_ACTIONS = 5_000_000
_EPILOG = """\
bubble is the share of the whole step in which ranks wait; bubble_time is that time per rank. waits
is how long each rank waits between its own first and last action: only this is lost if the next
step can begin on one rank before this one ends on another. peak_activations is, for each rank, the
number of microbatches whose activations it holds at once; one chunk of v counts as 1/v.

With --update-every the schedule is one of a pipeline that is never flushed: each stage updates by
itself after so many microbatches. Then staleness is, for each stage, by how many updates a gradient
is late; weight_versions, how many versions of its weights it keeps; apart, by how many updates the
stages that a microbatch passes differ; and largest_rate, the largest stable learning rate of
gradient descent, relative to that with a flush.

example: python tools/schedule.py --schedule zb-v --stages 4 --chunks 2 --microbatches 8 \\
             --costs F=1,B=1,W=1,comm=0.1 --svg zb-v.svg --trace zb-v.json
"""


@dataclass(frozen=True)
class ScheduleRequest:
    """The parameters of one schedule.

    Attributes:
        schedule: As in `generate`.
        group: Microbatches per turn (interleaved).
        costs: Those of a rank's whole share of the model.
        memory_limit: Most activations (search), in units of a microbatch on a rank.
        update_every: Microbatches of an update in a pipeline without flushes; None: with them.
    """

    schedule: str | NamedSchedule
    ranks: int
    chunks: int
    microbatches: int
    group: int | None
    costs: ActionCosts
    memory_limit: Fraction | None
    update_every: int | None = None

    @property
    def name(self) -> str:
        """The name of the schedule."""
        return get_schedule_name(self.schedule)


@dataclass(frozen=True)
class ScheduleResult:
    """A schedule that has passed the checker, with its simulated timeline."""

    question: ScheduleRequest
    schedule: Schedule
    timeline: Timeline

    def record(self) -> dict[str, object]:
        """Return the answer for JSON."""
        request, timeline = self.question, self.timeline
        return {
            "schedule": request.name,
            "stages": request.ranks,
            "chunks": request.chunks,
            "microbatches": request.microbatches,
            "bubble": _to_json_number(timeline.bubble),
            "bubble_time": _to_json_number(timeline.bubble_time),
            "time": _to_json_number(timeline.time),
            "peak_activations": [_to_json_number(value) for value in timeline.peak_activations],
            **self._record_versions(),
        }

    def _record_versions(self) -> dict[str, object]:
        if self.question.update_every is None:
            return {}
        stages = count_weight_versions(self.schedule, self.question.update_every)
        used = zip(*([stage.used[n] for n in sorted(stage.used)] for stage in stages), strict=True)
        staleness = [stage.staleness for stage in stages]
        rate = find_largest_stable_rate(max(staleness)) / find_largest_stable_rate(0)
        return {
            "update_every": self.question.update_every,
            "staleness": staleness,
            "weight_versions": [stage.kept for stage in stages],
            "apart": max(max(versions) - min(versions) for versions in used),
            "largest_rate": round(rate, 4),
        }


def main() -> None:
    options = _parse_options()
    load_named_extensions(options.extension)
    registered = {part.name: part for part in make_registered_schedules()}
    request = ScheduleRequest(
        registered.get(options.schedule, options.schedule or ""),
        options.stages,
        options.chunks,
        options.microbatches,
        options.group,
        parse_costs(options.costs),
        options.memory_limit,
        options.update_every,
    )
    _check_size(request)
    if options.compare:
        _compare(request, [*SCHEDULE_NAMES, *registered.values()], options.json)
        return
    result = _simulate_request(request, options.lowered)
    record = result.record()
    pictures = {
        options.svg: lambda: draw_svg(result.timeline, request.name),
        options.trace: lambda: draw_trace(result.timeline),
    }
    for path, text in [(path, draw()) for path, draw in pictures.items() if path is not None]:
        _write(path, text)
    if options.json:
        print(json.dumps(record))
        return
    width = shutil.get_terminal_size((120, 24)).columns
    print(result.schedule if options.lowered else draw_text(result.timeline, width), end="\n\n")
    for key, value in record.items():
        shown = " ".join(map(str, value)) if isinstance(value, list) else value
        print(f"{key:<17} {shown}")
    waits = " ".join(map(format_number, result.timeline.bubbles))
    print(f"{'waits':<17} {waits}")


def _simulate_request(request: ScheduleRequest, lowered: bool = False) -> ScheduleResult:
    costs = request.costs.divide_by_chunks(request.chunks)
    schedule = generate(
        request.schedule,
        request.ranks,
        request.chunks,
        request.microbatches,
        group=request.group,
        costs=costs,
        memory_limit=request.memory_limit,
    )
    if lowered:
        schedule = lower(schedule)
    check(schedule)
    return ScheduleResult(request, schedule, simulate(schedule, costs))


def _compare(
    request: ScheduleRequest, schedules: Iterable[str | NamedSchedule], as_json: bool
) -> None:
    """Print all schedules on the same ranks, each with the valid number of chunks nearest to the
    given one."""
    results, mistakes = [], []
    for schedule in schedules:
        limits, named = get_schedule_limits(schedule), find_named_schedule(schedule)
        assert limits is not None
        chunks = limits.find_nearest_chunks(request.chunks)
        group = request.group if named is not None and named.takes_turns else None
        variant = ScheduleRequest(
            schedule,
            request.ranks,
            chunks,
            request.microbatches,
            group,
            request.costs,
            request.memory_limit,
        )
        wrong = find_schedule_mistakes(
            schedule, variant.ranks, chunks, variant.microbatches, group=group
        )
        mistakes += wrong
        if not wrong:
            results.append(_simulate_request(variant))
    if as_json:
        print(json.dumps([result.record() for result in results]))
        return
    table = Table(title=f"{request.ranks} ranks, {request.microbatches} microbatches")
    for heading in ("schedule", "chunks", "time", "bubble", "bubble_time", "peak_activations"):
        table.add_column(heading, justify="left" if heading == "schedule" else "right")
    for result in results:
        timeline = result.timeline
        numbers = timeline.time, timeline.bubble_time, max(timeline.peak_activations)
        time, bubble_time, peak = map(format_number, numbers)
        share = f"{float(timeline.bubble):.2%}"
        table.add_row(
            result.question.name, str(result.question.chunks), time, share, bubble_time, peak
        )
    Console().print(table)
    for mistake in mistakes:
        print(f"left out: {mistake}")


def _check_size(request: ScheduleRequest) -> None:
    sizes = {
        "--stages": request.ranks,
        "--chunks": request.chunks,
        "--microbatches": request.microbatches,
    }
    for key, size in sizes.items():
        if size < 1:
            raise UserError(f"{key} {size} is too few; use 1 or more")
    actions = 3 * request.ranks * request.chunks * request.microbatches
    if actions > _MOST_ACTIONS:
        raise UserError(
            f"{' x '.join(f'{key} {size}' for key, size in sizes.items())} make {actions:,} "
            f"actions; use at most {_MOST_ACTIONS:,}"
        )


def _write(path: str, text: str) -> None:
    """Write a file, completely or not at all."""
    with explain_failed_write(path):
        write_file(path, text)


def _to_json_number(value: Seconds) -> int | float:
    """Return a number as JSON has it: an int if it is an exact integer, otherwise a float."""
    whole = not isinstance(value, float) and Fraction(value).denominator == 1
    return int(value) if whole else float(value)


def _parse_memory_limit(text: str) -> Fraction:
    """Parse the value of --memory-limit."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 < value < 1e9:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of microbatches above 0")
    return Fraction(value).limit_denominator(1_000_000)


def _parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Print a pipeline schedule, its bubble, its time and its memory.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument(
        "--schedule", metavar="NAME", help=f"{', '.join(SCHEDULE_NAMES)} or file:PATH"
    )
    source.add_argument("--compare", action="store_true", help="a table of all schedules")
    add("--stages", type=int, required=True, metavar="P", help="ranks of the pipeline")
    add("--chunks", type=int, default=1, metavar="V", help="stages per rank (default: 1)")
    add("--microbatches", type=int, required=True, metavar="M", help="in one step")
    add("--group", type=int, metavar="G", help="interleaved: microbatches per turn (default: P)")
    add("--costs", default="F=1,B=1,W=1,comm=0", metavar="TIMES", help="seconds of a rank's whole "
        "share per microbatch, and of a transfer (default: %(default)s)")  # fmt: skip
    add("--memory-limit", type=_parse_memory_limit, metavar="X", help="search: most activations, "
        "in units of one microbatch on one rank (default: P)")  # fmt: skip
    add("--update-every", type=int, metavar="N", help="without flushes: microbatches of an update")
    add("--lowered", action="store_true", help="print the executor's lists instead of the grid")
    add("--json", action="store_true", help="print one object (with --compare: a list of them)")
    add("--svg", metavar="FILE", help="draw it as SVG")
    add("--trace", metavar="FILE", help="write a trace for ui.perfetto.dev")
    add_extension_option(parser)
    options = parser.parse_args()
    if options.compare and (
        options.svg or options.trace or options.lowered or options.update_every is not None
    ):
        parser.error(
            "--compare draws nothing; give --svg, --trace, --lowered and --update-every with "
            "--schedule"
        )
    return options


if __name__ == "__main__":
    with allow_closed_output(), report_errors():
        main()
