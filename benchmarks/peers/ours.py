"""megaframe on the workload, used as a user would: a token file, pretrain_gpt.py, overrides.

Speed comes from the run's metrics.jsonl, memory from the kernel's accounting of the finished
process.
"""

from __future__ import annotations

import json
import resource
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from workload import WARMUP_STEPS, WORKLOAD, emit, make_parser, read_peak_rss_bytes

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from megaframe.data.indexed_dataset import choose_token_dtype  # noqa: E402
from megaframe.data.indexed_dataset_writer import IndexedDatasetWriter  # noqa: E402


def write_documents(prefix: Path, documents: Iterable[NDArray[np.integer]], vocab: int) -> None:
    """Write a token file with one sequence per document."""
    with IndexedDatasetWriter(str(prefix), choose_token_dtype(vocab)) as writer:
        for document in documents:
            writer.append(document)


def pretrain(folder: Path, overrides: Sequence[str]) -> list[dict[str, Any]]:
    """Train in `folder` and return the lines of its metrics.jsonl, one per step."""
    run = folder / "run"
    command = [sys.executable, str(ROOT / "pretrain_gpt.py"), f"run.dir={run}", *overrides]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        sys.exit(f"pretrain_gpt.py ended with {result.returncode}:\n{result.stderr[-4000:]}")
    with open(run / "metrics.jsonl", encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


RECOMPUTE = ("train.recompute=selective", "train.recompute_blocks=2")
"""Less memory for a few percent of the speed: norms, activations and the first two blocks."""


def make_overrides(precision: str, steps: int, prefix: Path) -> list[str]:
    """Return the workload as keys of the config; everything else is at its default."""
    shape = WORKLOAD
    return [
        f"model.layers={shape.layers}",
        f"model.heads={shape.heads}",
        f"model.hidden={shape.hidden}",
        f"model.ffn={shape.ffn}",
        f"model.vocab={shape.vocab}",
        "model.norm=layernorm",
        "model.position=learned",
        "model.activation=gelu",
        "model.bias=false",
        "model.tie_embeddings=true",
        f"model.init_std={shape.init_std}",
        f"train.steps={steps}",
        f"train.seq={shape.seq}",
        f"train.global_batch={shape.batch}",
        f"train.microbatch={shape.batch}",
        f"train.precision={precision}",
        f"optim.lr={shape.learning_rate}",
        "optim.schedule=constant",
        f"optim.beta1={shape.beta1}",
        f"optim.beta2={shape.beta2}",
        f"optim.weight_decay={shape.weight_decay}",
        f"optim.clip={shape.clip}",
        f"data.sources=[{{path: {prefix}}}]",
        "data.split=[1, 0, 0]",
        "checkpoint.every=0",
        f"run.seed={shape.seed}",
    ]


def main() -> None:
    command = make_parser(__doc__)
    command.add_argument("--recompute", action="store_true", help="recompute activations")
    arguments = command.parse_args()
    shape = WORKLOAD
    steps = WARMUP_STEPS + arguments.steps
    random = np.random.default_rng(shape.seed)
    tokens = random.integers(shape.vocab, size=steps * shape.tokens_per_step + 1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_documents(folder / "tokens", [tokens], shape.vocab)
        keys = make_overrides(arguments.precision, steps, folder / "tokens")
        metrics = pretrain(folder, [*keys, *(RECOMPUTE if arguments.recompute else ())])
    timed = metrics[WARMUP_STEPS:]
    speeds = [line["tokens_per_second"] for line in timed]
    math = sum(line["time"]["compute"] + line["time"]["optimizer"] for line in timed)
    emit(
        tokens_per_second=statistics.median(speeds),
        best_tokens_per_second=max(speeds),
        peak_rss_bytes=read_peak_rss_bytes(resource.RUSAGE_CHILDREN),
        loss=metrics[0]["loss"],
        versions={"torch": version("torch")},
        overhead=1 - math / sum(line["seconds"] for line in timed),
    )


if __name__ == "__main__":
    main()
