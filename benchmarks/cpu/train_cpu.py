"""Training speed and memory of one GPT on a CPU, compared with the available peers.

Every contender trains the workload of `peers/workload.py` on random tokens in its own process. A
first loss that is not about ln(vocab) ends the comparison, because then something else was trained.
In every round the matrix products of a step are timed alone, too (`peers/product_limit.py`): what
they leave of the step is all that a trainer can save.

`--table` measures nothing, and prints the table of benchmarks/README.md from all files in
`results/`.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "peers"))

from harness import (
    PEERS,
    ROOT,
    Contender,
    ContenderSummary,
    Spread,
    add_common_arguments,
    check_losses,
    describe_processor,
    format_table,
    run_alternately,
    summarise,
    write_results,
)
from workload import WORKLOAD

RESULTS = ROOT / "benchmarks" / "results"
OURS, LIMIT = "megaframe", "matrix products alone"
GOAL, GOAL_OF_LIMIT = 1.10, 0.92
"""What is aimed at: this many times the fastest peer, or this share of the matrix products alone,
whichever is less."""


def make_contenders(arguments: argparse.Namespace, precision: str) -> list[Contender]:
    """Return the commands of ours and of the peers that were given."""

    def make_contender(
        name: str, script: str, python: Path | str, *further: str, ours: bool = False
    ) -> Contender:
        options = ("--precision", precision, "--steps", str(arguments.steps), *further)
        return Contender(name, (str(python), str(PEERS / script), *options), ours)

    chosen = []
    if not arguments.without_ours:
        ours = ("ours.py", sys.executable)
        chosen.append(make_contender(OURS, *ours, ours=True))
        chosen.append(make_contender(f"{OURS}, recompute", *ours, "--recompute", ours=True))
    chosen.append(make_contender("plain PyTorch", "plain.py", sys.executable))
    chosen.append(make_contender("plain, compiled", "plain.py", sys.executable, "--compile"))
    if arguments.nanogpt:
        checkout = str(arguments.nanogpt.resolve())
        chosen.append(
            make_contender("nanoGPT", "nanogpt.py", sys.executable, "--nanogpt", checkout)
        )
    else:
        print("nanoGPT is left out: --nanogpt PATH gives a checkout of it")
    if arguments.megatron_python:
        python = arguments.megatron_python.absolute()  # not resolved: a venv's python is a link
        chosen.append(make_contender("megatron-core", "megatron_core.py", python))
    else:
        print("megatron-core is left out: --megatron-python PATH gives an interpreter that has it")
    if arguments.huggingface_python:
        python = arguments.huggingface_python.absolute()
        chosen.append(make_contender("Hugging Face", "huggingface_trainer.py", python))
    chosen.append(make_contender(LIMIT, "product_limit.py", sys.executable))
    return chosen


def iterate_documents() -> Iterator[dict[str, Any]]:
    """Yield the files of measurements, one for each processor."""
    for path in sorted(RESULTS.glob("train_cpu*.json")):
        yield json.loads(path.read_text(encoding="utf-8"))


def format_processor_table() -> str:
    """Return the table of benchmarks/README.md: for each processor and precision, our speed and
    memory with and without recompute, the fastest peer's, and the products alone."""
    head = f"| processor | | {OURS} | {OURS}, recompute | fastest peer | {LIMIT} | ratio |"
    lines = [head, "|---|---|---|---|---|---|---|"]
    for document in iterate_documents():
        for precision, part in document["results"].items():
            rows = {row["name"]: row for row in part["summary"]}
            peers = [row for name, row in rows.items() if not name.startswith(OURS)]
            peer = max(peers, key=lambda row: float(row["speed"]["median"]))
            cells = [_format_cell(rows.get(name)) for name in (OURS, f"{OURS}, recompute")]
            limit = f"{part['limit']['median']:,.0f}" if "limit" in part else "not measured"
            best = rows.get(OURS) or rows[f"{OURS}, recompute"]
            ratio = f"{best['speed']['median'] / peer['speed']['median']:.2f}"
            named = f"{_format_cell(peer)}, {peer['name']}"
            row = [describe_processor(document), precision, *cells, named, limit, ratio]
            lines.append("| " + " | ".join(row) + " |")
    return "\n".join(lines)


def _format_cell(row: dict[str, Any] | None) -> str:
    if row is None:
        return "not measured"
    return f"{row['speed']['median']:,.0f}, {row['peak_rss_bytes'] / 1e9:.2f} GB"


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = add_common_arguments(__doc__)
    parser.add_argument("--precision", choices=("fp32", "bf16", "both"), default="both")
    parser.add_argument("--steps", type=int, default=8, help="timed steps of each run")
    parser.add_argument("--nanogpt", type=Path, help="a checkout of nanoGPT")
    parser.add_argument("--megatron-python", type=Path, help="an interpreter with megatron-core")
    parser.add_argument("--huggingface-python", type=Path, help="one with transformers, accelerate")
    parser.add_argument("--without-ours", action="store_true", help="run the peers only")
    parser.add_argument("--table", action="store_true", help="print the table of all processors")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    if arguments.table:
        print(format_processor_table())
        return
    results, limits = {}, {}
    for precision in ("fp32", "bf16") if arguments.precision == "both" else (arguments.precision,):
        print(f"\n{precision}")
        chosen = make_contenders(arguments, precision)
        outcomes = run_alternately(chosen, arguments.rounds, arguments.threads)
        check_losses(outcomes, math.log(WORKLOAD.vocab))
        limit = [run.tokens_per_second for run in outcomes.pop(chosen.pop().name)]
        lines = summarise(chosen, outcomes)
        print(format_table(lines))
        for name, runs in outcomes.items():
            if all(run.overhead is not None for run in runs):
                share = max(run.overhead or 0.0 for run in runs)
                print(f"{name}: at most {share:.2%} of a run's steps is neither model nor update")
        results[precision], limits[precision] = (lines, outcomes), limit
        print(judge(lines, limit))
    if arguments.write:
        config = {**asdict(WORKLOAD), "steps": arguments.steps, "rounds": arguments.rounds}
        write_results(arguments.write, config, arguments.threads, results, limits)


def judge(lines: Sequence[ContenderSummary], limit: Sequence[float]) -> str:
    """Return in words how far our default is from the goal."""
    of = Spread.of(limit).median
    own_line = next((line for line in lines if line.name == OURS), None)
    if own_line is None:
        return f"{LIMIT}: {of:.0f} tokens/s"
    goal = min(GOAL * own_line.speed.median / own_line.ratio, GOAL_OF_LIMIT * of)
    share = own_line.speed.median / goal
    return (
        f"{LIMIT}: {of:.0f} tokens/s, of which {OURS} reaches {own_line.speed.median / of:.1%}; "
        f"{share:.2f} of the goal of {goal:.0f} tokens/s"
    )


if __name__ == "__main__":
    main()
