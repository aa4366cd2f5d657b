"""Predict the loss of the largest of five small models from the other four, then train it; twice.

python benchmarks/cpu/predict_loss.py --folder runs/rungs --write benchmarks/results/ladder.json

Bytes of Python's standard library, models of 7 to 405 thousand parameters: `tools/ladder.py` fits a
law to four, says what the fifth will reach, and trains it. On one thread it takes a quarter of an
hour; the same command continues where it was interrupted.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
from harness import describe_measurement  # noqa: E402

TOOLS = HERE.parents[1] / "tools"
MEGABYTES = 12
COMMON = (
    "model.vocab=257", "model.norm=rmsnorm", "model.tie_embeddings=true", "train.steps=1000",
    "train.seq=128", "train.global_batch=8", "train.precision=fp32", "train.eval_samples=256",
    "optim.warmup=50", "data.tokenizer=bytes", "data.split=[0.95, 0.05, 0]", "checkpoint.keep=1",
)  # fmt: skip
LADDERS = {
    "16": (
        ("--depths", "1,2,3,4", "--target", "5", "--tokens-per-parameter", "10"),
        ("model.layers=3", "model.hidden=48", "model.heads=3", "model.ffn=192",
         "train.microbatch=4", "optim.lr=0.008", "optim.min_lr=0.0008", "checkpoint.every=200"),
    ),
    "8": (
        ("--depths", "2,3,4,5", "--target", "6", "--tokens-per-parameter", "20"),
        ("model.layers=4", "model.hidden=32", "model.heads=4", "model.ffn=128",
         "model.qk_norm=true", "train.microbatch=2", "optim.lr=0.016", "optim.min_lr=0.0008",
         "checkpoint.every=500"),
    ),
}  # fmt: skip
"""By the width for each layer: which rungs, and the config."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, required=True, help="of the data and the runs")
    parser.add_argument("--write", type=Path, metavar="FILE.json")
    options = parser.parse_args()
    folder = options.folder.absolute()
    sources, ladders = f"data.sources=[{{path: {make_data(folder)}}}]", {}
    for width, (rungs, keys) in LADDERS.items():
        ladder = folder / f"ladder-{width}"
        words = *COMMON, *keys, sources, f"run.dir={ladder}"
        run("ladder.py", *rungs, "--run-target", "--", *words)
        record = json.loads((ladder / "ladder.json").read_text())
        ladders[width] = {"arguments": rungs, "keys": (*COMMON, *keys), **record}
    if options.write:
        document = {**describe_measurement(), "ladders": ladders}
        options.write.write_text(json.dumps(document, indent=1) + "\n")


def make_data(folder: Path) -> Path:
    """Return the token file of the corpus, which is made if it is not there yet."""
    corpus, prefix = folder / "python.jsonl", folder / "bytes"
    if not prefix.with_suffix(".idx").exists():
        run("demo_corpus.py", "--output", corpus, "--megabytes", MEGABYTES)
        run("preprocess_data.py", "--input", corpus, "--tokenizer", "bytes", "--output", prefix)
    return prefix


def run(tool: str, *words: object) -> None:
    """Run a tool on one thread."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(TOOLS / tool), *map(str, words)]
    subprocess.run(command, check=True, env=environment)


if __name__ == "__main__":
    main()
