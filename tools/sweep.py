"""Run a sweep over config keys on this machine, one trial after another or side by side.

python tools/sweep.py --sweep 'optim.lr=[1e-3, 3e-3]' --sweep optim.beta2=uniform:0.9:0.999 \\
    --trials 4 --jobs 2 -- --config RUN.yaml

Every combination of the lists' values is tried --trials times, each time with new numbers for the
keys that have a range: lists alone are a grid search, ranges alone a random search. A trial is a
run in its own folder in `run.dir`. One that fails does not stop the others. The same command again
continues a sweep that was interrupted, and tries again what has failed. On a Ray cluster,
tools/launch/ray_tune.py does the same on many machines, and stops early what lags behind.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path

from megaframe.dashboard.page import render_page, write_atomically
from megaframe.dashboard.page_data import build_page_data
from megaframe.dashboard.run_set import RunSet
from megaframe.dashboard.sweep import (
    SUMMARY,
    Result,
    Sweep,
    TrialRun,
    rank_results,
    summarize,
)
from megaframe.dashboard.trials import Trial, make_trials
from megaframe.errors import UserError, report_errors
from megaframe.io.closed_output import allow_closed_output

PAGE = "sweep.html"
_PAUSE = 0.1


def main() -> None:
    """Run the sweep, and write and print its results; exit with status 1 if all trials failed."""
    arguments = parse_arguments()
    with report_errors():
        sweep = Sweep.parse(arguments.run, arguments.sweep, arguments.metric)
        trials = make_trials(sweep.space, arguments.trials, arguments.seed)
        sweep.check(trial.keys for trial in trials)
        gpus = arguments.gpus.split(",") if arguments.gpus else ()
        results = LocalSweep(sweep, arguments.jobs, arguments.ranks, gpus).run(trials)
        text, failures = summarize(results, sweep.space, sweep.metric)
        print(text)
        print(f"wrote {sweep.folder / SUMMARY}")
        if failures < len(results):
            try:
                write_page(sweep.folder / PAGE, results, sweep.metric)
                print(f"wrote {sweep.folder / PAGE}")
            except UserError as error:
                print(f"no page: {error}")
    sys.exit(int(failures == len(results)))


def write_page(path: Path, results: Sequence[Result], metric: str) -> None:
    """Write the page of the trials, the best first.

    Args:
        path: The HTML file.
        results: The trials; those without the metric are left out.
        metric: By which they are compared.

    Raises:
        UserError: plotly is not installed, or the file cannot be written.
    """
    runs = RunSet([Path(result["folder"]) for result in rank_results(results, metric)])
    data = build_page_data(runs.runs, metric=metric, notes=runs.notes)
    write_atomically(path, render_page(data), inside=path.parent)


class LocalSweep:
    """Runs the trials of a sweep on this machine.

    Args:
        sweep: What to run.
        jobs: Trials side by side.
        ranks: Of each.
        gpus: Devices to deal out to the jobs, if any.

    Raises:
        UserError: If it cannot be run so.
    """

    def __init__(self, sweep: Sweep, jobs: int, ranks: int, gpus: Sequence[str] = ()) -> None:
        for name, number in (("jobs", jobs), ("ranks", ranks)):
            if number < 1:
                raise UserError(f"--{name} {number} is too few; use 1 or more")
        if gpus and len(gpus) < jobs * ranks:
            raise UserError(
                f"--jobs {jobs} with --ranks {ranks} need {jobs * ranks} GPUs, and --gpus "
                f"{','.join(gpus)} names {len(gpus)}"
            )
        checkpoint = sweep.config.checkpoint
        if checkpoint.folder is not None:
            raise UserError(
                f"checkpoint.folder={checkpoint.folder} would be shared by all trials; "
                "leave it out, and each saves in its own folder"
            )
        self._sweep, self._jobs, self._ranks, self._gpus = sweep, jobs, ranks, gpus
        resume = () if checkpoint.resume else ("checkpoint.resume=latest",)
        self._words = [*sweep.words, *resume]

    def run(self, trials: Sequence[Trial]) -> list[Result]:
        """Run all trials that are not done yet, and return the results of all, in their order."""
        results = self._read_finished(trials)
        print(
            f"{len(trials)} trials in {self._sweep.folder}, {len(results)} done before", flush=True
        )
        waiting = deque(trial for trial in trials if trial.name not in results)
        running: dict[int, tuple[Trial, subprocess.Popen[bytes]]] = {}
        try:
            while waiting or running:
                for slot in range(self._jobs):
                    if slot not in running and waiting:
                        trial = waiting.popleft()
                        running[slot] = trial, self._start(trial, slot)
                for slot, (trial, process) in list(running.items()):
                    if process.poll() is not None:
                        del running[slot]
                        results[trial.name] = self._make_result(trial, process.returncode)
                        self._print_result(results[trial.name], f"{len(results)} of {len(trials)}")
                        self._sweep.write_results(
                            [results[t.name] for t in trials if t.name in results]
                        )
                time.sleep(_PAUSE)
        finally:
            if running:
                print("running trials save and end; the same command continues", file=sys.stderr)
            for _, process in running.values():
                process.terminate()
            for _, process in running.values():
                process.wait()
        return [results[trial.name] for trial in trials]

    def _make_trial_run(self, trial: Trial) -> TrialRun:
        folder = self._sweep.folder / trial.name
        return TrialRun(folder, self._words, trial.keys, self._ranks)

    def _start(self, trial: Trial, slot: int) -> subprocess.Popen[bytes]:
        """Start a trial as job number `slot`, in a session of its own: Ctrl-C reaches it through
        this program only."""
        environment = dict(os.environ)
        if self._jobs > 1:
            # Otherwise each rank would start a thread for every core.
            cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
            threads = max(1, cores // (self._jobs * self._ranks))
            environment.setdefault("OMP_NUM_THREADS", str(threads))
        if self._gpus:
            devices = self._gpus[slot * self._ranks : (slot + 1) * self._ranks]
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(devices)
        return self._make_trial_run(trial).start(env=environment, start_new_session=True)

    def _make_result(self, trial: Trial, status: int) -> Result:
        """Return the result of a trial whose run has ended with this exit status."""
        run = self._make_trial_run(trial)
        values = run.read_metric(self._sweep.metric)
        step, value = values[-1] if values else (None, None)
        return {
            "keys": trial.keys,
            "step": step,
            self._sweep.metric: value,
            "folder": str(run.folder),
            "error": run.describe_failure(status) if status else None,
            "words": self._words,
        }

    def _print_result(self, result: Result, count: str) -> None:
        metric = self._sweep.metric
        value = result[metric]
        outcome = "no step was done" if value is None else f"{metric} {value:.4f}"
        print(f"{count}: {Trial(result['keys'])}: {result['error'] or outcome}", flush=True)

    def _read_finished(self, trials: Sequence[Trial]) -> dict[str, Result]:
        """Return the results, by name, of trials that the same command has run to their end.
        Raises `UserError` if the file with the results is damaged."""
        path = self._sweep.folder / SUMMARY
        if not path.exists():
            return {}
        try:
            finished = {
                Trial(result["keys"]).name
                for result in json.loads(path.read_text())
                if result["error"] is None and result["words"] == self._words
            }
        except (OSError, ValueError, TypeError, KeyError, AttributeError):
            raise UserError(f"{path} is not the result of a sweep; move it away") from None
        results = {
            trial.name: self._make_result(trial, 0) for trial in trials if trial.name in finished
        }
        return {name: result for name, result in results.items() if result["step"] is not None}


def parse_arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--sweep", action="append", default=[], metavar="KEY=...", help="[A, B], uniform:LOW:HIGH "
        "or log:LOW:HIGH")  # fmt: skip
    add("--trials", type=int, default=1, help="of each combination of lists")
    add("--jobs", type=int, default=1, help="trials side by side")
    add("--ranks", type=int, default=1, help="of a trial")
    add("--gpus", metavar="0,1,...", help="GPUs to deal out, one for each rank")
    add("--metric", help="lower is better; default: eval_loss, or loss without evaluation")
    add("--seed", type=int, default=0, help="of the numbers from ranges")
    add("run", nargs="*", metavar="-- ...", help="as of pretrain_gpt.py")
    return parser.parse_args()


if __name__ == "__main__":
    with allow_closed_output():
        main()
