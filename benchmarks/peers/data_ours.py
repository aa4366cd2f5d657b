"""megaframe on the data workload."""

from __future__ import annotations

from data_workload import make_parser
from ours_on_ranks import train
from workload import WORKLOAD


def main() -> None:
    arguments = make_parser(__doc__)
    arguments.add_argument("settings", nargs="*", metavar="section.key=value")
    given = arguments.parse_args()
    settings = [f"train.microbatch={WORKLOAD.batch // given.ranks}", *given.settings]
    train(WORKLOAD, given.precision, given.steps, given.ranks, settings)


if __name__ == "__main__":
    main()
