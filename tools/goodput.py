"""What share of its time a run makes progress, and how often to save: failures as published,
against costs as measured.

python tools/goodput.py --mix llama3 --ranks 16384 --costs restart=15,load=10,stall=0.2
"""

from __future__ import annotations

import argparse
from dataclasses import fields, replace

from megaframe.errors import UserError, reported
from megaframe.plan.goodput import MIXES, PUBLISHED, Costs, table

SIZES = (1024, 4096, 16384, 32768, 65536, 100000)


def main() -> None:
    """Print the table."""
    arguments = parse_arguments()
    with reported():
        costs = changed(PUBLISHED if arguments.published else Costs(), arguments.costs)
        mix = MIXES[arguments.mix]
        print(f"failures of {mix.name}: {len(mix.causes)} causes; seconds: {shown(costs)}")
        for line in table(mix, costs, arguments.ranks or SIZES):
            print(line)


def changed(costs: Costs, text: str) -> Costs:
    """Costs with some of them set, from NAME=SECONDS,... Raises `UserError` for what is none."""
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


def shown(costs: Costs) -> str:
    """All costs as they are given."""
    return ", ".join(f"{field.name}={getattr(costs, field.name):g}" for field in fields(costs))


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mix", choices=sorted(MIXES), default="llama3", help="whose failures")
    parser.add_argument("--ranks", type=int, nargs="*", help="numbers of ranks; default: several")
    parser.add_argument("--costs", default="", help=f"NAME=SECONDS,...: {shown(Costs())}")
    parser.add_argument(
        "--published", action="store_true", help="start from costs as they were when published"
    )
    return parser.parse_args()


if __name__ == "__main__":
    main()
