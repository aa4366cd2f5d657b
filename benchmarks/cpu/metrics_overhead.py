"""What metering costs a step: every note that a timer takes, and the flush at the end of the step.

A difference of whole steps would be lost in the noise of a machine. Both are therefore timed
directly, in a run with two tensor ranks, which waits so often for so little work that notes are as
dense as they get. The flush is timed where it runs, including its collectives and the line of the
previous step.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
_SPANS = 100_000


def main() -> None:
    """Measure, print, and write the results if requested."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--write", type=Path, metavar="FILE")
    parser.add_argument("--worker", metavar="FOLDER", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        run_rank(Path(arguments.worker), arguments.steps)
        return
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
        command += [__file__, "--worker", folder, "--steps", str(arguments.steps)]
        subprocess.run(command, check=True, cwd=ROOT)
        results = json.loads((Path(folder) / "found.json").read_text())
    print(json.dumps(results, indent=1))
    if arguments.write:
        arguments.write.write_text(json.dumps(results, indent=1) + "\n")


def run_rank(folder: Path, steps: int) -> None:
    """Run one rank."""
    import numpy as np

    from megaframe.config import load
    from megaframe.data.indexed_dataset_writer import IndexedDatasetWriter
    from megaframe.distributed.mesh import Mesh, read_global_rank
    from megaframe.metrics import MetricsLogger, StepTimer
    from megaframe.metrics.metrics_logger import StepValues
    from megaframe.training.auto_layout import resolve_config
    from megaframe.training.trainer import Trainer

    keys = {
        "run.dir": folder / "run", "run.device": "cpu", "model.layers": 4, "model.hidden": 256,
        "model.heads": 4, "model.vocab": 4096, "train.seq": 128, "train.global_batch": 16,
        "train.microbatch": 8, "train.precision": "fp32", "train.steps": steps,
        "parallel.tensor": 2, "checkpoint.every": 0, "data.sources": f"[{{path: {folder}/tokens}}]",
        "data.split": "[1, 0, 0]", "metrics.peak_tflops": 1.0, "metrics.console": "quiet",
        "metrics.ranks_every": 10,
    }  # fmt: skip
    config = load(None, [f"{key}={value}" for key, value in keys.items()])
    if read_global_rank() == 0:
        with IndexedDatasetWriter(str(folder / "tokens"), np.dtype(np.uint16)) as writer:
            writer.append(np.random.default_rng(0).integers(0, 4096, 10**6).astype(np.uint16))
        (folder / "ready").touch()
    while not (folder / "ready").exists():
        time.sleep(0.1)
    marks: list[int] = []
    flushes: list[float] = []
    take, flush = StepTimer.take, MetricsLogger.flush

    def count_marks(timer: StepTimer) -> Any:
        split = take(timer)
        marks.append(len(split.marks) + len(split.transfers))
        return split

    def time_flush(logger: MetricsLogger, step: int) -> list[StepValues]:
        start = time.perf_counter()
        values = flush(logger, step)
        flushes.append(time.perf_counter() - start)
        return values

    setattr(StepTimer, "take", count_marks)  # noqa: B010
    setattr(MetricsLogger, "flush", time_flush)  # noqa: B010
    config, layout, _ = resolve_config(config, 2)
    mesh = Mesh(layout, device="cpu")
    Trainer(config, mesh).run()
    if mesh.rank == 0:
        lines = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").open()]
        seconds = statistics.median(line["seconds"] for line in lines[1:])
        note, flushed = measure_note(), statistics.median(flushes[1:])
        noted = statistics.median(marks[1:])
        results = {
            "step_seconds": seconds,
            "notes_of_a_step": noted,
            "seconds_of_a_note": note,
            "flush_seconds": flushed,
            "overhead": (noted * note + flushed) / seconds,
        }
        (folder / "found.json").write_text(json.dumps(results))
    mesh.close()


def measure_note() -> float:
    """Return the seconds of half a span, including its share of adding all notes up."""
    from megaframe.metrics import StepTimer

    timer = StepTimer()
    start = time.perf_counter()
    for number in range(_SPANS):
        with timer.time("compute"):
            pass
        if number % 1000 == 0:
            timer.take().sum_parts()
    return (time.perf_counter() - start) / _SPANS / 2


if __name__ == "__main__":
    main()
