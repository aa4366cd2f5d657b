"""Speed and memory of data parallel training of one GPT, compared with the peers'.

Every rank is a process with one thread. Contenders train the workload of `peers/workload.py`, each
rank on an equal part of the samples of a step. The number at the end of a name is the ZeRO stage,
which says what else the ranks divide. Peak memory is that of the largest rank.
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
"""Norms and activations are recomputed, blocks are not."""
TORCH = {"DDP": "ddp", "FSDP2 2": "fsdp2", "FSDP2 3": "fsdp3"}


def make_contenders(arguments: argparse.Namespace, ranks: int, precision: str) -> list[Contender]:
    """Return the commands of ours and the peers, grouped by ZeRO stage."""

    def make_contender(
        name: str, script: str, python: Path | str, *options: str, ours: bool = False
    ) -> Contender:
        size = ("--ranks", str(ranks), "--precision", precision, "--steps", str(arguments.steps))
        return Contender(name, (str(python), str(PEERS / script), *size, *options), ours)

    chosen = []
    for stage in range(4):
        zero = (*OURS, f"parallel.zero={stage}")
        name = f"megaframe {stage}"
        chosen.append(make_contender(name, "data_ours.py", sys.executable, *zero, ours=True))
        for peer, way in TORCH.items():
            if int(peer[-1]) == stage if peer[-1].isdigit() else stage == 0:
                chosen.append(make_contender(peer, "data_torch.py", sys.executable, "--way", way))
        if stage and arguments.deepspeed_python:
            # Not resolved: the python of a virtual environment is a link.
            python = arguments.deepspeed_python.absolute()
            options = ("--stage", str(stage))
            chosen.append(
                make_contender(f"DeepSpeed {stage}", "data_deepspeed.py", python, *options)
            )
        if stage == 1 and arguments.megatron_python:
            python = arguments.megatron_python.absolute()
            chosen.append(make_contender("megatron-core 1", "data_megatron_core.py", python))
    return chosen


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = add_common_arguments(__doc__)
    parser.set_defaults(threads=1)
    parser.add_argument("--steps", type=int, default=3, help="timed steps of each run")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=CASES)
    parser.add_argument("--megatron-python", type=Path, help="an interpreter with megatron-core")
    parser.add_argument("--deepspeed-python", type=Path, help="an interpreter with DeepSpeed")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    for peer in ("megatron", "deepspeed"):
        if getattr(arguments, f"{peer}_python") is None:
            print(f"{peer} is left out: --{peer}-python PATH gives an interpreter that has it")
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
