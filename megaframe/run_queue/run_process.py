"""The process of one run on this machine: its command, what it prints, and its metrics so far."""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from megaframe.config import RunConfig
from megaframe.dashboard.metrics_file import MetricsFile
from megaframe.dashboard.summary import SMOOTHED
from megaframe.errors import UserError, explain_failed_write
from megaframe.extensions import load_with_extensions
from megaframe.io.regular_file import make_folder, open_fresh
from megaframe.io.run_files import METRICS_FILE

ENTRY = str(Path(__file__).resolve().parents[2] / "pretrain_gpt.py")
CONSOLE = "console.txt"
"""File in a run's folder with what it prints."""
_TAIL = 2000


class RunProcess:
    """A run that this program starts.

    Args:
        folder: Of the run; it is made.
        command: What runs it.
    """

    def __init__(self, folder: Path, command: Sequence[str]) -> None:
        with explain_failed_write(folder):
            folder.parent.mkdir(parents=True, exist_ok=True)
            make_folder(folder)
        self.folder = folder
        self._command = command
        self._metrics, self._last_step = MetricsFile(folder / METRICS_FILE), 0

    def start(self, **options: Any) -> subprocess.Popen[bytes]:
        """Start it, with what it prints in a file of its folder. It is asked to leave when this
        program ends.

        Args:
            options: Of `subprocess.Popen`.
        """
        path = self.folder / CONSOLE
        with explain_failed_write(path):
            console = open_fresh(path, inside=self.folder.parent)
        command = [*make_parent_death_prefix("TERM"), *self._command]
        with console:
            return subprocess.Popen(command, stdout=console, stderr=console, **options)

    def read_metric(self, metric: str) -> list[tuple[int, float]]:
        """Return (step, metric) for the steps that were written since the last call."""
        self._metrics.read()
        values = list(read_values_after(self._metrics, metric, self._last_step))
        if values:
            self._last_step = values[-1][0]
        return values

    def describe_failure(self, status: int) -> str:
        """Return why the run failed, in one line.

        Args:
            status: Its exit status.
        """
        tail = (self.folder / CONSOLE).read_bytes()[-_TAIL:].decode(errors="replace")
        lines = [line for line in tail.splitlines() if line.strip()] or ["nothing was printed"]
        mistakes = [line for line in lines if line.startswith("error: ")]
        return f"status {status}: {(mistakes or lines[-1:])[0]}"


def read_values_after(
    metrics: MetricsFile, metric: str, last_step: int
) -> Iterator[tuple[int, float]]:
    """Yield (step, metric) for the steps after `last_step` that have the metric. A training metric
    is averaged over the last `SMOOTHED` steps.

    Args:
        metrics: The metrics of a trial.
        metric: Name of a metric.
        last_step: The step before the first one that is read.
    """
    values, steps = metrics.get_column(metric), metrics.get_column("step")
    for index in np.flatnonzero(np.isfinite(values) & (steps > last_step)):
        first = index if metric.startswith("eval") else max(0, index - SMOOTHED + 1)
        yield int(steps[index]), float(np.nanmean(values[first : index + 1]))


def parse_run(words: Sequence[str]) -> tuple[RunConfig, list[str]]:
    """Return the config of a command line of `pretrain_gpt.py`, and that line with an absolute path
    of the config file.

    Raises:
        UserError: There is a mistake in the config.
    """
    parser = argparse.ArgumentParser(prog="pretrain_gpt.py", add_help=False)
    parser.add_argument("--config")
    parser.add_argument("overrides", nargs="*")
    arguments = parser.parse_args([word for word in words if word != "--"])
    named = Path(arguments.config).absolute() if arguments.config else None
    file = str(named) if named is not None and named.exists() else arguments.config
    options = ["--config", file] if file else []
    return load_with_extensions(file, arguments.overrides), [*options, *arguments.overrides]


def parse_ranks(text: str) -> tuple[int, int]:
    """Parse N or MIN:MAX into the fewest and the most ranks.

    Raises:
        UserError: For anything else.
    """
    try:
        least, most = (int(part) for part in (text.split(":") * 2)[:2])
    except ValueError:
        least = most = 0
    if not 1 <= least <= most:
        raise UserError(f"ranks {text} is neither a number nor two, such as 8:16")
    return least, most


def build_run_command(words: Sequence[str], ranks: int, node: Path) -> list[str]:
    """Return the command that runs a run on this machine, with the variables of
    `make_rank_variables`.

    Args:
        words: Its command line.
        ranks: Number of ranks.
        node: tools/launch/node.py, which starts several.
    """
    program = [str(node), "--launch-only"] if ranks > 1 else [ENTRY]
    return [sys.executable, *program, *words]


def make_rank_variables(ranks: int) -> dict[str, str]:
    """Return the variables that say to `node.py` how many ranks it starts, each of them once."""
    counts = {"PET_NNODES": 1, "PET_NPROC_PER_NODE": ranks, "PET_MAX_RESTARTS": 0}
    return {name: str(count) for name, count in counts.items()}


def make_parent_death_prefix(signal: str) -> list[str]:
    """Return the prefix of a command line with which a process gets a signal when this one ends;
    empty if the system has no `setpriv`."""
    return ["setpriv", "--pdeathsig", signal] if shutil.which("setpriv") else []
