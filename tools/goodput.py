"""Compute the share of time in which a run makes progress, and how often it should save, from
published failures and measured costs.

python tools/goodput.py --mix llama3 --ranks 16384 --costs restart=15,load=10,stall=0.2
python tools/goodput.py --ranks 16384 100000 --measured benchmarks/results/drill.json --target 0.93

Costs that a drill has measured (tools/drill.py --write) are listed apart from those assumed.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import fields, replace
from pathlib import Path

from megaframe.errors import UserError, reported
from megaframe.plan.goodput import MIXES, PUBLISHED, Costs, room, table

SIZES = (1024, 4096, 16384, 32768, 65536, 100000)


def main() -> None:
    """Print the table."""
    arguments = parse_arguments()
    with reported():
        known = measured(arguments.measured) if arguments.measured is not None else {}
        costs = replace(PUBLISHED if arguments.published else Costs(), **known)
        costs = changed(costs, arguments.costs)
        mix, sizes = MIXES[arguments.mix], arguments.ranks or SIZES
        print(f"failures of {mix.name}: {len(mix.causes)} causes; seconds that each costs:")
        said = {name for name, value in known.items() if getattr(costs, name) == value}
        print(f"  measured: {shown(costs, said) or 'none'}")
        print(f"  assumed:  {shown(costs, {field.name for field in fields(costs)} - said)}")
        for line in table(mix, costs, sizes):
            print(line)
        for ranks in sizes if arguments.target is not None else ():
            seconds = room(mix, ranks, costs, arguments.target)
            print(f"{arguments.target:.1%} at {ranks:,} ranks: restart may be {seconds:,.0f} s")


def measured(path: Path) -> dict[str, float]:
    """Return the costs in a file that a drill has written. `crash` is 0, because there the time to
    notice a crash is a part of `restart`, which begins with the last step. Raises `UserError` if
    the file is not from a drill."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        kill = {cause: float(found["kill"][cause]) for cause in ("restart", "load", "again")}
        return {"crash": 0.0, **kill, "stall": float(found["whole"]["stall"])}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"--measured {path}: {error!r}; give what `tools/drill.py --faults kill --write` wrote"
        ) from None


def changed(costs: Costs, text: str) -> Costs:
    """Return the costs with some of them set from NAME=SECONDS,... Raises `UserError` for unknown
    names and invalid numbers."""
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


def shown(costs: Costs, names: set[str] | None = None) -> str:
    """Return the costs in the format of --costs. names: which of them; None for all."""
    chosen = [field.name for field in fields(costs) if names is None or field.name in names]
    return ", ".join(f"{name}={getattr(costs, name):g}" for name in chosen)


def parse_arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mix", choices=sorted(MIXES), default="llama3", help="whose failures")
    parser.add_argument("--ranks", type=int, nargs="*", help="numbers of ranks; default: several")
    parser.add_argument("--costs", default="", help=f"NAME=SECONDS,...: {shown(Costs())}")
    parser.add_argument(
        "--published", action="store_true", help="start from costs as they were when published"
    )
    parser.add_argument("--measured", type=Path, help="what tools/drill.py --write has written")
    parser.add_argument(
        "--target", type=float, help="also tell what a restart may take for this effective share"
    )
    return parser.parse_args()


if __name__ == "__main__":
    main()
