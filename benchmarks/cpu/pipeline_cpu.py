"""Speed and memory of one GPT trained on the ranks of a pipeline, compared with the peers'
pipelines.

Every rank is a process with one thread. Contenders train the workload of
`peers/pipeline_workload.py`; peak memory is that of the largest rank. The peers divide layers
evenly, as they do by default; ours divides the work. Torch's schedules with two stages per rank
need a layer for each stage, so they run on two ranks only.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Mapping
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
from pipeline_workload import MICROBATCHES
from workload import WORKLOAD

CASES = ("2x50304", "2x2048", "4x50304", "4x2048")
"""Stages and vocabulary. A large vocabulary makes the head half of the work, so the division of the
work decides; with a small one the schedule does."""
SCHEDULES: Mapping[str, tuple[str, int]] = {
    "torch GPipe": ("GPipe", 1),
    "torch 1F1B": ("1F1B", 1),
    "torch Interleaved": ("Interleaved1F1B", 2),
    "torch InterleavedZB": ("InterleavedZeroBubble", 2),
    "torch ZBV": ("ZBVZeroBubble", 2),
    "torch DualPipeV": ("DualPipeV", 2),
}
"""torch.distributed.pipelining, by our names: its schedule and stages per rank."""
OURS = ("--schedule", "search")
"""Our best option for memory and speed together: the order found for the work of each stage, one
stage per rank, norms and activations recomputed."""
FIRST_LOSS_TOLERANCE = 0.4
"""With an untied head and weights with a std of 0.02, the first loss is about 0.1 above
ln(vocab)."""


def make_contenders(arguments: argparse.Namespace, stages: int, vocab: int) -> list[Contender]:
    """Return the commands of ours and the peers."""

    def make_contender(
        name: str, script: str, python: Path | str, *options: str, ours: bool = False
    ) -> Contender:
        size = ("--stages", str(stages), "--vocab", str(vocab), "--steps", str(arguments.steps))
        return Contender(name, (str(python), str(PEERS / script), *size, *options), ours)

    chosen = [make_contender("megaframe", "pipeline_ours.py", sys.executable, *OURS, ours=True)]
    for name, (schedule, chunks) in SCHEDULES.items():
        if stages * chunks <= WORKLOAD.layers:
            options = ("--schedule", schedule)
            chosen.append(make_contender(name, "pipeline_torch.py", sys.executable, *options))
    if arguments.megatron_python:
        python = arguments.megatron_python.absolute()  # not resolved: a venv's python is a link
        chosen.append(make_contender("megatron-core", "pipeline_megatron_core.py", python))
    else:
        print("megatron-core is left out: --megatron-python PATH gives an interpreter that has it")
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
        stages, vocab = map(int, case.split("x"))
        print(f"\n{stages} stages, vocabulary {vocab}")
        chosen = make_contenders(arguments, stages, vocab)
        outcomes = run_alternately(chosen, arguments.rounds, arguments.threads)
        check_losses(outcomes, math.log(vocab), FIRST_LOSS_TOLERANCE)
        lines = summarise(chosen, outcomes)
        print(format_table(lines))
        results[case] = (lines, outcomes)
    if arguments.write:
        config = {**asdict(WORKLOAD), "microbatches": MICROBATCHES, "ours": OURS}
        config |= {"steps": arguments.steps, "rounds": arguments.rounds}
        config.pop("vocab")  # each case has its own
        write_results(arguments.write, config, arguments.threads, results)


if __name__ == "__main__":
    main()
