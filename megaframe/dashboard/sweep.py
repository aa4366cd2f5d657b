"""A sweep over config keys: which values it tries, what a trial runs, and its results as a table
and a page.

Nothing is kept of what has been tried: the values that a trial draws, and the name of its folder,
are functions of what is swept over. So the same sweep finds its own trials again, and a larger one
those of a smaller one.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import random
import re
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from megaframe.config import RunConfig, load
from megaframe.dashboard.metrics_file import Metrics
from megaframe.errors import UserError

ENTRY = str(Path(__file__).resolve().parent.parent / "pretrain_gpt.py")
SUMMARY = "sweep.json"
CONSOLE = "console.txt"
"""File in a trial's folder with what its run prints."""
SMOOTHED = 10
"""Steps over which a training metric is averaged; evaluation metrics are not averaged."""
_RANGE = re.compile(r"(uniform|log):([^:]+):([^:]+)")
_TAIL = 2000
_WIDE = 10.0
"""Ratio of the largest to the smallest of some values from which on their axis is logarithmic."""


@dataclass(frozen=True)
class Range:
    """A range of numbers to draw from, uniformly, or uniformly in the logarithm."""

    low: float
    high: float
    log: bool

    def draw(self, name: str) -> float:
        """Return a number in the range, which `name` determines."""
        low, high = (math.log(self.low), math.log(self.high)) if self.log else (self.low, self.high)
        value = random.Random(name).uniform(low, high)
        rounded = float(f"{math.exp(value) if self.log else value:.6g}")
        return min(max(rounded, self.low), self.high)


Space = Mapping[str, "Range | list[str]"]
"""What is tried for each key: a range, or a list of values in the format of a command line."""
Result = dict[str, Any]
"""Of a trial: its `keys`, last `step`, metric under its name, `folder`, and `error` or None."""


@dataclass(frozen=True)
class Trial:
    """A run of a sweep. keys: its values, in the format of a command line."""

    keys: dict[str, str]

    @property
    def name(self) -> str:
        """Name of its folder, which its values determine."""
        return "trial-" + hashlib.blake2b(str(self).encode(), digest_size=5).hexdigest()

    def __str__(self) -> str:
        return " ".join(f"{key}={value}" for key, value in sorted(self.keys.items()))


def run_of(words: Sequence[str]) -> tuple[RunConfig, list[str]]:
    """Return the config of a command line of `pretrain_gpt.py`, and that line with an absolute path
    of the config file. Raises `UserError` for a mistake in the config."""
    parser = argparse.ArgumentParser(prog="pretrain_gpt.py", add_help=False)
    parser.add_argument("--config")
    parser.add_argument("overrides", nargs="*")
    given = parser.parse_args([word for word in words if word != "--"])
    named = Path(given.config).absolute() if given.config else None
    file = str(named) if named is not None and named.exists() else given.config
    return load(file, given.overrides), [*(["--config", file] if file else []), *given.overrides]


def space_of(texts: Sequence[str]) -> Space:
    """Parse KEY=[A, B], KEY=uniform:LOW:HIGH and KEY=log:LOW:HIGH into what is swept over. Raises
    `UserError` for other forms, for a repeated key, and if there is nothing to sweep over."""
    found: dict[str, Range | list[str]] = {}
    for text in texts:
        key, _, asked = text.partition("=")
        drawn = _RANGE.fullmatch(asked)
        if key in found:
            raise UserError(f"--sweep {key} is given twice; put all values into one list")
        if key in ("run.dir", "checkpoint.folder"):
            raise UserError(
                f"--sweep {key}: every trial has its own folder in run.dir; leave it out"
            )
        found[key] = _range_of(text, drawn) if drawn else _values_of(text, asked)
    if not found:
        raise UserError(
            "there is nothing to sweep over; give --sweep 'optim.lr=[1e-3, 3e-3]', for example"
        )
    return found


def _range_of(text: str, drawn: re.Match[str]) -> Range:
    """Return a range. text: for messages. drawn: match of `_RANGE`. Raises `UserError` if the range
    is empty or its bounds are not numbers."""
    try:
        low, high = float(drawn[2]), float(drawn[3])
    except ValueError:
        low = high = math.nan
    if not -math.inf < low < high < math.inf or (drawn[1] == "log" and low <= 0):
        raise UserError(
            f"--sweep {text}: LOW and HIGH are numbers, LOW < HIGH, and above 0 for log"
        )
    return Range(low, high, drawn[1] == "log")


def _values_of(text: str, asked: str) -> list[str]:
    """Return the values of a list, each in the format of a command line. Raises `UserError` if it
    is not a list, or is empty."""
    try:
        values = yaml.safe_load(asked)
    except yaml.YAMLError:
        values = None
    if not isinstance(values, list) or not values:
        raise UserError(
            f"--sweep {text} is not KEY=[A, B], KEY=uniform:LOW:HIGH or KEY=log:LOW:HIGH"
        )
    return [json.dumps(value) if not isinstance(value, str) else value for value in values]


