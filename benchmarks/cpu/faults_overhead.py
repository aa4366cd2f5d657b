"""What watching over steps and checking them costs, as a share of a step.

python benchmarks/cpu/faults_overhead.py --write benchmarks/results/faults_overhead.json

The difference between runs with and without is far below the drift of a shared machine. Instead,
everything that exists for faults is wrapped, and the time inside is summed in one run. That time
includes the wrappers, so it is an upper bound. Ranks are processes with one thread.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from harness import ROOT, describe_machine, read_commit

sys.path.insert(0, str(ROOT))

RANKS, STEPS, WARM = 2, 60, 10
WRAPPED: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "megaframe.distributed.rank_progress": {"Place": ("begin", "act", "wait", "go_on")},
    "megaframe.resilience.recovery": {
        "FaultHandler": ("record_step", "judge_steps", "compare_replicas")
    },
}
KEYS = {
    "model.layers": 4,
    "model.hidden": 256,
    "model.heads": 8,
    "model.vocab": 8192,
    "train.seq": 256,
    "train.global_batch": 8,
    "train.microbatch": 1,
    "train.steps": STEPS,
    "train.precision": "fp32",
    "data.split": "[1, 0, 0]",
    "metrics.peak_tflops": 1,
    "parallel.pipeline": RANKS,
    "checkpoint.every": 1000,
    "faults.compare_every": 20,
    "faults.straggler_factor": 2,
    "faults.spike_factor": 3,
}


def main() -> None:
    """Run the ranks and print the shares."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", type=Path, help="write what was measured as JSON to this file")
    parser.add_argument("--rank", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank is not None:
        run_rank(*arguments.rank)
        return
    with tempfile.TemporaryDirectory() as folder:
        write_corpus(f"{folder}/tokens")
        ranks = [start(folder, rank) for rank in range(RANKS)]
        outputs = [process.communicate()[0] for process in ranks]
    results = [json.loads(text.splitlines()[-1]) for text in outputs]
    for rank, result in enumerate(results):
        shares = ", ".join(f"{name} {share:.4%}" for name, share in result["shares"].items())
        print(
            f"rank {rank}: step {result['step_seconds']:.4f} s; {shares}; all {result['all']:.3%}"
        )
    if arguments.write:
        document = {
            "commit": read_commit(),
            "machine": describe_machine(),
            "keys": KEYS,
            "ranks": results,
        }
        arguments.write.write_text(json.dumps(document, indent=2) + "\n")


def run_rank(folder: str, port: str) -> None:
    """Train, and print the share of each method in the time of the steps after the first ones."""
    import importlib

    import torch

    import pretrain_gpt
    from megaframe.training.trainer import Trainer

    torch.set_num_threads(1)
    spent: defaultdict[str, float] = defaultdict(float)
    began = [0.0]

    def time_method(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            start = time.perf_counter()
            result = method(*arguments)
            spent[name] += time.perf_counter() - start
            return result

        return call

    one_step = Trainer._run_step

    def step(trainer: Trainer) -> None:
        if trainer.step == WARM:
            spent.clear()
            began[0] = time.perf_counter()
        one_step(trainer)
        if trainer.step == STEPS - 1:
            duration = time.perf_counter() - began[0]
            shares = {name: seconds / duration for name, seconds in spent.items()}
            result = {"step_seconds": duration / (STEPS - 1 - WARM), "shares": shares}
            print(json.dumps({**result, "all": sum(shares.values())}), flush=True)
            os._exit(0)

    setattr(Trainer, "_run_step", step)  # noqa: B010
    for module, classes in WRAPPED.items():
        for name, methods in classes.items():
            kind = getattr(importlib.import_module(module), name)
            for method in methods:
                setattr(kind, method, time_method(f"{name}.{method}", getattr(kind, method)))
    os.environ["MASTER_PORT"] = port
    keys = {**KEYS, "run.dir": f"{folder}/run", "data.sources": f"[{{path: {folder}/tokens}}]"}
    sys.argv = ["pretrain_gpt.py", *(f"{key}={value}" for key, value in keys.items())]
    pretrain_gpt.main()


def start(folder: str, rank: int) -> subprocess.Popen[str]:
    """Start the process of one rank."""
    place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(RANKS)}
    place |= {"MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, __file__, "--rank", folder, "29611"]
    environment = {**os.environ, **place}
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)


def write_corpus(prefix: str) -> None:
    """Write a token file of random tokens."""
    import numpy as np

    from megaframe.data.indexed_dataset_writer import IndexedDatasetWriter

    draw = np.random.default_rng(0)
    with IndexedDatasetWriter(prefix, np.dtype(np.uint16)) as writer:
        for _ in range(100):
            writer.append(draw.integers(0, 8000, 2000).astype(np.uint16))


if __name__ == "__main__":
    main()
