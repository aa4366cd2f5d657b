"""Runs for the chaos test: start them, follow their progress, and read what they have left
behind."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from megaframe.data.indexed_dataset_writer import IndexedDatasetWriter
from megaframe.io.local_rendezvous import find_free_port
from megaframe.io.regular_file import open_append
from megaframe.io.run_files import METRICS_FILE

ROOT = Path(__file__).resolve().parents[2]
STEPS, EVERY, LIMIT = 60, 5, 240.0
"""Steps of a run, steps between its checkpoints, and seconds after which a wait is given up."""
COPY_EVERY = 2
"""Steps between copies in memory."""
OVERRIDES = {
    "model.layers": 4,
    "model.hidden": 64,
    "model.heads": 4,
    "model.vocab": 61,
    "train.seq": 64,
    "train.steps": STEPS,
    "train.global_batch": 8,
    "train.microbatch": 1,
    "train.precision": "fp64",
    "checkpoint.every": EVERY,
    "checkpoint.keep": 4,
    "checkpoint.memory_every": COPY_EVERY,
    "checkpoint.resume": "latest",
    "data.split": "[1, 0, 0]",
    "metrics.peak_tflops": 1,
    "faults.step_timeout": 8,
    "faults.elastic": "true",
    "parallel.timeout": 60,
    "parallel.pipeline": 2,
}
Process = subprocess.Popen[bytes]


class FaultSkipped(Exception):
    """Raised if this machine cannot run a chaos test; the text is the reason."""


@dataclass(frozen=True)
class ChaosRun:
    """One run of a chaos test.

    Attributes:
        folder: Folder of all runs.
        run: Folder of this run.
        ranks: Number of its ranks.
    """

    folder: Path
    run: Path
    ranks: int

    def make_overrides(self, **changes: object) -> list[str]:
        """Return the overrides of the run.

        Args:
            changes: Further keys, with `__` for the dot.
        """
        keys = {**OVERRIDES, "run.dir": self.run}
        keys["data.sources"] = f"[{{path: {self.folder / 'tokens'}}}]"
        keys |= {name.replace("__", "."): value for name, value in changes.items()}
        return [f"{name}={value}" for name, value in keys.items()]

    def launch(self, ranks: int | None = None, restarts: int = 3, **changes: object) -> Process:
        """Start the run under torchrun.

        Args:
            ranks: How many; by default those of the run.
            restarts: Its `--max-restarts`.
            changes: As in `make_overrides`.
        """
        command = [sys.executable, "-m", "torch.distributed.run"]
        command += ["--nproc-per-node", str(ranks or self.ranks), "--max-restarts", str(restarts)]
        command += ["--master-port", str(find_free_port()), str(ROOT / "pretrain_gpt.py")]
        return self.start([*command, *self.make_overrides(**changes)], {})

    def start(self, command: Sequence[str], variables: Mapping[str, object]) -> Process:
        """Start a process of the run, with its output in the run's folder."""
        self.run.mkdir(parents=True, exist_ok=True)
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        environment["MEGAFRAME_LAUNCHER"] = "chaos"  # starts of a run belong together
        environment["PYTHONPATH"] = os.pathsep.join((str(ROOT), os.environ.get("PYTHONPATH", "")))
        environment |= {name: str(value) for name, value in variables.items()}
        with open_append(self.run / "console.txt", inside=self.run) as console:
            return subprocess.Popen(command, stdout=console, stderr=console, env=environment)

    def wait_for_step(self, step: int, process: Process) -> int:
        """Wait until the run has done a step, and return its last step by then."""
        wait_for(lambda: self.steps[-1:] >= [step], process)
        return self.steps[-1]

    def wait_for_resume(self, process: Process) -> float:
        """Wait until the run has resumed and done a step, and return the time
        (`time.monotonic`)."""
        starts = len(self.starts)
        wait_for(lambda: len(self.starts) > starts, process)
        return wait_for(lambda: self.steps[-1:] > self.starts[-1:], process)

    @property
    def steps(self) -> list[int]:
        """The steps of all metrics lines that the run has written."""
        return [line["step"] for line in self.read_metrics()]

    @property
    def losses(self) -> list[float]:
        """The losses in the order of the steps; empty if steps are missing or repeated."""
        lines = list(self.read_metrics())
        complete = [line["step"] for line in lines] == list(range(1, STEPS + 1))
        return [line["loss"] or math.nan for line in lines] if complete else []

    def read_metrics(self) -> Iterator[dict[str, Any]]:
        """Yield the complete lines of the metrics."""
        return _complete_lines(self.run / METRICS_FILE)

    def read_events(self) -> Iterator[dict[str, Any]]:
        """Yield the events of the run's ledger of faults."""
        return _complete_lines(self.run / "faults/ledger.jsonl")

    @property
    def starts(self) -> list[int]:
        """The steps from which the run has started or resumed."""
        return [event["step"] for event in self.read_events() if event["event"] == "start"]

    @property
    def lost_seconds(self) -> dict[str, float]:
        """Seconds lost since the run began, by cause. `warmup`: how much longer than usual the
        first steps after a resume took."""
        lost = dict.fromkeys(("detection", "restart", "load", "repeat", "save"), 0.0)
        first = True
        for event in self.read_events():
            first = first and event["event"] != "start"
            if event["event"] == "lost" and not first:
                lost[event["cause"]] += event["seconds"]
        usual = median(line["seconds"] for line in self.read_metrics())
        resumed = [line["seconds"] for line in self.read_metrics() if line.get("resumed_after")]
        return {**lost, "warmup": sum(seconds - usual for seconds in resumed)}

    @property
    def mean_stall(self) -> float:
        """Mean seconds that steps waited for a save, counting copies in memory and checkpoints."""
        saves = sum(not step % COPY_EVERY or not step % EVERY for step in range(1, STEPS + 1))
        return self.lost_seconds["save"] / saves

    @property
    def newest_checkpoint(self) -> Path:
        """The checkpoint that the pointer `latest` names."""
        home = self.run / "checkpoints"
        return home / (home / "latest").read_text().strip()

    def read_text(self, name: str) -> str:
        """Return the text of a file of the run, such as run.log; empty if there is none."""
        path = self.run / name
        return path.read_text(errors="replace") if path.exists() else ""

    def find_first_error(self) -> str:
        """Return the first line in which the run, or else its launcher, reports the fault; empty if
        none does."""
        console = self.read_text("console.txt").splitlines()
        reports = [line for line in console if line.startswith("error: ")]
        reports += [line for line in console if "exitcode" in line and "failed" in line]
        return reports[0] if reports else ""

    def find_in_log(self, words: str) -> str:
        """Return the first line of the run log that contains `words`; empty if none does."""
        matches = (line for line in self.read_text("run.log").splitlines() if words in line)
        return next(matches, "")


