"""megaframe on the data workload."""

from __future__ import annotations

from data_workload import make_parser
from ours_on_ranks import train
from workload import WORKLOAD


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("settings", nargs="*", metavar="section.key=value")
    arguments = parser.parse_args()
    settings = [f"train.microbatch={WORKLOAD.batch // arguments.ranks}", *arguments.settings]
    train(WORKLOAD, arguments.precision, arguments.steps, arguments.ranks, settings)


if __name__ == "__main__":
    main()
