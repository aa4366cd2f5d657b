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
import sys
import time
from collections.abc import Iterator, Mapping
from itertools import product
from pathlib import Path
from typing import Any

from ray_train import check_resources, connect

from megaframe.dashboard.sweep import Sweep, TrialRun, format_value, parse_run, summarize
from megaframe.dashboard.trials import Range, Trial
from megaframe.errors import report_errors
from megaframe.io.closed_output import allow_closed_output
from megaframe.io.regular_file import make_folder

_PAUSE = 0.5


def main() -> None:
    """Run the sweep, and write and print its summary; exit with status 1 if all trials failed."""
    arguments = parse_arguments()
    with report_errors():
        sweep = Sweep.parse(arguments.run, arguments.sweep, arguments.metric)
        sweep.check(list_extreme_trials(sweep))
        connect(arguments.address)
        resource = "GPU" if arguments.gpus else "CPU"
        check_resources((1, 1), {resource: float(arguments.ranks)})
        results = run_trials(sweep, arguments)
        text, failures = summarize(results, sweep.space, sweep.metric)
        print(text)
        print(f"wrote {sweep.write_results(results)}")
    sys.exit(int(failures == len(results)))


def list_extreme_trials(sweep: Sweep) -> Iterator[dict[str, str]]:
    """Yield every combination of values, where a range has its two ends."""
    values = [
        list(map(str, choices if isinstance(choices, list) else (choices.low, choices.high)))
        for choices in sweep.space.values()
    ]
    for combination in product(*values):
        yield dict(zip(sweep.space, combination, strict=True))


def count_most_steps(sweep: Sweep) -> int:
    """Return the steps of the longest trial."""
    from megaframe.training.run_length import decide_steps

    trials = ([f"{key}={value}" for key, value in t.items()] for t in list_extreme_trials(sweep))
    configs = (parse_run([*sweep.words, *keys])[0] for keys in trials)
    return max(decide_steps(config, data=False)[0].train.steps for config in configs)


def run_trials(sweep: Sweep, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Run all trials, and return for each its keys, last step, metric, folder and error."""
    from ray import tune
    from ray.tune.schedulers import ASHAScheduler

    folder, metric = sweep.folder, sweep.metric
    make_folder(folder, inside=folder.parent)
    steps = count_most_steps(sweep)
    halving = ASHAScheduler(
        time_attr="step",
        max_t=steps,
        grace_period=min(steps, arguments.grace or max(1, steps // 8)),
        reduction_factor=2,
    )
    resources = {"CPU": float(arguments.ranks)}
    if arguments.gpus:
        resources["GPU"] = float(arguments.ranks)
    trainable = tune.with_resources(
        tune.with_parameters(
            run_trial,
            words=list(sweep.words),
            folder=str(folder),
            working_folder=str(Path.cwd()),
            ranks=arguments.ranks,
            metric=metric,
        ),
        tune.PlacementGroupFactory([resources]),
    )
    tuner = tune.Tuner(
        trainable,
        param_space={key: to_ray(values) for key, values in sweep.space.items()},
        tune_config=tune.TuneConfig(
            metric=metric,
            mode="min",
            num_samples=arguments.trials,
            scheduler=None if arguments.whole else halving,
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


def to_ray(values: Range | list[str]) -> Any:
    """Return a range or list in the form that Ray Tune takes."""
    from ray import tune

    if isinstance(values, list):
        return tune.grid_search(values)
    return (tune.loguniform if values.log else tune.uniform)(values.low, values.high)


def run_trial(
    keys: Mapping[str, Any],
    *,
    words: list[str],
    folder: str,
    working_folder: str,
    ranks: int,
    metric: str,
) -> None:
    """Run one trial, and report its metric to Ray Tune as it appears. If Ray Tune stops the trial,
    this process ends, upon which the run gets SIGTERM.

    Args:
        keys: Values of this trial.
        words: Command line of the run.
        folder: Of the sweep.
        working_folder: Of the run.
        ranks: Number of ranks of the run.
        metric: To report.

    Raises:
        RuntimeError: If the run fails.
    """
    from ray import tune

    named = Trial({key: format_value(value) for key, value in keys.items()}).name
    # Ray may try the same values twice, and tells such trials apart by their numbers.
    trial_folder = Path(folder) / f"{named}-{tune.get_context().get_trial_id()}"
    run = TrialRun(trial_folder, words, keys, ranks)
    process, ended = run.start(cwd=working_folder), False
    while not ended:
        ended = process.poll() is not None  # read once more after the end, for the last lines
        for step, value in run.read_metric(metric):
            tune.report({"step": step, metric: value, "folder": str(trial_folder)})
        time.sleep(0 if ended else _PAUSE)
    if process.returncode:
        raise RuntimeError(run.describe_failure(process.returncode))


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
    with allow_closed_output():
        main()
