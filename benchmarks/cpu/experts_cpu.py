"""Speed of a layer of experts, forward and backward, compared with a naive loop over experts and
with the Mixtral block of Hugging Face transformers.

All contenders get the same tokens, weights and output gradient (`peers/experts_workload.py`), and
must give the same answer within a tolerance, or the comparison stops. Our overhead is the time of
the layer minus that of its experts alone on sorted rows: router, routes, and moving the rows there
and back.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "peers"))

from experts_workload import SHAPES
from harness import (
    PEERS,
    Contender,
    Spread,
    add_common_arguments,
    check_losses,
    format_table,
    run_alternately,
    summarise,
    write_results,
)

CASES = tuple(f"{shape}-{precision}" for shape in SHAPES for precision in ("fp32", "bf16"))
LIMIT = "matrix products alone"
TOLERANCE = 0.02
"""Relative tolerance of the sum of mean squares that every contender returns; bf16 rounds."""


def make_contenders(arguments: argparse.Namespace, shape: str, precision: str) -> list[Contender]:
    """Return the commands of ours and the others."""

    def make_contender(name: str, script: str, *options: str, ours: bool = False) -> Contender:
        python = arguments.huggingface_python if "huggingface" in script else sys.executable
        size = ("--shape", shape, "--precision", precision, "--steps", str(arguments.steps))
        return Contender(name, (str(python), str(PEERS / script), *size, *options), ours)

    contenders = [
        make_contender("megaframe", "experts_ours.py", ours=True),
        make_contender("loop over experts", "experts_loop.py"),
    ]
    if arguments.huggingface_python is not None:
        contenders.append(make_contender("Hugging Face", "experts_huggingface.py"))
    contenders.append(make_contender(LIMIT, "experts_limit.py"))
    return contenders


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = add_common_arguments(__doc__)
    parser.add_argument("--steps", type=int, default=5, help="timed passes of each run")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=CASES)
    parser.add_argument(
        "--huggingface-python", type=Path, help="an interpreter that has torch and transformers"
    )
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    results, limits = {}, {}
    for case in arguments.cases:
        shape, _, precision = case.rpartition("-")
        print(f"\n{shape}, {precision}: {SHAPES[shape]}")
        chosen = make_contenders(arguments, shape, precision)
        outcomes = run_alternately(chosen, arguments.rounds, arguments.threads)
        limits[case] = [run.tokens_per_second for run in outcomes.pop(chosen.pop().name)]
        expected = statistics.median(run.loss for runs in outcomes.values() for run in runs)
        check_losses(outcomes, expected, TOLERANCE * expected)
        lines = summarise(chosen, outcomes)
        print(format_table(lines))
        of = Spread.of(limits[case])
        print(
            f"{LIMIT}: {of.median:.0f} tokens/s ({of.low:.0f} to {of.high:.0f}), of which "
            f"megaframe reaches {lines[0].speed.median / of.median:.1%}"
        )
        overheads = [run.overhead for run in outcomes["megaframe"] if run.overhead is not None]
        print(f"overhead of routing beside the experts: {statistics.median(overheads):.1%}")
        results[case] = (lines, outcomes)
    if arguments.write:
        config = {"shapes": {name: asdict(shape) for name, shape in SHAPES.items()}}
        config |= {"steps": arguments.steps, "rounds": arguments.rounds}
        write_results(arguments.write, config, arguments.threads, results, limits)


if __name__ == "__main__":
    main()