def _complete_lines(path: Path) -> Iterator[dict[str, Any]]:
    if path.exists():
        for line in path.read_text().splitlines(keepends=True):
            if line.endswith("\n"):
                yield json.loads(line)


def wait_or_kill(process: Process) -> None:
    """Wait for a process to end, and kill it with its ranks if it does not."""
    try:
        process.wait(LIMIT)
    except subprocess.TimeoutExpired:
        kill_all(process)


def kill_all(process: Process) -> None:
    """Kill a launcher and its ranks at once, as a power failure would."""
    for pid in [process.pid, *find_ranks(process.pid).values()]:
        with suppress(ProcessLookupError):
            os.kill(pid, 9)
    process.wait()


def wait_for(condition: Callable[[], bool], process: Process, pause: float = 0.02) -> float:
    """Wait until `condition()` is true, the process has ended, or `LIMIT` has passed; return the
    time (`time.monotonic`).

    Args:
        condition: What is waited for.
        process: The process that should bring it about.
        pause: Seconds between two looks.
    """
    deadline = time.monotonic() + LIMIT
    while process.poll() is None and time.monotonic() < deadline and not condition():
        time.sleep(pause)
    return time.monotonic()


def find_ranks(launcher: int) -> dict[int, int]:
    """Return the process id of each rank that a launcher has started."""
    processes = {}
    for path in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((path / "stat").read_text().rpartition(")")[2].split()[1])
            variables = (path / "environ").read_bytes().split(b"\0")
        except (OSError, ValueError):
            continue
        ranks = [text[5:] for text in variables if text.startswith(b"RANK=")]
        if parent == launcher and ranks:
            processes[int(ranks[0])] = int(path.name)
    return processes


def time_import() -> float:
    """Return the seconds that a process takes to import torch."""
    start = time.monotonic()
    subprocess.run([sys.executable, "-c", "import torch"], check=True)
    return time.monotonic() - start


def write_corpus(prefix: Path) -> None:
    """Write a token file of documents with a pattern that a model can learn."""
    draw = np.random.default_rng(0)
    with IndexedDatasetWriter(str(prefix), np.dtype(np.uint16)) as writer:
        for _ in range(200):
            start, step = draw.integers(0, 60, 2)
            words = (start + step * np.arange(int(draw.integers(30, 200)))) % 60
            writer.append(np.append(words, 60).astype(np.uint16))
