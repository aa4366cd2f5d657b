"""megaframe on the tensor workload. The sequence is divided too, as it always is."""

from __future__ import annotations

from ours_on_ranks import train
from tensor_workload import make_parser
from workload import WORKLOAD


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("settings", nargs="*", metavar="section.key=value")
    arguments = parser.parse_args()
    settings = [f"parallel.tensor={arguments.ranks}", *arguments.settings]
    train(WORKLOAD, arguments.precision, arguments.steps, arguments.ranks, settings)


if __name__ == "__main__":
    main()
