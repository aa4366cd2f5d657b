"""megaframe on the pipeline workload, by the way that users take: a token file, pretrain_gpt.py,
overrides; its ranks are started as those of the peers are.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

import numpy as np
from ours import ROOT, overrides_of, write_documents
from pipeline_workload import MICROBATCHES, WARMUP_STEPS, parser, shape_of, start_ranks
from workload import emit, peak_rss_bytes


def command(given: argparse.Namespace, folder: Path, steps: int) -> list[str]:
    """What every rank runs; where a key is said twice, the later one counts."""
    shape = shape_of(given)
    return [
        sys.executable,
        str(ROOT / "pretrain_gpt.py"),
        *overrides_of("fp32", steps, folder / "tokens"),
        f"run.dir={folder / 'run'}",
        f"model.vocab={shape.vocab}",
        "model.tie_embeddings=false",
        "train.recompute_blocks=0",
        f"train.microbatch={shape.batch // MICROBATCHES}",
        f"parallel.pipeline={given.stages}",
        f"parallel.schedule={given.schedule}",
        f"parallel.chunks={given.chunks}",
        *given.settings,
    ]


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--schedule", default="1f1b")
    arguments.add_argument("--chunks", type=int, default=1)
    arguments.add_argument("settings", nargs="*", metavar="section.key=value")
    given = arguments.parse_args()
    shape, steps = shape_of(given), WARMUP_STEPS + given.steps
    random = np.random.default_rng(shape.seed)
    tokens = random.integers(shape.vocab, size=steps * shape.tokens_per_step + 1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_documents(folder / "tokens", [tokens], shape.vocab)
        start_ranks(command(given, folder, steps), given.stages)
        with open(folder / "run" / "metrics.jsonl", encoding="utf-8") as lines:
            metrics = [json.loads(line) for line in lines]
    speeds = [line["tokens_per_second"] for line in metrics[WARMUP_STEPS:]]
    emit(
        tokens_per_second=statistics.median(speeds),
        best_tokens_per_second=max(speeds),
        peak_rss_bytes=peak_rss_bytes(resource.RUSAGE_CHILDREN),
        loss=metrics[0]["loss"],
        versions={"torch": version("torch")},
    )


if __name__ == "__main__":
    main()