def trials_of(space: Space, times: int, seed: int) -> list[Trial]:
    """Return every combination of the lists' values, `times` times, each time with new numbers from
    the ranges. Raises `UserError` if that would repeat trials."""
    if times < 1:
        raise UserError(f"--trials {times} is too few; use 1 or more")
    ranges = {key: kept for key, kept in space.items() if isinstance(kept, Range)}
    lists = {key: kept for key, kept in space.items() if not isinstance(kept, Range)}
    if times > 1 and not ranges:
        raise UserError(
            f"--trials {times} would repeat the same runs, because no key has a range; sweep over "
            f"run.seed={list(range(times))} instead"
        )
    found = {}
    for number, values in product(range(times), product(*lists.values())):
        keys = dict(zip(lists, values, strict=True))
        name = f"{seed} {number} {Trial(keys)}"
        drawn = {key: f"{kept.draw(f'{name} {key}')}" for key, kept in ranges.items()}
        trial = Trial({key: {**keys, **drawn}[key] for key in space})
        found[trial.name] = trial
    return list(found.values())


def check_trials(trials: Sequence[Mapping[str, str]], words: Sequence[str]) -> None:
    """Raise `UserError` if the values of a trial are not a valid config. words: command line of the
    run."""
    for keys in trials:
        run_of([*words, *(f"{key}={value}" for key, value in keys.items())])


def metric_of(config: RunConfig, asked: str | None) -> str:
    """Return the metric that trials are compared by, lower being better. asked: what the user has
    named. Raises `UserError` if the run does not have it."""
    metric = asked or ("eval_loss" if config.train.eval_every else "loss")
    if metric.startswith("eval") and not config.train.eval_every:
        raise UserError(f"--metric {metric}: with train.eval_every=0 there is none; use loss")
    return metric


def trial_command(
    words: Sequence[str], keys: Mapping[str, Any], run: Path, ranks: int
) -> list[str]:
    """Return the command that runs a trial, and is asked to leave when its parent ends.

    words: command line of the run. run: folder of the trial.
    """
    prefix = ["setpriv", "--pdeathsig", "TERM"] if shutil.which("setpriv") else []
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    overrides = [*(f"{key}={value}" for key, value in keys.items()), f"run.dir={run}"]
    return [
        *(*prefix, sys.executable, *(launcher if ranks > 1 else []), ENTRY),
        *(*words, *overrides),
    ]


def failure(run: Path, status: int) -> str:
    """Return why the run of a trial failed, in one line."""
    tail = (run / CONSOLE).read_bytes()[-_TAIL:].decode(errors="replace")
    said = [line for line in tail.splitlines() if line.strip()] or ["nothing was printed"]
    mistakes = [line for line in said if line.startswith("error: ")]
    return f"status {status}: {(mistakes or said[-1:])[0]}"


def values_after(metrics: Metrics, metric: str, told: int) -> Iterator[tuple[int, float]]:
    """Yield (step, metric) for the steps after `told` that have the metric. A training metric is
    averaged over the last `SMOOTHED` steps."""
    values, steps = metrics.column(metric), metrics.column("step")
    for place in np.flatnonzero(np.isfinite(values) & (steps > told)):
        first = place if metric.startswith("eval") else max(0, place - SMOOTHED + 1)
        yield int(steps[place]), float(np.nanmean(values[first : place + 1]))


def summary(found: Sequence[Result], space: Space, metric: str) -> tuple[str, int]:
    """Return the trials as a table, best first, with the keys of the best one; and how many
    failed."""
    good = [one for one in found if one["error"] is None and one[metric] is not None]
    # Trials that were stopped early have trained less, so those with most steps come first.
    good.sort(key=lambda one: (-one["step"], one[metric]))
    rows = [["step", metric, *space, "folder"]]
    for one in good:
        values = (shown(one["keys"][key]) for key in space)
        rows.append([str(one["step"]), f"{one[metric]:.4f}", *values, Path(one["folder"]).name])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        for row in rows
    ]
    for one in found:
        if one not in good:
            keys = " ".join(f"{key}={shown(one['keys'].get(key))}" for key in space)
            lines.append(f"failed: {keys}: {one['error'] or 'no step was done'}")
    if good:
        best = " ".join(f"{key}={shown(good[0]['keys'][key])}" for key in space)
        lines.append(f"best: {best} ({good[0]['folder']})")
    return "\n".join(lines), len(found) - len(good)


def shown(value: Any) -> str:
    """Return a value as text."""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def write_page(path: Path, found: Sequence[Result], space: Space, metric: str) -> None:
    """Write a page with the metric over the values of each key, which needs no network. Raises
    `UserError` if plotly is not installed."""
    try:
        from plotly.subplots import make_subplots
    except ImportError:
        raise UserError(
            f"{path} needs plotly, which is not installed; pip install 'megaframe[plan]'"
        ) from None
    good = [one for one in found if one["error"] is None and one[metric] is not None]
    figure = make_subplots(1, len(space), shared_yaxes=True)
    for column, key in enumerate(space, 1):
        values = [_number(one["keys"][key]) for one in good]
        numbers = [value for value in values if isinstance(value, float)]
        wide = len(numbers) == len(values) > 0 and 0 < _WIDE * min(numbers) <= max(numbers)
        kind = "category" if len(numbers) < len(values) else "log" if wide else "linear"
        figure.add_scatter(
            x=values,
            y=[one[metric] for one in good],
            mode="markers",
            text=[f"{Trial(one['keys'])}<br>{Path(one['folder']).name}" for one in good],
            showlegend=False,
            row=1,
            col=column,
        )
        figure.update_xaxes(title_text=key, type=kind, row=1, col=column)
    figure.update_yaxes(title_text=metric, row=1, col=1)
    figure.update_layout(template="plotly_white", title=f"{len(good)} trials")
    figure.write_html(path)


def _number(value: Any) -> float | str:
    """Return a value of a command line as a number, if it is one."""
    try:
        return float(value)
    except (TypeError, ValueError):
        return str(value)
