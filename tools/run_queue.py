"""Run several runs on this machine or a Ray cluster: those of a file, or the trials of a sweep.

python tools/run_queue.py QUEUE.yaml --devices 8
python tools/run_queue.py --sweep 'optim.lr=[1e-3, 3e-3]' --sweep optim.beta2=uniform:0.9:0.999 \\
    --trials 4 --devices 2 -- --config RUN.yaml

As many runs as there is room for run side by side. A run of higher priority makes others leave:
they save, and continue when there is room again, under another layout if fewer ranks are free then.
The same command again continues a queue that was interrupted or killed, and tries again what has
failed. A file is read again when it changes. Of a sweep every combination of the lists' values is
tried --trials times, each time with new numbers for the keys that have a range: lists alone are a
grid search, ranges alone a random search. Each run has its own folder in that of the queue, whose
queue.html has all of them.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Callable, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from megaframe.dashboard.page import PAGE_FILE, render_page, write_atomically
from megaframe.dashboard.page_data import build_page_data
from megaframe.dashboard.run_set import RunSet
from megaframe.distributed.ray_cluster import connect_to_ray
from megaframe.errors import UserError, report_errors
from megaframe.io.closed_output import allow_closed_output
from megaframe.io.untrusted import make_integer_parser
from megaframe.run_queue.queue_file import QueueEntry, RunOfQueue, make_runs, read_queue_file
from megaframe.run_queue.queue_page import PAGE, align_columns
from megaframe.run_queue.queue_state import RunRecord
from megaframe.run_queue.run_process import (
    RunProcess,
    build_run_command,
    make_rank_variables,
    parse_run,
)
from megaframe.run_queue.run_queue import Launcher, RunQueue
from megaframe.run_queue.sweep import Result, rank_results, summarize

LAUNCH = Path(__file__).resolve().parent / "launch"


def main() -> None:
    """Run the queue, and print what has become of its runs; exit with status 1 if one of them, or
    all trials of a sweep, have failed."""
    arguments = parse_arguments()
    with report_errors():
        folder, runs = read_runs(arguments)
        queue = RunQueue(folder, runs, make_launcher(arguments), arguments.retries)
        signal.signal(signal.SIGTERM, exit_by_signal)  # Ray has set its own
        if arguments.queue:
            queue.read_changes = watch_file(arguments.queue, folder)
        ended = queue.run()
        print(align_columns(queue.page.list_rows(ended)))
        print(f"wrote {folder / PAGE}")
        has_failed = print_groups(ended)
        write_comparison(folder, ended)
    sys.exit(int(has_failed))


def exit_by_signal(number: int, _: Any) -> None:
    """Leave as on Ctrl-C, with the status of this signal."""
    sys.exit(128 + number)


def read_runs(arguments: argparse.Namespace) -> tuple[Path, list[RunOfQueue]]:
    """Return the folder and the runs of the command line.

    Raises:
        UserError: There is a mistake in them.
    """
    if arguments.queue and (arguments.sweep or arguments.run):
        raise UserError(f"--sweep and -- ... belong into {arguments.queue}, or take its place")
    if arguments.queue:
        return read_queue_file(arguments.queue)
    if not arguments.sweep:
        raise UserError(
            "there is nothing to run; name the file of a queue, or give "
            "--sweep 'optim.lr=[1e-3, 3e-3]' -- --config RUN.yaml, for example"
        )
    config, line = parse_run(arguments.run)
    names = ("ranks", "sweep", "trials", "seed", "metric", "grace")
    options = {name: getattr(arguments, name) for name in names}
    folder = Path(config.run.dir).absolute()
    return folder, make_runs("", QueueEntry(overrides=tuple(line), **options), folder)


def watch_file(path: Path, folder: Path) -> Callable[[], list[RunOfQueue] | None]:
    """Return a function that returns the runs of a file if it has changed since the last call, and
    None if it has not."""

    def look() -> tuple[int, int] | None:
        try:
            status = path.stat()
        except OSError:  # between two versions of an editor
            return None
        return status.st_mtime_ns, status.st_size

    last = look()

    def read_changes() -> list[RunOfQueue] | None:
        nonlocal last
        if (now := look()) is None or now == last:
            return None
        last = now
        other, runs = read_queue_file(path)
        if other != folder:
            raise UserError(f"{path}: folder was {folder} and is {other}; start another queue")
        return runs

    return read_changes


class LocalLauncher:
    """Starts runs on this machine.

    Args:
        devices: How many ranks there is room for.
        gpus: The GPUs to deal out, one for each rank, if any.
    """

    def __init__(self, devices: int, gpus: Sequence[str] = ()) -> None:
        self._devices, self._gpus = len(gpus) or devices, gpus

    def count_devices(self) -> int:
        """Return how many ranks there is room for."""
        return self._devices

    def make_command(self, words: Sequence[str], ranks: int) -> list[str]:
        """Return the command of a run."""
        return build_run_command(words, ranks, LAUNCH / "node.py")

    def make_environment(self, devices: Sequence[int]) -> dict[str, str]:
        """Return the variables of a run that has these devices."""
        variables = make_rank_variables(len(devices))
        if self._devices > 1 and "OMP_NUM_THREADS" not in os.environ:
            # Otherwise each rank would start a thread for every core.
            cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
            variables["OMP_NUM_THREADS"] = str(max(1, cores // self._devices))
        if self._gpus:
            variables["CUDA_VISIBLE_DEVICES"] = ",".join(self._gpus[place] for place in devices)
        return variables


class RayLauncher:
    """Starts runs on a Ray cluster, which places their ranks (ray_train.py).

    Args:
        address: Of the cluster.
        resource: What a rank takes, GPU or CPU.
    """

    def __init__(self, address: str, resource: str) -> None:
        self._address, self._resource = connect_to_ray(address), resource

    def count_devices(self) -> int:
        """Return how many ranks the nodes that are there have room for."""
        import ray

        return int(ray.cluster_resources().get(self._resource, 0))

    def make_command(self, words: Sequence[str], ranks: int) -> list[str]:
        """Return the command of a run."""
        options = ["--address", self._address, "--ranks", str(ranks), "--failures", "0"]
        options += ["--gpus"] if self._resource == "GPU" else []
        return [sys.executable, str(LAUNCH / "ray_train.py"), *options, "--", *words]

    def make_environment(self, devices: Sequence[int]) -> dict[str, str]:
        """Return the variables of a run: none, as Ray chooses its devices."""
        return {}


def make_launcher(arguments: argparse.Namespace) -> Launcher:
    """Return what starts the runs."""
    if arguments.on == "local":
        gpus = arguments.gpus.split(",") if arguments.gpus else ()
        return LocalLauncher(arguments.devices, gpus)
    if arguments.gpus not in (None, "all"):
        raise UserError(f"--gpus {arguments.gpus}: Ray chooses them; give --gpus all, or leave it")
    return RayLauncher(arguments.address, "GPU" if arguments.gpus else "CPU")


def print_groups(ended: Sequence[tuple[RunOfQueue, RunRecord]]) -> bool:
    """Print the trials of each sweep, and return whether a run, or all of a sweep, has failed."""
    has_failed = False
    for sweep, group in groupby(ended, key=lambda pair: pair[0].sweep):
        pairs = list(group)
        if not sweep:
            has_failed |= any(record.state == "failed" for _, record in pairs)
            continue
        results = [make_result(run, record) for run, record in pairs]
        first = pairs[0][0]
        text, failures = summarize(results, list(first.keys), first.metric)
        print(text)
        has_failed |= failures == len(results)
    return has_failed


def make_result(run: RunOfQueue, record: RunRecord) -> Result:
    """Return the result of a trial."""
    values = RunProcess(run.folder, ()).read_metric(run.metric)
    step, value = values[-1] if values else (None, None)
    result = {"keys": run.keys, "step": step, run.metric: value, "folder": str(run.folder)}
    return {**result, "error": record.error if record.state == "failed" else None}


def write_comparison(folder: Path, ended: Sequence[tuple[RunOfQueue, RunRecord]]) -> None:
    """Write the dashboard of all runs that have done a step, if plotly is installed; the best first
    if all are compared by one metric."""
    results = [make_result(run, record) for run, record in ended]
    metrics = {run.metric for run, _ in ended}
    metric = metrics.pop() if len(metrics) == 1 else None
    if metric is not None:
        results = rank_results(results, metric)
    folders = [Path(result["folder"]) for result in results if result["step"] is not None]
    if not folders:
        return
    try:
        runs = RunSet(folders)
        data = build_page_data(runs.runs, metric=metric, notes=runs.notes)
        write_atomically(folder / PAGE_FILE, render_page(data), inside=folder)
        print(f"wrote {folder / PAGE_FILE}")
    except UserError as error:
        print(f"no dashboard: {error}")


def parse_arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add, positive = parser.add_argument, make_integer_parser(1)
    add("queue", nargs="?", type=Path, metavar="QUEUE.yaml", help="folder and runs")
    add("--on", choices=("local", "ray"), default="local", help="this machine, or a Ray cluster")
    add("--devices", type=positive, default=1, help="ranks side by side on this machine's CPU")
    add("--gpus", metavar="0,1,...", help="GPUs to deal out, one for each rank; all with Ray")
    add("--address", default="auto", help="of the Ray cluster; local makes one here")
    add("--retries", type=make_integer_parser(0), default=2, help="of a run that fails")
    add("--sweep", action="append", default=[], metavar="KEY=...", help="[A, B], uniform:LOW:HIGH "
        "or log:LOW:HIGH")  # fmt: skip
    add("--trials", type=positive, default=1, help="of each combination of lists")
    add("--ranks", default="1", metavar="N|MIN:MAX", help="of a trial")
    add("--metric", help="lower is better; default: eval_loss, or loss without evaluation")
    add("--grace", type=positive, metavar="STEPS", help="stop the worse half of the trials after "
        "so many steps, and again after twice as many")  # fmt: skip
    add("--seed", type=int, default=0, help="of the numbers from ranges")
    parser.usage = f"{parser.format_usage().removeprefix('usage: ').rstrip()} [-- ...]"
    words = sys.argv[1:]
    end = words.index("--") if "--" in words else len(words)
    return parser.parse_args(words[:end], argparse.Namespace(run=words[end + 1 :]))


if __name__ == "__main__":
    with allow_closed_output():
        main()
