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
from dataclasses import dataclass
from pathlib import Path

from megaframe.config import RunConfig
from megaframe.dashboard.metrics_file import Metrics
from megaframe.dashboard.sweep import (
    CONSOLE,
    SUMMARY,
    Result,
    Trial,
    check_trials,
    failure,
    metric_of,
    run_of,
    space_of,
    summary,
    trial_command,
    trials_of,
    values_after,
    write_page,
)
from megaframe.errors import UserError, report_errors
from megaframe.io.run_files import METRICS_FILE

PAGE = "sweep.html"
_PAUSE = 0.1


def main() -> None:
    """Run the sweep, and write and print its results; exit with status 1 if all trials failed."""
    arguments = parse_arguments()
    with report_errors():
        config, words = run_of(arguments.run)
        space = space_of(arguments.sweep)
        trials = trials_of(space, arguments.trials, arguments.seed)
        check_trials([trial.keys for trial in trials], words)
        sweep = Sweep.of(config, words, arguments)
        found = sweep.run(trials)
        text, failed = summary(found, space, sweep.metric)
        print(text)
        print(f"wrote {sweep.folder / SUMMARY}")
        if failed < len(found):
            try:
                write_page(sweep.folder / PAGE, found, space, sweep.metric)
                print(f"wrote {sweep.folder / PAGE}")
            except UserError as error:
                print(f"no plot: {error}")
    sys.exit(int(failed == len(found)))


@dataclass(frozen=True)
class Sweep:
    """How the trials of a sweep are run.

    folder: of the sweep. words: command line of the run. metric: what trials are compared by.
    jobs: trials side by side. ranks: of each. gpus: devices to deal out to the jobs, if any.
    """

    folder: Path
    words: tuple[str, ...]
    metric: str
    jobs: int
    ranks: int
    gpus: tuple[str, ...]

    @staticmethod
    def of(config: RunConfig, words: Sequence[str], asked: argparse.Namespace) -> Sweep:
        """Return the sweep that was asked for. Raises `UserError` if it cannot be run."""
        for name in ("jobs", "ranks"):
            if (number := getattr(asked, name)) < 1:
                raise UserError(f"--{name} {number} is too few; use 1 or more")
        gpus = tuple(asked.gpus.split(",")) if asked.gpus else ()
        if gpus and len(gpus) < asked.jobs * asked.ranks:
            raise UserError(
                f"--jobs {asked.jobs} with --ranks {asked.ranks} need {asked.jobs * asked.ranks} "
                f"GPUs, and --gpus {asked.gpus} names {len(gpus)}"
            )
        if config.checkpoint.folder is not None:
            raise UserError(
                f"checkpoint.folder={config.checkpoint.folder} would be shared by all trials; "
                "leave it out, and each saves in its own folder"
            )
        resume = [] if config.checkpoint.resume else ["checkpoint.resume=latest"]
        metric = metric_of(config, asked.metric)
        folder = Path(config.run.dir).absolute()
        return Sweep(folder, (*words, *resume), metric, asked.jobs, asked.ranks, gpus)

    def run(self, trials: Sequence[Trial]) -> list[Result]:
        """Run all trials that are not done yet, and return the results of all, in their order."""
        found = self._done(trials)
        print(f"{len(trials)} trials in {self.folder}, {len(found)} done before", flush=True)
        waiting = deque(trial for trial in trials if trial.name not in found)
        running: dict[int, tuple[Trial, subprocess.Popen[bytes]]] = {}
        try:
            while waiting or running:
                for slot in range(self.jobs):
                    if slot not in running and waiting:
                        trial = waiting.popleft()
                        running[slot] = trial, self._start(trial, slot)
                for slot, (trial, process) in list(running.items()):
                    if process.poll() is not None:
                        del running[slot]
                        found[trial.name] = self._result(trial, process.returncode)
                        self._tell(found[trial.name], f"{len(found)} of {len(trials)}")
                        self._write([found[one.name] for one in trials if one.name in found])
                time.sleep(_PAUSE)
        finally:
            if running:
                print("running trials save and end; the same command continues", file=sys.stderr)
            for _, process in running.values():
                process.terminate()
            for _, process in running.values():
                process.wait()
        return [found[trial.name] for trial in trials]

    def _start(self, trial: Trial, slot: int) -> subprocess.Popen[bytes]:
        """Start a trial as job number `slot`, in a session of its own: Ctrl-C reaches it through
        this program only."""
        run = self.folder / trial.name
        run.mkdir(parents=True, exist_ok=True)
        environment = dict(os.environ)
        if self.jobs > 1:
            # Otherwise each rank would start a thread for every core.
            cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
            threads = max(1, cores // (self.jobs * self.ranks))
            environment.setdefault("OMP_NUM_THREADS", str(threads))
        if self.gpus:
            mine = self.gpus[slot * self.ranks : (slot + 1) * self.ranks]
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(mine)
        command = trial_command(self.words, trial.keys, run, self.ranks)
        with open(run / CONSOLE, "wb") as console:
            return subprocess.Popen(
                command, env=environment, stdout=console, stderr=console, start_new_session=True
            )

    def _result(self, trial: Trial, status: int) -> Result:
        """Return what a trial has come to. status: exit status of its run."""
        run = self.folder / trial.name
        metrics = Metrics(run / METRICS_FILE)
        metrics.read()
        told = list(values_after(metrics, self.metric, 0))
        step, value = told[-1] if told else (None, None)
        return {
            "keys": trial.keys,
            "step": step,
            self.metric: value,
            "folder": str(run),
            "error": failure(run, status) if status else None,
            "words": list(self.words),
        }

    def _tell(self, result: Result, count: str) -> None:
        value = result[self.metric]
        said = "no step was done" if value is None else f"{self.metric} {value:.4f}"
        print(f"{count}: {Trial(result['keys'])}: {result['error'] or said}", flush=True)

    def _done(self, trials: Sequence[Trial]) -> dict[str, Result]:
        """Return the results, by name, of trials that the same command has run to their end.
        Raises `UserError` if the file with the results is damaged."""
        path = self.folder / SUMMARY
        if not path.exists():
            return {}
        try:
            ended = {
                Trial(one["keys"]).name
                for one in json.loads(path.read_text())
                if one["error"] is None and one["words"] == list(self.words)
            }
        except (OSError, ValueError, TypeError, KeyError, AttributeError):
            raise UserError(f"{path} is not the result of a sweep; move it away") from None
        found = {one.name: self._result(one, 0) for one in trials if one.name in ended}
        return {name: result for name, result in found.items() if result["step"] is not None}

    def _write(self, results: Sequence[Result]) -> None:
        unfinished = self.folder / f"{SUMMARY}.unfinished"
        unfinished.write_text(json.dumps(results, indent=2) + "\n")
        unfinished.replace(self.folder / SUMMARY)


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
    main()
