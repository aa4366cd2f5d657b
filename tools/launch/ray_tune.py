"""A sweep over keys of a config on a Ray cluster, with Ray Tune.

python tools/launch/ray_tune.py --sweep 'optim.lr=[1e-3, 3e-3]' \\
    --sweep optim.beta2=uniform:0.9:0.999 --trials 4 --ranks 2 -- --config RUN.yaml

Every value of a list is tried with every one of the other lists, and that --trials times with new
numbers for the keys that have a range. A trial is a run of its own, of so many ranks on one node,
in a folder of `run.dir`, and as many go on side by side as there is room for. Those that are behind
others at the same step are stopped early (asynchronous successive halving, Li et al. 2020,
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
"""Steps over which the loss of training is averaged; one of evaluation is as it is."""
_RANGE = re.compile(r"(uniform|log):([^:]+):([^:]+)")
_PAUSE = 0.5
_TAIL = 2000


@dataclass(frozen=True)
class Range:
    """Numbers that are drawn, evenly or evenly in their logarithm."""

    low: float
    high: float
    log: bool


Space = Mapping[str, "Range | list[str]"]
"""By key what is tried: a range, or values as a command line has them."""


def main() -> None:
    """The command."""
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
    """What is swept over, from KEY=[A, B], KEY=uniform:LOW:HIGH and KEY=log:LOW:HIGH. Raises
    `UserError`."""
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
    """A range. Raises `UserError` where it has no numbers in it."""
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
    """The values of a list, each as a command line has it. Raises `UserError`."""
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
    """Raise `UserError` where some trial would have a config that is none."""
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
    """Run all trials; of each its keys, its steps, its metric, its folder and its error."""
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
    """The same for Ray Tune."""
    from ray import tune

    if isinstance(kept, list):
        return tune.grid_search(kept)
    return (tune.loguniform if kept.log else tune.uniform)(kept.low, kept.high)


def run_trial(
    keys: Mapping[str, Any], *, words: list[str], folder: str, here: str, ranks: int, metric: str
) -> None:
    """One trial: a run, whose metric is told as it comes. Where it is stopped the run is asked to
    leave, for it ends with this process."""
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
        ended = process.poll() is not None  # what it wrote last is read once more
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
    """Steps after `told` that have the metric, and it; a loss of training is averaged."""
    values, steps = metrics.column(metric), metrics.column("step")
    for place in np.flatnonzero(np.isfinite(values) & (steps > told)):
        first = place if metric.startswith("eval") else max(0, place - SMOOTHED + 1)
        yield int(steps[place]), float(np.nanmean(values[first : place + 1]))


def summary(found: Sequence[Mapping[str, Any]], space: Space, metric: str) -> tuple[str, int]:
    """The trials as a table, best first, the best one's keys, and how many failed."""
    good = [one for one in found if one["error"] is None and one[metric] is not None]
    # What was stopped early has seen less; those that came farthest are compared.
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
    """A value of a key."""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def parse_arguments() -> argparse.Namespace:
    """The command line."""
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
