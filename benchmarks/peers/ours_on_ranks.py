"""megaframe on several ranks, used as a user would: a token file, pretrain_gpt.py, overrides. Its
ranks are started like those of the peers.
"""

from __future__ import annotations

import json
import resource
import statistics
import sys
import tempfile
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

import numpy as np
from ours import ROOT, make_overrides, write_documents
from ranks import WARMUP_STEPS, start_ranks
from workload import Workload, emit, read_peak_rss_bytes


def train(
    shape: Workload, precision: str, timed_steps: int, ranks: int, settings: Sequence[str]
) -> None:
    """Train the workload on random tokens and print the measurement. If a key is given twice, the
    later one counts."""
    steps = WARMUP_STEPS + timed_steps
    random = np.random.default_rng(shape.seed)
    tokens = random.integers(shape.vocab, size=steps * shape.tokens_per_step + 1)
    with tempfile.TemporaryDirectory() as name:
        prefix, run = Path(name) / "tokens", Path(name) / "run"
        write_documents(prefix, [tokens], shape.vocab)
        entry = (sys.executable, str(ROOT / "pretrain_gpt.py"), f"run.dir={run}")
        start_ranks((*entry, *make_overrides(precision, steps, prefix), *settings), ranks)
        with open(run / "metrics.jsonl", encoding="utf-8") as lines:
            metrics = [json.loads(line) for line in lines]
    speeds = [line["tokens_per_second"] for line in metrics[WARMUP_STEPS:]]
    emit(
        tokens_per_second=statistics.median(speeds),
        best_tokens_per_second=max(speeds),
        peak_rss_bytes=read_peak_rss_bytes(resource.RUSAGE_CHILDREN),
        loss=metrics[0]["loss"],
        versions={"torch": version("torch")},
    )
