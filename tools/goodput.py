"""Compute the share of time in which a run makes progress, and how often it should save, from
published failures and measured costs.

python tools/goodput.py --mix llama3 --ranks 16384 --costs restart=15,load=10,stall=0.2
python tools/goodput.py --ranks 100000 --measured benchmarks/results/chaos_test.json --target 0.93

Costs that a chaos test has measured (tools/chaos/chaos_test.py --write) are listed apart from those
assumed.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path

from megaframe.errors import UserError, report_errors
from megaframe.io.closed_output import allow_closed_output
from megaframe.io.untrusted import make_integer_parser, parse_json, read_file
from megaframe.planner.failure_rates import MIXES, PUBLISHED, FailureCosts, FailureMix
from megaframe.planner.goodput import (
    compute_effective_share,
    find_best_interval,
    find_max_restart_seconds,
    format_table_lines,
)

MOST_BYTES = 1 << 20
"""Largest file of measured costs that is read."""
_LEAST_SHARE = 0.01
SIZES = (1024, 4096, 16384, 32768, 65536, 100000)


def main() -> None:
    """Print the table."""
    arguments = parse_arguments()
    with report_errors():
        measured = load_measured_costs(arguments.measured) if arguments.measured is not None else {}
        costs = replace(PUBLISHED if arguments.published else FailureCosts(), **measured)
        costs = apply_costs(costs, arguments.costs)
        mix, sizes = MIXES[arguments.mix], arguments.ranks or SIZES
        check_arguments(mix, sizes, costs, arguments.target)
        print(f"failures of {mix.name}: {len(mix.causes)} causes; seconds that each costs:")
        measured_names = {name for name, value in measured.items() if getattr(costs, name) == value}
        assumed_names = {field.name for field in fields(costs)} - measured_names
        print(f"  measured: {format_costs(costs, measured_names) or 'none'}")
        print(f"  assumed:  {format_costs(costs, assumed_names)}")
        for line in format_table_lines(mix, costs, sizes):
            print(line)
        for ranks in sizes if arguments.target is not None else ():
            seconds = find_max_restart_seconds(mix, ranks, costs, arguments.target)
            print(f"{arguments.target:.1%} at {ranks:,} ranks: restart may be {seconds:,.0f} s")


def check_arguments(
    mix: FailureMix, sizes: Sequence[int], costs: FailureCosts, target: float | None
) -> None:
    """Raise `UserError` for a target that is no share, and for ranks that fail so often that no run
    gets anywhere: it could not be simulated either.

    Args:
        mix: The failures.
        sizes: Numbers of ranks.
        costs: What failures and saves cost.
        target: The effective share to reach; None for none.
    """
    if target is not None and not 0 < target < 1:
        raise UserError(f"--target {target} is not a share between 0 and 1, such as 0.93")
    for ranks in sizes:
        share = compute_effective_share(mix, ranks, costs, find_best_interval(mix, ranks, costs))
        if not share > _LEAST_SHARE:
            raise UserError(
                f"--ranks {ranks:,}: one fails every "
                f"{1 / mix.compute_failure_rate(ranks):.3g} s, and at these costs less than "
                f"{_LEAST_SHARE:.0%} of the time is of use; use fewer ranks"
            )


def load_measured_costs(path: Path) -> dict[str, float]:
    """Return the costs in a file that a chaos test has written. `crash` is 0, because there the
    time to notice a crash is a part of `restart`, which begins with the last step.

    Raises:
        UserError: If the file is not from a chaos test.
    """
    try:
        results = parse_json(read_file(path, MOST_BYTES))
        kill = {cause: float(results["kill"][cause]) for cause in ("restart", "load", "warmup")}
        costs = {"crash": 0.0, **kill, "stall": float(results["whole"]["stall"])}
        if not all(0 <= seconds < 1e9 for seconds in costs.values()):
            raise ValueError(f"seconds out of range in {costs}")
        return costs
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(
            f"--measured {path}: {error!r}; give what `tools/chaos/chaos_test.py --faults kill "
            "--write` wrote"
        ) from None


def apply_costs(costs: FailureCosts, text: str) -> FailureCosts:
    """Return the costs with some of them set from NAME=SECONDS,...

    Raises:
        UserError: For unknown names and invalid numbers.
    """
    names = [field.name for field in fields(costs)]
    for pair in filter(None, text.split(",")):
        name, _, value = pair.partition("=")
        try:
            seconds = float(value)
        except ValueError:
            seconds = -1.0
        if name not in names or not 0 <= seconds < 1e9:
            raise UserError(
                f"--costs {pair}: write NAME=SECONDS with NAME one of {', '.join(names)}"
            )
        costs = replace(costs, **{name: seconds})
    return costs


def format_costs(costs: FailureCosts, names: set[str] | None = None) -> str:
    """Return the costs in the format of --costs.

    Args:
        costs: What failures and saves cost.
        names: Which of them; None for all.
    """
    chosen = [field.name for field in fields(costs) if names is None or field.name in names]
    return ", ".join(f"{name}={getattr(costs, name):g}" for name in chosen)


def parse_arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mix", choices=sorted(MIXES), default="llama3", help="whose failures")
    parser.add_argument(
        "--ranks", type=make_integer_parser(1), nargs="*", help="numbers of ranks; default: several"
    )
    parser.add_argument(
        "--costs", default="", help=f"NAME=SECONDS,...: {format_costs(FailureCosts())}"
    )
    parser.add_argument(
        "--published", action="store_true", help="start from costs as they were when published"
    )
    parser.add_argument(
        "--measured", type=Path, help="what tools/chaos/chaos_test.py --write has written"
    )
    parser.add_argument(
        "--target", type=float, help="also tell what a restart may take for this effective share"
    )
    return parser.parse_args()


if __name__ == "__main__":
    with allow_closed_output():
        main()
