"""Training speed and memory of one GPT on a CPU, compared with the available peers.

Every contender trains the workload of `peers/workload.py` on random tokens in its own process. A
first loss that is not about ln(vocab) ends the comparison, because then something else was trained.
"""

from __future__ import annotations

import argparse
import math
import sys
from dataclasses import asdict
from pathlib import Path

from harness import (
    Contender,
    alternate,
    check_losses,
    common_arguments,
    summarise,
    table,
    write,
)

PEERS = Path(__file__).resolve().parent / "peers"
sys.path.insert(0, str(PEERS))

from workload import WORKLOAD  # noqa: E402


def contenders(given: argparse.Namespace, precision: str) -> list[Contender]:
    """Return the commands of ours and of the peers that were given."""

    def contender(
        name: str, script: str, python: Path | str, *more: str, ours: bool = False
    ) -> Contender:
        options = ("--precision", precision, "--steps", str(given.steps), *more)
        return Contender(name, (str(python), str(PEERS / script), *options), ours)

    chosen = []
    if not given.without_ours:
        chosen.append(contender("megaframe", "ours.py", sys.executable, ours=True))
    chosen.append(contender("plain PyTorch", "plain.py", sys.executable))
    chosen.append(contender("plain, compiled", "plain.py", sys.executable, "--compile"))
    if given.nanogpt:
        checkout = str(given.nanogpt.resolve())
        chosen.append(contender("nanoGPT", "nanogpt.py", sys.executable, "--nanogpt", checkout))
    else:
        print("nanoGPT is left out: --nanogpt PATH gives a checkout of it")
    if given.megatron_python:
        python = given.megatron_python.absolute()  # not resolved: a venv's python is a link
        chosen.append(contender("megatron-core", "megatron_core.py", python))
    else:
        print("megatron-core is left out: --megatron-python PATH gives an interpreter that has it")
    if given.huggingface_python:
        python = given.huggingface_python.absolute()
        chosen.append(contender("Hugging Face", "huggingface_trainer.py", python))
    return chosen


def arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = common_arguments(__doc__)
    parser.add_argument("--precision", choices=("fp32", "bf16", "both"), default="both")
    parser.add_argument("--steps", type=int, default=8, help="timed steps of each run")
    parser.add_argument("--nanogpt", type=Path, help="a checkout of nanoGPT")
    parser.add_argument("--megatron-python", type=Path, help="an interpreter with megatron-core")
    parser.add_argument("--huggingface-python", type=Path, help="one with transformers, accelerate")
    parser.add_argument("--without-ours", action="store_true", help="run the peers only")
    return parser.parse_args()


def main() -> None:
    given = arguments()
    results = {}
    for precision in ("fp32", "bf16") if given.precision == "both" else (given.precision,):
        print(f"\n{precision}")
        chosen = contenders(given, precision)
        outcomes = alternate(chosen, given.rounds, given.threads)
        check_losses(outcomes, math.log(WORKLOAD.vocab))
        lines = summarise(chosen, outcomes)
        print(table(lines))
        for name, runs in outcomes.items():
            if all(run.overhead is not None for run in runs):
                share = max(run.overhead or 0.0 for run in runs)
                print(f"{name}: at most {share:.2%} of a run's steps is neither model nor update")
        results[precision] = (lines, outcomes)
    if given.write:
        config = {**asdict(WORKLOAD), "steps": given.steps, "rounds": given.rounds}
        write(given.write, config, given.threads, results)


if __name__ == "__main__":
    main()
