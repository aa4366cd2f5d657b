"""Time to a validation loss on the demo's corpus: what each change of the demo's config brings.

python benchmarks/cpu/speedrun.py --rounds 2 --write benchmarks/results/speedrun.json
python benchmarks/cpu/speedrun.py --table benchmarks/results/speedrun.json

The rows are the files of configs/speedrun in order, each of which extends the one before. The first
is the demo; its validation loss is what all others must reach at their last step. Time is that of
all training steps, from the first, without evaluations. Rows run in turns. `make demo` makes the
data.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from harness import describe_measurement, describe_processor

ROOT = Path(__file__).resolve().parents[2]
ROWS = sorted((ROOT / "configs/speedrun").glob("*.yaml"))


@dataclass(frozen=True)
class RowTraining:
    """One training of one row.

    Attributes:
        steps: Of the optimizer.
        tokens: In all of them.
        seconds: Of all of them, without evaluations.
        loss: On validation data, after the last one.
    """

    steps: int
    tokens: int
    seconds: float
    loss: float


def main() -> None:
    """Train all rows in turns, and print the table; or print that of a file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=2, help="trainings of each row")
    parser.add_argument("--write", type=Path, metavar="FILE.json")
    parser.add_argument("--table", type=Path, metavar="FILE.json", help="measure nothing")
    arguments = parser.parse_args()
    if arguments.table:
        print(format_table(json.loads(arguments.table.read_text())))
        return
    rows: dict[str, list[dict[str, Any]]] = {path.stem: [] for path in ROWS}
    for _ in range(arguments.rounds):
        for path in ROWS:
            training = train(path)
            print(f"{path.stem}: {training}", flush=True)
            rows[path.stem].append(asdict(training))
    changes = {path.stem: read_change(path) for path in ROWS}
    document = {**describe_measurement(), "changes": changes, "rows": rows}
    print(format_table(document))
    if arguments.write:
        arguments.write.write_text(json.dumps(document, indent=1) + "\n")


def train(path: Path) -> RowTraining:
    """Train by a config, and return what it took."""
    with tempfile.TemporaryDirectory() as folder:
        words = [f"run.dir={folder}/run", "checkpoint.every=0", "checkpoint.resume=null"]
        command = [sys.executable, "pretrain_gpt.py", "--config", str(path), *words]
        subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
        lines = [json.loads(line) for line in (Path(folder) / "run/metrics.jsonl").open()]
    return RowTraining(
        steps=len(lines),
        tokens=sum(line["tokens"] for line in lines),
        seconds=sum(line["seconds"] - line["time"]["evaluation"] for line in lines),
        loss=lines[-1]["eval_loss"],
    )


def read_change(path: Path) -> str:
    """Return the first line of a config, which says what it changes."""
    return path.read_text().partition("\n")[0].removeprefix("# ").rstrip(".")


def format_table(document: dict[str, Any]) -> str:
    """Return the table of a file of measurements in Markdown."""
    rows: dict[str, list[dict[str, Any]]] = document["rows"]
    first = next(iter(rows))
    start, target = middle(rows[first], "seconds"), max(run["loss"] for run in rows[first])
    lines = [
        "| config | change | steps | tokens | seconds | times as fast | loss |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, runs in rows.items():
        seconds, loss = middle(runs, "seconds"), max(run["loss"] for run in runs)
        spread = " to ".join(f"{end(run['seconds'] for run in runs):.0f}" for end in (min, max))
        missed = " (missed)" * (loss > target)
        lines.append(
            f"| {name} | {document['changes'][name]} | {runs[0]['steps']} | {runs[0]['tokens']:,} "
            f"| {seconds:.0f} ({spread}) | {start / seconds:.2f} | {loss:.4f}{missed} |"
        )
    return "\n".join([*lines, "", f"On {describe_processor(document)}."])


def middle(runs: Sequence[dict[str, Any]], name: str) -> float:
    """Return the median of a number."""
    return statistics.median(run[name] for run in runs)


if __name__ == "__main__":
    main()
