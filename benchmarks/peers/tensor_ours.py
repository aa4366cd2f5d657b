"""megaframe on the tensor workload. The sequence is divided too, as it always is."""

from __future__ import annotations

from ours_on_ranks import train
from tensor_workload import make_parser
from workload import WORKLOAD


def main() -> None:
    arguments = make_parser(__doc__)
    arguments.add_argument("settings", nargs="*", metavar="section.key=value")
    given = arguments.parse_args()
    settings = [f"parallel.tensor={given.ranks}", *given.settings]
    train(WORKLOAD, given.precision, given.steps, given.ranks, settings)


if __name__ == "__main__":
    main()
