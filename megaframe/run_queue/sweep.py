"""A sweep over config keys: the run that is varied, and a table of what its trials came to."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megaframe.config import RunConfig
from megaframe.errors import UserError
from megaframe.run_queue.run_process import parse_run
from megaframe.run_queue.trials import Space, parse_space

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


def summarize(results: Sequence[Result], space: Collection[str], metric: str) -> tuple[str, int]:
    """Return the trials as a table, best first, of the keys in which they differ, with those of the
    best one; and how many failed.

    Args:
        results: Results of the trials.
        space: The keys that were swept over.
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
