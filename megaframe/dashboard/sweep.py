"""A sweep over config keys: what its trials (`trials.py`) run, and their results as a table and a
page."""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megaframe.config import RunConfig
from megaframe.dashboard.metrics_file import MetricsFile
from megaframe.dashboard.summary import SMOOTHED
from megaframe.dashboard.trials import Space, parse_space
from megaframe.errors import UserError, explain_failed_write
from megaframe.extensions import load_with_extensions
from megaframe.io.regular_file import make_folder, open_fresh, write_file
from megaframe.io.run_files import METRICS_FILE

ENTRY = str(Path(__file__).resolve().parents[2] / "pretrain_gpt.py")
SUMMARY = "sweep.json"
CONSOLE = "console.txt"
"""File in a trial's folder with what its run prints."""
_TAIL = 2000

Result = dict[str, Any]
"""Of a trial: its `keys`, last `step`, metric under its name, `folder`, and `error` or None."""


@dataclass(frozen=True)
class Sweep:
    """A run, what a sweep varies in it, and what its trials are compared by.

    Attributes:
        config, words: Of the run that is varied, and its command line.
        metric: Lower is better.
    """

    config: RunConfig
    words: tuple[str, ...]
    space: Space
    metric: str

    @staticmethod
    def parse(words: Sequence[str], space: Sequence[str], metric: str | None) -> Sweep:
        """Return the sweep that a command line asks for.

        Args:
            words: Command line of the run.
            space: KEY=[A, B], KEY=uniform:LOW:HIGH or KEY=log:LOW:HIGH.
            metric: What the user has named; None for `eval_loss`, or `loss` without evaluations.

        Raises:
            UserError: For mistakes in any of them, and a metric that the run does not have.
        """
        config, line = parse_run(words)
        ranges = parse_space(space)
        metric = metric or ("eval_loss" if config.train.eval_every else "loss")
        if metric.startswith("eval") and not config.train.eval_every:
            raise UserError(f"--metric {metric}: with train.eval_every=0 there is none; use loss")
        return Sweep(config, tuple(line), ranges, metric)

    @property
    def folder(self) -> Path:
        """Where the folders of the trials are."""
        return Path(self.config.run.dir).absolute()

    def check(self, trials: Iterable[Mapping[str, str]]) -> None:
        """Raise `UserError` if the values of a trial are not a valid config."""
        for keys in trials:
            parse_run([*self.words, *(f"{key}={value}" for key, value in keys.items())])

    def write_results(self, results: Sequence[Result]) -> Path:
        """Write the results into the sweep's folder, and return the file."""
        path = self.folder / SUMMARY
        with explain_failed_write(path):
            write_file(path, json.dumps(results, indent=2) + "\n", inside=self.folder)
        return path


class TrialRun:
    """The run of a trial, in a folder of its own.

    Args:
        folder: Of the trial; it is made.
        words: Command line of the run.
        keys: Values of the trial.
        ranks: Number of ranks.
    """

    def __init__(
        self, folder: Path, words: Sequence[str], keys: Mapping[str, Any], ranks: int
    ) -> None:
        with explain_failed_write(folder):
            folder.parent.mkdir(parents=True, exist_ok=True)
            make_folder(folder)
        self.folder = folder
        self._command = build_trial_command(words, keys, folder, ranks)
        self._metrics, self._last_step = MetricsFile(folder / METRICS_FILE), 0

    def start(self, **options: Any) -> subprocess.Popen[bytes]:
        """Start it, with what it prints in a file of its folder.

        Args:
            options: Of `subprocess.Popen`.
        """
        path = self.folder / CONSOLE
        with explain_failed_write(path):
            console = open_fresh(path, inside=self.folder.parent)
        with console:
            return subprocess.Popen(self._command, stdout=console, stderr=console, **options)

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


def build_trial_command(
    words: Sequence[str], keys: Mapping[str, Any], run: Path, ranks: int
) -> list[str]:
    """Return the command that runs a trial, and is asked to leave when its parent ends.

    Args:
        words: Command line of the run.
        keys: Values of the trial's keys, which override those of the run.
        run: Folder of the trial.
        ranks: Processes of the trial.
    """
    prefix = ["setpriv", "--pdeathsig", "TERM"] if shutil.which("setpriv") else []
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    overrides = [*(f"{key}={value}" for key, value in keys.items()), f"run.dir={run}"]
    return [
        *(*prefix, sys.executable, *(launcher if ranks > 1 else []), ENTRY),
        *(*words, *overrides),
    ]


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


def summarize(results: Sequence[Result], space: Space, metric: str) -> tuple[str, int]:
    """Return the trials as a table, best first, of the keys in which they differ, with those of the
    best one; and how many failed.

    Args:
        results: Results of the trials.
        space: What was swept over.
        metric: Name of the metric by which they are ordered.
    """
    finished = rank_results(results, metric)
    values_by_key = {key: {str(result["keys"].get(key)) for result in results} for key in space}
    keys = [key for key in space if len(values_by_key[key]) > 1] or list(space)
    rows = [["step", metric, *keys, "folder"]]
    for result in finished:
        numbers = str(result["step"]), f"{result[metric]:.4f}"
        values = (format_value(result["keys"][key]) for key in keys)
        rows.append([*numbers, *values, Path(result["folder"]).name])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        for row in rows
    ]
    for result in results:
        if result not in finished:
            tried = " ".join(f"{key}={format_value(result['keys'].get(key))}" for key in keys)
            lines.append(f"failed: {tried}: {result['error'] or 'no step was done'}")
    if finished:
        best = " ".join(f"{key}={format_value(finished[0]['keys'][key])}" for key in keys)
        lines.append(f"best: {best} ({finished[0]['folder']})")
    return "\n".join(lines), len(results) - len(finished)


def rank_results(results: Sequence[Result], metric: str) -> list[Result]:
    """Return the trials that have not failed, the best first. Those that were stopped early have
    trained less, so those with most steps come first."""
    finished = [
        result for result in results if result["error"] is None and result[metric] is not None
    ]
    return sorted(finished, key=lambda result: (-result["step"], result[metric]))


def format_value(value: Any) -> str:
    """Return a value of a trial's key as text."""
    return f"{value:.4g}" if isinstance(value, float) else str(value)
