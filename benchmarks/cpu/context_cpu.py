"""Speed and memory of causal attention on one sample divided over ranks, compared with PyTorch's.

Every rank is a process with one thread and has its part of the tokens in zigzag order. A pass is
the attention of one layer, forward and backward (`peers/context_workload.py`). All contenders must
give the same answer within a tolerance, or the comparison stops. Peak memory is that of the largest
rank.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "peers"))

from context_workload import ATTENTION
from harness import (
    PEERS,
    Contender,
    add_common_arguments,
    check_losses,
    format_table,
    run_alternately,
    summarise,
    write_results,
)

CASES = ("2x4096", "2x8192", "4x4096", "4x8192")
"""Ranks and tokens."""
TOLERANCE = 0.02
"""Relative tolerance of the sum of squares that every contender returns; bf16 rounds."""


def make_contenders(arguments: argparse.Namespace, ranks: str, seq: str) -> list[Contender]:
    """Return the commands of ours and of PyTorch's ring in both variants."""

    def make_contender(name: str, script: str, *options: str, ours: bool = False) -> Contender:
        size = ("--ranks", ranks, "--seq", seq, "--precision", arguments.precision)
        steps = ("--steps", str(arguments.steps))
        command = (sys.executable, str(PEERS / script), *size, *steps, *options)
        return Contender(name, command, ours)

    return [
        make_contender("megaframe", "context_ours.py", ours=True),
        make_contender("torch, gathered", "context_torch.py", "--rotate", "allgather"),
        make_contender("torch, all-to-all", "context_torch.py", "--rotate", "alltoall"),
    ]


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = add_common_arguments(__doc__)
    parser.set_defaults(threads=1)
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--steps", type=int, default=5, help="timed passes of each run")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=CASES)
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    results = {}
    for case in arguments.cases:
        ranks, seq = case.split("x")
        print(f"\n{ranks} ranks, {seq} tokens")
        chosen = make_contenders(arguments, ranks, seq)
        outcomes = run_alternately(chosen, arguments.rounds, arguments.threads)
        expected = statistics.median(run.loss for runs in outcomes.values() for run in runs)
        check_losses(outcomes, expected, TOLERANCE * expected)
        lines = summarise(chosen, outcomes)
        print(format_table(lines))
        results[case] = (lines, outcomes)
    if arguments.write:
        config = {**asdict(ATTENTION), "precision": arguments.precision}
        config |= {"steps": arguments.steps, "rounds": arguments.rounds}
        write_results(arguments.write, config, arguments.threads, results)


if __name__ == "__main__":
    main()
