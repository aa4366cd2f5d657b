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
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

from ray_train import check_room, connect

from megaframe.config import RunConfig
from megaframe.dashboard.metrics_file import Metrics
from megaframe.dashboard.sweep import (
    CONSOLE,
    SUMMARY,
    Range,
    Space,
    check_trials,
    failure,
    metric_of,
    run_of,
    space_of,
    summary,
    trial_command,
    values_after,
)
from megaframe.errors import report_errors
from megaframe.io.run_files import METRICS_FILE

_PAUSE = 0.5


def main() -> None:
    """Run the sweep, and write and print its summary; exit with status 1 if all trials failed."""
    arguments = parse_arguments()
    with report_errors():
        config, words = run_of(arguments.run)
        space = space_of(arguments.sweep)
        check_space(space, words)
        metric = metric_of(config, arguments.metric)
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


def check_space(space: Space, words: Sequence[str]) -> None:
    """Raise `UserError` if some combination of values (of a range, its ends) is not a valid
    config. words: command line of the run."""
    ends = [
        [str(value) for value in (kept if isinstance(kept, list) else (kept.low, kept.high))]
        for kept in space.values()
    ]
    check_trials([dict(zip(space, values, strict=True)) for values in product(*ends)], words)


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
    command = trial_command(words, keys, run, ranks)
    with open(run / CONSOLE, "wb") as console:
        process = subprocess.Popen(command, cwd=here, stdout=console, stderr=console)
    metrics, told, ended = Metrics(run / METRICS_FILE), 0, False
    while not ended:
        ended = process.poll() is not None  # read once more after the end, for the last lines
        metrics.read()
        for step, value in values_after(metrics, metric, told):
            told = step
            tune.report({"step": step, metric: value, "folder": str(run)})
        time.sleep(0 if ended else _PAUSE)
    if process.returncode:
        raise RuntimeError(failure(run, process.returncode))


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
