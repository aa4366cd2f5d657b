"""Show what a pipeline schedule costs: `python tools/schedule.py --help`."""

from __future__ import annotations

import argparse
import json
import os
import shutil
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

from rich.console import Console
from rich.table import Table

from megaframe.errors import UserError, report_errors
from megaframe.schedule import SCHEDULE_NAMES, Schedule, generate, lower, schedule_mistakes
from megaframe.schedule.check import check
from megaframe.schedule.costs import ActionCosts, Seconds, parse_costs
from megaframe.schedule.draw_svg import draw_svg
from megaframe.schedule.draw_text import draw_text, format_number
from megaframe.schedule.draw_trace import draw_trace
from megaframe.schedule.limits import SCHEDULE_LIMITS
from megaframe.schedule.simulate import Timeline, simulate

_MOST_ACTIONS = 5_000_000
_EPILOG = """\
bubble is the share of the whole step in which ranks wait; bubble_time is that time per rank. waits
is how long each rank waits between its own first and last action: only this is lost if the next
step can begin on one rank before this one ends on another. peak_activations is, for each rank, the
number of microbatches whose activations it holds at once; one chunk of v counts as 1/v.

example: python tools/schedule.py --schedule zb-v --stages 4 --chunks 2 --microbatches 8 \\
             --costs F=1,B=1,W=1,comm=0.1 --svg zb-v.svg --trace zb-v.json
"""


@dataclass(frozen=True)
class ScheduleRequest:
    """The parameters of one schedule. name: as in `generate`. group: microbatches per turn
    (interleaved). costs: those of a rank's whole share of the model. memory_limit: most activations
    (search), in units of a microbatch on a rank."""

    name: str
    ranks: int
    chunks: int
    microbatches: int
    group: int | None
    costs: ActionCosts
    memory_limit: Fraction | None


@dataclass(frozen=True)
class ScheduleResult:
    """A schedule that has passed the checker, with its simulated timeline."""

    question: ScheduleRequest
    schedule: Schedule
    timeline: Timeline

    def record(self) -> dict[str, object]:
        """Return the answer for JSON."""
        asked, found = self.question, self.timeline
        return {
            "schedule": asked.name,
            "stages": asked.ranks,
            "chunks": asked.chunks,
            "microbatches": asked.microbatches,
            "bubble": _plain(found.bubble),
            "bubble_time": _plain(found.bubble_time),
            "time": _plain(found.time),
            "peak_activations": [_plain(value) for value in found.peak_activations],
        }


def main() -> None:
    options = _options()
    asked = ScheduleRequest(
        options.schedule or "",
        options.stages,
        options.chunks,
        options.microbatches,
        options.group,
        parse_costs(options.costs),
        options.memory_limit,
    )
    _check_size(asked)
    if options.compare:
        _compare(asked, options.json)
        return
    answer = _answer(asked, options.lowered)
    pictures = {
        options.svg: lambda: draw_svg(answer.timeline, asked.name),
        options.trace: lambda: draw_trace(answer.timeline),
    }
    for path, text in [(path, draw()) for path, draw in pictures.items() if path is not None]:
        _write(path, text)
    if options.json:
        print(json.dumps(answer.record()))
        return
    width = shutil.get_terminal_size((120, 24)).columns
    print(answer.schedule if options.lowered else draw_text(answer.timeline, width), end="\n\n")
    for key, value in answer.record().items():
        shown = " ".join(map(str, value)) if isinstance(value, list) else value
        print(f"{key:<17} {shown}")
    waits = " ".join(map(format_number, answer.timeline.bubbles))
    print(f"{'waits':<17} {waits}")


def _answer(asked: ScheduleRequest, lowered: bool = False) -> ScheduleResult:
    costs = asked.costs.divided(asked.chunks)
    schedule = generate(
        asked.name,
        asked.ranks,
        asked.chunks,
        asked.microbatches,
        group=asked.group,
        costs=costs,
        memory_limit=asked.memory_limit,
    )
    if lowered:
        schedule = lower(schedule)
    check(schedule)
    return ScheduleResult(asked, schedule, simulate(schedule, costs))


