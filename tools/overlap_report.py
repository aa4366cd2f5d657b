"""Show how much of a step's transfers is exposed, and how long each GPU is idle.

python pretrain_gpt.py --config run.yaml metrics.profile=[20]
python tools/overlap_report.py runs/default/profile

It reads the traces that torch's profiler wrote for the steps in `metrics.profile`: files, or all of
a folder. A transfer is hidden while the same GPU computes. Compute, exposed communication, exposed
copies and idle time sum to the span from the start of the first operation to the end of the last.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.table import Table

from megaframe.errors import UserError, report_errors
from megaframe.io.closed_output import allow_closed_output
from megaframe.io.untrusted import make_integer_parser
from megaframe.metrics.overlap_report import DeviceOverlap, measure_overlap


def main() -> None:
    """Print a summary, the table and the longest gaps, or the numbers as JSON."""
    arguments = parse_arguments()
    with report_errors():
        overlaps = [
            (path, overlap)
            for path in find_traces(arguments.traces)
            for overlap in measure_overlap(path, arguments.gaps)
        ]
        if arguments.json:
            print(
                json.dumps([{"trace": str(path), **asdict(overlap)} for path, overlap in overlaps])
            )
            return
        console = Console()
        console.print(describe_least_busy_gpu(overlaps), highlight=False)
        console.print(make_table(overlaps))
        for path, overlap in overlaps:
            for gap in overlap.gaps:
                print(f"{path.stem}: idle {1e6 * gap.seconds:,.0f} us: {gap.before} | {gap.after}")


def find_traces(paths: Iterable[Path]) -> Iterator[Path]:
    """Yield each file, and each trace of a folder.

    Raises:
        UserError: If a folder has none.
    """
    for path in paths:
        if not path.is_dir():
            yield path
            continue
        files = sorted((*path.glob("*.json"), *path.glob("*.json.gz")))
        if not files:
            raise UserError(
                f"{path} has no trace: a run writes them for the steps of metrics.profile"
            )
        yield from files


def describe_least_busy_gpu(overlaps: Sequence[tuple[Path, DeviceOverlap]]) -> str:
    """Return a sentence about the GPU that computes for the smallest share of its time."""
    path, overlap = max(overlaps, key=lambda each: 1 - each[1].compute / each[1].span)
    span = overlap.span
    return (
        f"{path.stem}, GPU {overlap.device}, computes least: {overlap.compute / span:.1%} of its "
        f"time; {overlap.exposed_communication / span:.1%} are exposed communication (of "
        f"{overlap.communication / span:.1%}), {overlap.exposed_copies / span:.1%} exposed copies, "
        f"{overlap.idle / span:.1%} nothing."
    )


def make_table(overlaps: Iterable[tuple[Path, DeviceOverlap]]) -> Table:
    """Return the table of milliseconds for each trace and GPU."""
    table = Table("trace", "GPU", box=None, header_style="bold")
    for name in ("span ms", "compute", "communication", "exposed", "copies", "exposed", "idle"):
        table.add_column(name, justify="right")
    for path, overlap in overlaps:
        communication = overlap.communication, overlap.exposed_communication
        seconds = (
            overlap.span,
            overlap.compute,
            *communication,
            overlap.copies,
            overlap.exposed_copies,
            overlap.idle,
        )
        table.add_row(path.stem, str(overlap.device), *(f"{1e3 * each:,.2f}" for each in seconds))
    return table


def parse_arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("traces", nargs="+", type=Path, help="files, or folders of them")
    parser.add_argument(
        "--gaps",
        type=make_integer_parser(0),
        default=3,
        help="of the longest idle times (default 3)",
    )
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


if __name__ == "__main__":
    with allow_closed_output():
        main()
