"""Run a sweep over config keys on a Ray cluster, with Ray Tune.

python tools/launch/ray_tune.py --sweep 'optim.lr=[1e-3, 3e-3]' \\
    --sweep optim.beta2=uniform:0.9:0.999 --trials 4 --ranks 2 -- --config RUN.yaml

Every combination of the lists' values is tried --trials times, each time with new random numbers
for the keys that have a range. A trial is a run with --ranks ranks on one node, in its own folder
in `run.dir`. As many trials run at the same time as the cluster has room for. Trials that are
behind others at the same step are stopped early (asynchronous successive halving, Li et al. 2020,
arXiv:1810.05934). Needs the extra `ray`.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from ray_train import ENTRY, check_room, connect, dying_with_this, run_of

from megaframe.config import RunConfig, load
from megaframe.dashboard.metrics import Metrics
from megaframe.errors import UserError, reported

SUMMARY = "sweep.json"
SMOOTHED = 10
"""Steps over which a training metric is averaged; evaluation metrics are not averaged."""
_RANGE = re.compile(r"(uniform|log):([^:]+):([^:]+)")
_PAUSE = 0.5
_TAIL = 2000


@dataclass(frozen=True)
class Range:
    """A range of numbers to draw from, uniformly, or uniformly in the logarithm."""

    low: float
    high: float
    log: bool


Space = Mapping[str, "Range | list[str]"]
"""What is tried for each key: a range, or a list of values in the format of a command line."""


def main() -> None:
    """Run the sweep, and write and print its summary; exit with status 1 if all trials failed."""
    arguments = parse_arguments()
    with reported():
        config, words = run_of(arguments.run)
        space = space_of(arguments.sweep)
        check_space(space, words)
        metric = arguments.metric or ("eval_loss" if config.train.eval_every else "loss")
        if metric.startswith("eval") and not config.train.eval_every:
            raise UserError(f"--metric {metric}: with train.eval_every=0 there is none; use loss")
        connect(arguments.address)
        what = "GPU" if arguments.gpus else "CPU"
        check_room((1, 1), {what: float(arguments.ranks)})
        found = sweep(config, words, space, metric, arguments)
        text, failed = summary(found, space, metric)
        print(text)
        path = Path(config.run.dir) / SUMMARY
        path.write_text(json.dumps(found, indent=2) + "\n")
        print(f"wrote {path}")
    sys.exit(int(failed == len(found)))


def space_of(texts: Sequence[str]) -> Space:
    """Parse KEY=[A, B], KEY=uniform:LOW:HIGH and KEY=log:LOW:HIGH into what is swept over. Raises
    `UserError` for other forms, for a repeated key, and if there is nothing to sweep over."""
    found: dict[str, Range | list[str]] = {}
    for text in texts:
        key, _, asked = text.partition("=")
        drawn = _RANGE.fullmatch(asked)
        if key in found:
            raise UserError(f"--sweep {key} is given twice; put all values into one list")
        found[key] = range_of(text, drawn) if drawn else values_of(text, asked)
    if not found:
        raise UserError(
            "there is nothing to sweep over; give --sweep 'optim.lr=[1e-3, 3e-3]', for example"
        )
    return found


def range_of(text: str, drawn: re.Match[str]) -> Range:
    """Return a range. text: for messages. drawn: match of `_RANGE`. Raises `UserError` if the range
    is empty or its bounds are not numbers."""
    try:
        low, high = float(drawn[2]), float(drawn[3])
    except ValueError:
        low = high = math.nan
    if not low < high or (drawn[1] == "log" and low <= 0):
        raise UserError(
            f"--sweep {text}: LOW and HIGH are numbers, LOW < HIGH, and above 0 for log"
        )
    return Range(low, high, drawn[1] == "log")


def values_of(text: str, asked: str) -> list[str]:
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


def check_space(space: Space, words: Sequence[str]) -> None:
    """Raise `UserError` if some combination of values (of a range, its ends) is not a valid
    config. words: command line of the run."""
    given = argparse.ArgumentParser()
    given.add_argument("--config")
    given.add_argument("overrides", nargs="*")
    run = given.parse_args(list(words))
    ends = [
        [f"{key}={value}" for value in (kept if isinstance(kept, list) else (kept.low, kept.high))]
        for key, kept in space.items()
    ]
    for overrides in product(*ends):
        load(run.config, [*run.overrides, *overrides])


def sweep(
    config: RunConfig, words: Sequence[str], space: Space, metric: str, asked: argparse.Namespace
) -> list[dict[str, Any]]:
    """Run all trials, and return for each its keys, last step, metric, folder and error."""
    from ray import tune
    from ray.tune.schedulers import ASHAScheduler

    folder = Path(config.run.dir).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    steps = config.train.steps
    halving = ASHAScheduler(
        time_attr="step",
        max_t=steps,
        grace_period=min(steps, asked.grace or max(1, steps // 8)),
        reduction_factor=2,
    )
    of_a_trial = {"CPU": float(asked.ranks), **({"GPU": float(asked.ranks)} if asked.gpus else {})}
    trainable = tune.with_resources(
        tune.with_parameters(
            run_trial,
            words=list(words),
            folder=str(folder),
            here=str(Path.cwd()),
            ranks=asked.ranks,
            metric=metric,
        ),
        tune.PlacementGroupFactory([of_a_trial]),
    )
    tuner = tune.Tuner(
        trainable,
        param_space={key: drawn_from(kept) for key, kept in space.items()},
        tune_config=tune.TuneConfig(
            metric=metric,
            mode="min",
            num_samples=asked.trials,
            scheduler=None if asked.whole else halving,
            trial_dirname_creator=lambda trial: f"trial-{trial.trial_id}",
        ),
        run_config=tune.RunConfig(name="ray", storage_path=str(folder), verbose=1),
    )
    return [
        {
            "keys": dict(result.config or {}),
            "step": (result.metrics or {}).get("step"),
            metric: (result.metrics or {}).get(metric),
            "folder": (result.metrics or {}).get("folder"),
            "error": None if result.error is None else str(result.error).strip().splitlines()[-1],
        }
        for result in tuner.fit()
    ]


def drawn_from(kept: Range | list[str]) -> Any:
    """Return a range or list in the form that Ray Tune takes."""
    from ray import tune

    if isinstance(kept, list):
        return tune.grid_search(kept)
    return (tune.loguniform if kept.log else tune.uniform)(kept.low, kept.high)


def run_trial(
    keys: Mapping[str, Any], *, words: list[str], folder: str, here: str, ranks: int, metric: str
) -> None:
    """Run one trial, and report its metric to Ray Tune as it appears. If Ray Tune stops the trial,
    this process ends, upon which the run gets SIGTERM. Raises `RuntimeError` if the run fails.

    keys: values of this trial. words: command line of the run. folder: of the sweep. here: working
    folder of the run.
    """
    from ray import tune

    run = Path(folder) / f"trial-{tune.get_context().get_trial_id()}"
    run.mkdir(parents=True, exist_ok=True)
    overrides = [*(f"{key}={value}" for key, value in keys.items()), f"run.dir={run}"]
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    prefix = [word if word != "KILL" else "TERM" for word in dying_with_this()]
    command = [*prefix, sys.executable, *(launcher if ranks > 1 else []), ENTRY, *words, *overrides]
    with open(run / "console.txt", "wb") as console:
        process = subprocess.Popen(command, cwd=here, stdout=console, stderr=console)
    metrics, told, ended = Metrics(run / "metrics.jsonl"), 0, False
    while not ended:
        ended = process.poll() is not None  # read once more after the end, for the last lines
        metrics.read()
        for step, value in values_after(metrics, metric, told):
            told = step
            tune.report({"step": step, metric: value, "folder": str(run)})
        time.sleep(0 if ended else _PAUSE)
    if process.returncode:
        tail = (run / "console.txt").read_bytes()[-_TAIL:].decode(errors="replace")
        said = [line for line in tail.splitlines() if line.startswith("error: ")]
        raise RuntimeError(f"status {process.returncode}: {said[0] if said else tail}")


def values_after(metrics: Metrics, metric: str, told: int) -> Iterator[tuple[int, float]]:
    """Yield (step, metric) for the steps after `told` that have the metric. A training metric is
    averaged over the last `SMOOTHED` steps."""
    values, steps = metrics.column(metric), metrics.column("step")
    for place in np.flatnonzero(np.isfinite(values) & (steps > told)):
        first = place if metric.startswith("eval") else max(0, place - SMOOTHED + 1)
        yield int(steps[place]), float(np.nanmean(values[first : place + 1]))


def summary(found: Sequence[Mapping[str, Any]], space: Space, metric: str) -> tuple[str, int]:
    """Return the trials as a table, best first, with the keys of the best one; and how many
    failed."""
    good = [one for one in found if one["error"] is None and one[metric] is not None]
    # Trials that were stopped early have trained less, so those with most steps come first.
    good.sort(key=lambda one: (-one["step"], one[metric]))
    lines = ["  ".join(f"{head:>14}" for head in ("step", metric, *space))]
    for one in good:
        cells = (one["step"], f"{one[metric]:.4f}", *(shown(one["keys"][key]) for key in space))
        lines.append("  ".join(f"{cell:>14}" for cell in cells))
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


def parse_arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sweep", action="append", default=[], metavar="KEY=...")
    parser.add_argument("--trials", type=int, default=1, help="of each combination of lists")
    parser.add_argument("--ranks", type=int, default=1, help="of a trial, on one node")
    parser.add_argument("--gpus", action="store_true", help="a GPU for each rank, else a CPU")
    parser.add_argument("--metric", help="default: eval_loss, or loss without evaluation")
    parser.add_argument("--grace", type=int, help="steps that every trial gets; default: an eighth")
    parser.add_argument("--whole", action="store_true", help="stop no trial early")
    parser.add_argument("--address", default="auto", help="of the cluster; local makes one here")
    parser.add_argument("run", nargs="*", metavar="-- ...", help="as of pretrain_gpt.py")
    return parser.parse_args()


if __name__ == "__main__":
    main()