def _compare(asked: ScheduleRequest, as_json: bool) -> None:
    """Print all schedules on the same ranks, each with the valid number of chunks nearest to the
    given one."""
    answers, mistakes = [], []
    for name in SCHEDULE_NAMES:
        chunks = SCHEDULE_LIMITS[name].nearest_chunks(asked.chunks)
        group = asked.group if name == "interleaved" else None
        one = ScheduleRequest(
            name, asked.ranks, chunks, asked.microbatches, group, asked.costs, asked.memory_limit
        )
        wrong = schedule_mistakes(name, one.ranks, chunks, one.microbatches, group=group)
        mistakes += wrong
        if not wrong:
            answers.append(_answer(one))
    if as_json:
        print(json.dumps([answer.record() for answer in answers]))
        return
    table = Table(title=f"{asked.ranks} ranks, {asked.microbatches} microbatches")
    for heading in ("schedule", "chunks", "time", "bubble", "bubble_time", "peak_activations"):
        table.add_column(heading, justify="left" if heading == "schedule" else "right")
    for answer in answers:
        found = answer.timeline
        numbers = found.time, found.bubble_time, max(found.peak_activations)
        time, bubble_time, peak = map(format_number, numbers)
        share = f"{float(found.bubble):.2%}"
        table.add_row(
            answer.question.name, str(answer.question.chunks), time, share, bubble_time, peak
        )
    Console().print(table)
    for mistake in mistakes:
        print(f"left out: {mistake}")


def _check_size(asked: ScheduleRequest) -> None:
    sizes = {
        "--stages": asked.ranks,
        "--chunks": asked.chunks,
        "--microbatches": asked.microbatches,
    }
    for key, size in sizes.items():
        if size < 1:
            raise UserError(f"{key} {size} is too few; use 1 or more")
    actions = 3 * asked.ranks * asked.chunks * asked.microbatches
    if actions > _MOST_ACTIONS:
        raise UserError(
            f"{' x '.join(f'{key} {size}' for key, size in sizes.items())} make {actions:,} "
            f"actions; use at most {_MOST_ACTIONS:,}"
        )


def _write(path: str, text: str) -> None:
    """Write a file, completely or not at all."""
    partial = Path(f"{path}.{os.getpid()}.partial")
    try:
        partial.write_text(text, encoding="utf-8")
        partial.replace(path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise UserError(f"cannot write {path}: {error.strerror}") from None


def _plain(value: Seconds) -> int | float:
    """Return a number as JSON has it: an int if it is an exact integer, otherwise a float."""
    whole = not isinstance(value, float) and Fraction(value).denominator == 1
    return int(value) if whole else float(value)


def _units(text: str) -> Fraction:
    """Parse the value of --memory-limit."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 < value < 1e9:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of microbatches above 0")
    return Fraction(value).limit_denominator(1_000_000)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Print a pipeline schedule, its bubble, its time and its memory.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument(
        "--schedule", metavar="NAME", help=f"{', '.join(SCHEDULE_NAMES)} or file:PATH"
    )
    what.add_argument("--compare", action="store_true", help="a table of all schedules")
    add("--stages", type=int, required=True, metavar="P", help="ranks of the pipeline")
    add("--chunks", type=int, default=1, metavar="V", help="stages per rank (default: 1)")
    add("--microbatches", type=int, required=True, metavar="M", help="in one step")
    add("--group", type=int, metavar="G", help="interleaved: microbatches per turn (default: P)")
    add("--costs", default="F=1,B=1,W=1,comm=0", metavar="TIMES", help="seconds of a rank's whole "
        "share per microbatch, and of a transfer (default: %(default)s)")  # fmt: skip
    add("--memory-limit", type=_units, metavar="X", help="search: most activations, in units of "
        "one microbatch on one rank (default: P)")  # fmt: skip
    add("--lowered", action="store_true", help="print the engine's lists instead of the grid")
    add("--json", action="store_true", help="print one object (with --compare: a list of them)")
    add("--svg", metavar="FILE", help="draw it as SVG")
    add("--trace", metavar="FILE", help="write a trace for ui.perfetto.dev")
    options = parser.parse_args()
    if options.compare and (options.svg or options.trace or options.lowered):
        parser.error("--compare draws nothing; give --svg, --trace and --lowered with --schedule")
    return options


if __name__ == "__main__":
    with report_errors():
        main()
