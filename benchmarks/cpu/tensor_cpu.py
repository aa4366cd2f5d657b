"""Speed and memory of tensor parallel training of one GPT, compared with the peers'.

Every rank is a process with one thread. Contenders train the workload of `peers/workload.py`, with
all of a sample's tokens on all ranks. `sequence` also divides the tokens between the matrices, as
ours always does. Peak memory is that of the largest rank.
"""

from __future__ import annotations

import argparse
import math
import sys
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "peers"))

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
from workload import WORKLOAD

CASES = ("2xfp32", "2xbf16", "4xfp32", "4xbf16")
"""Ranks and precision."""
OURS = ("train.recompute_blocks=0",)
"""Norms and activations are recomputed, blocks are not, because the divided model has memory to
spare."""


def make_contenders(arguments: argparse.Namespace, ranks: int, precision: str) -> list[Contender]:
    """Return the commands of ours and the peers."""

    def make_contender(
        name: str, script: str, python: Path | str, *options: str, ours: bool = False
    ) -> Contender:
        size = ("--ranks", str(ranks), "--precision", precision, "--steps", str(arguments.steps))
        return Contender(name, (str(python), str(PEERS / script), *size, *options), ours)

    chosen = [make_contender("megaframe", "tensor_ours.py", sys.executable, *OURS, ours=True)]
    peers = [("torch DTensor", "tensor_torch.py", sys.executable)]
    if arguments.megatron_python:
        python = arguments.megatron_python.absolute()  # not resolved: a venv's python is a link
        peers.append(("megatron-core", "tensor_megatron_core.py", str(python)))
    else:
        print("megatron-core is left out: --megatron-python PATH gives an interpreter that has it")
    for name, script, interpreter in peers:
        chosen.append(make_contender(name, script, interpreter))
        chosen.append(make_contender(f"{name}, seq.", script, interpreter, "--sequence"))
    return chosen


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = add_common_arguments(__doc__)
    parser.set_defaults(threads=1)
    parser.add_argument("--steps", type=int, default=3, help="timed steps of each run")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=CASES)
    parser.add_argument("--megatron-python", type=Path, help="an interpreter with megatron-core")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    results = {}
    for case in arguments.cases:
        ranks, precision = case.split("x")
        print(f"\n{ranks} ranks, {precision}")
        chosen = make_contenders(arguments, int(ranks), precision)
        outcomes = run_alternately(chosen, arguments.rounds, arguments.threads)
        check_losses(outcomes, math.log(WORKLOAD.vocab))
        lines = summarise(chosen, outcomes)
        print(format_table(lines))
        results[case] = (lines, outcomes)
    if arguments.write:
        config = {
            **asdict(WORKLOAD),
            "steps": arguments.steps,
            "rounds": arguments.rounds,
            "ours": OURS,
        }
        write_results(arguments.write, config, arguments.threads, results)


if __name__ == "__main__":
    main()
