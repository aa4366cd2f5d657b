"""Run models of one shape in growing sizes, fit a law to their losses, and predict a larger one.

python tools/ladder.py --depths 2,3,4 --target 8 -- --config RUN.yaml run.dir=runs/ladder

The number of layers is the only dial. Of the config are the proportions of the model, its data, and
the learning rate and batch of a model with its number of layers; those of other rungs follow, in
muP. Each rung is a config file and a run in its own folder in `run.dir`. The same command again
continues a ladder that was interrupted, and runs no rung twice. The loss of --target is predicted
before it is run; with --run-target it is run afterwards, and compared.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from megaframe.config import RunConfig
from megaframe.config.load import dump
from megaframe.dashboard.page import render_page, write_atomically
from megaframe.dashboard.page_data import build_page_data
from megaframe.dashboard.run_set import RunSet
from megaframe.errors import UserError, explain_failed_write, report_errors
from megaframe.io.closed_output import allow_closed_output
from megaframe.io.progress import Progress
from megaframe.io.regular_file import write_file
from megaframe.planner.explanations.explanation import Explanation
from megaframe.planner.ladder import Ladder, Rung
from megaframe.planner.theory.loss_fit import LEAST_RUNS, ComputeLaw, fit_compute_law
from megaframe.run_queue.run_process import (
    RunProcess,
    build_run_command,
    make_rank_variables,
    parse_run,
)
from megaframe.validate.run import validate_config

RECORD, PAGE = "ladder.json", "ladder.html"
METRIC = "eval_loss"
NODE = Path(__file__).resolve().parent / "launch/node.py"
_PAUSE = 0.2
_GFLOP = 1e9
_HEAD = (
    "layers", "hidden", "heads", "parameters", "tokens", "steps", "batch", "lr", "FLOPs", METRIC,
    "law", "error",
)  # fmt: skip


def main() -> None:
    """Run the ladder, and write and print its law and what it predicts."""
    options = parse_arguments()
    with report_errors():
        config, words = parse_run(options.run)
        rungs = Ladder(config, options.tokens_per_parameter, options.ranks).make_rungs(
            options.depths, options.target
        )
        runs = LadderRuns(config, words, rungs, options.ranks)
        if options.dry_run:
            print_table(rungs, {}, None)
            return
        *below, target = rungs
        losses = runs.run(below)
        law = fit_compute_law([rung.flops for rung in below], [losses[r.name] for r in below])
        runs.write_record(losses, law)
        print_table(rungs, losses, law)
        print_law(rungs, losses, law)
        if options.run_target:
            losses |= runs.run([target])
            runs.write_record(losses, law)
            print_outcome(target, losses, law)
        runs.write_page([rung for rung in rungs if rung.name in losses])


@dataclass(frozen=True)
class RungRun:
    """The run of a rung.

    Attributes:
        rung: What it is.
        config: Its whole config.
        file: Where the config is written.
    """

    rung: Rung
    config: RunConfig
    file: Path

    @property
    def folder(self) -> Path:
        """Of its run."""
        return self.file.with_suffix("")

    def make_run(self, ranks: int) -> RunProcess:
        """Return the run, whose metrics have not been read yet."""
        words = ["--config", str(self.file), f"run.dir={self.folder}"]
        return RunProcess(self.folder, build_run_command(words, ranks, NODE))

    def read_loss(self, ranks: int) -> float | None:
        """Return the loss at its end, None if it has not come so far."""
        values = self.make_run(ranks).read_metric(METRIC)
        if not values or values[-1][0] != self.config.train.steps:
            return None
        return values[-1][1]


class LadderRuns:
    """The runs of a ladder on this machine, one after the other.

    Args:
        config: The run whose shape the rungs have.
        words: Its command line.
        rungs: All of them.
        ranks: Of each run.

    Raises:
        UserError: A rung is not a valid config, or the folder has another ladder.
    """

    def __init__(
        self, config: RunConfig, words: Sequence[str], rungs: Sequence[Rung], ranks: int
    ) -> None:
        self._folder, self._rungs, self._ranks = Path(config.run.dir).absolute(), rungs, ranks
        self._runs = {rung.name: self._make_rung_run(rung, words) for rung in rungs}

    def _make_rung_run(self, rung: Rung, words: Sequence[str]) -> RungRun:
        file = self._folder / f"{rung.name}.yaml"
        keys = (f"{key}={value}" for key, value in rung.keys.items())
        config, _ = parse_run([*words, *keys, f"run.dir={file.with_suffix('')}"])
        validate_config(config, self._ranks)
        return RungRun(rung, config, file)

    def run(self, rungs: Sequence[Rung]) -> dict[str, float]:
        """Run those rungs that have not been run to their end, and return the losses of all by
        their names.

        Raises:
            UserError: A run failed.
        """
        losses = {rung.name: self._read_loss(rung) for rung in rungs}
        waiting = [rung for rung in rungs if losses[rung.name] is None]
        print(f"{len(rungs)} rungs in {self._folder}, {len(rungs) - len(waiting)} done before")
        total, done = sum(rung.flops for rung in waiting), 0.0
        with Progress("ladder", "GFLOP", is_shown=bool(waiting)) as progress:
            for rung in waiting:
                losses[rung.name] = self._run_rung(rung, progress, done, total)
                done += rung.flops
                print(f"{rung.name}: {METRIC} {losses[rung.name]:.4f}", flush=True)
        return {name: loss for name, loss in losses.items() if loss is not None}

    def _read_loss(self, rung: Rung) -> float | None:
        """Return the loss of a rung, None if it is not done; and write its config."""
        run = self._runs[rung.name]
        text = dump(run.config)
        with explain_failed_write(run.file):
            self._folder.mkdir(parents=True, exist_ok=True)
            if run.file.exists() and run.file.read_text() != text:
                raise UserError(
                    f"{run.file} is the rung of another ladder; use another run.dir, or remove it "
                    f"with its folder"
                )
            write_file(run.file, text, inside=self._folder)
        return run.read_loss(self._ranks)

    def _run_rung(self, rung: Rung, progress: Progress, done: float, total: float) -> float:
        run = self._runs[rung.name]
        trial = run.make_run(self._ranks)
        environment = {**os.environ, **make_rank_variables(self._ranks)}
        process = trial.start(env=environment, start_new_session=True)
        step = 0
        try:
            while process.poll() is None:
                steps = trial.read_metric("loss")
                step = steps[-1][0] if steps else step
                work = done + rung.flops * step / run.config.train.steps
                progress.report(round(work / _GFLOP), round(total / _GFLOP))
                time.sleep(_PAUSE)
        finally:
            if process.poll() is None:
                print("the running rung saves; the same command continues", file=sys.stderr)
                process.terminate()
                process.wait()
        loss = run.read_loss(self._ranks)
        if process.returncode or loss is None:
            raise UserError(f"{rung.name}: {trial.describe_failure(process.returncode)}")
        return loss

    def write_record(self, losses: Mapping[str, float], law: ComputeLaw) -> None:
        """Write the rungs, their losses and the law into the folder of the ladder."""
        rungs = [
            {
                "name": rung.name,
                "keys": dict(rung.keys),
                "parameters": rung.parameters,
                "tokens": rung.tokens,
                "flops": rung.flops,
                METRIC: losses.get(rung.name),
                "law": law.compute_loss(rung.flops),
            }
            for rung in self._rungs
        ]
        path = self._folder / RECORD
        with explain_failed_write(path):
            text = json.dumps({"law": vars(law), "rungs": rungs}, indent=2)
            write_file(path, f"{text}\n", inside=self._folder)
        print(f"wrote {path}")

    def write_page(self, rungs: Sequence[Rung]) -> None:
        """Write the dashboard of these rungs, if plotly is installed."""
        try:
            runs = RunSet([self._runs[rung.name].folder for rung in rungs])
            data = build_page_data(runs.runs, metric=METRIC, notes=runs.notes)
            write_atomically(self._folder / PAGE, render_page(data), inside=self._folder)
            print(f"wrote {self._folder / PAGE}")
        except UserError as error:
            print(f"no page: {error}")


def print_table(rungs: Sequence[Rung], losses: Mapping[str, float], law: ComputeLaw | None) -> None:
    """Print the rungs, with what the law says of each and how far off it is."""
    rows = []
    for rung in rungs:
        keys, loss = rung.keys, losses.get(rung.name)
        said = None if law is None else law.compute_loss(rung.flops)
        error = None if loss is None or said is None else f"{said / loss - 1:+.2%}"
        sizes = (rung.layers, int(keys["model.hidden"]), int(keys["model.heads"]))
        run = int(keys["train.steps"]), int(keys["train.global_batch"]), keys["optim.lr"]
        rows.append((*sizes, rung.parameters, rung.tokens, *run, rung.flops, loss, said, error))
    print(*Explanation("ladder", (), _HEAD, tuple(rows)).format_table(), sep="\n")


def print_law(rungs: Sequence[Rung], losses: Mapping[str, float], law: ComputeLaw) -> None:
    """Print the law, what it predicts for the target, and what one without the last rung would have
    said of it."""
    *below, target = rungs
    print(
        f"{METRIC} = {law.irreducible:.4g} + {law.factor:.4g} (FLOPs / {law.unit:.3g})^-"
        f"{law.exponent:.3g}"
    )
    worst = max(abs(law.compute_loss(r.flops) / losses[r.name] - 1) for r in below)
    print(f"off by up to {worst:.2%} on the rungs that it was fitted to: expect as much ahead")
    if len(below) > LEAST_RUNS:
        flops, values = [r.flops for r in below], [losses[r.name] for r in below]
        earlier = fit_compute_law(flops[:-1], values[:-1]).compute_loss(flops[-1])
        print(
            f"without {below[-1].name} the law would have said {earlier:.4f} of it: "
            f"{earlier / values[-1] - 1:+.2%}"
        )
    print(f"predicted for {target.name}: {METRIC} {law.compute_loss(target.flops):.4f}", flush=True)


def print_outcome(target: Rung, losses: Mapping[str, float], law: ComputeLaw) -> None:
    """Print how far off the prediction was."""
    loss, said = losses[target.name], law.compute_loss(target.flops)
    print(f"{target.name}: predicted {said:.4f}, reached {loss:.4f}: {said / loss - 1:+.2%}")


def parse_depths(text: str) -> list[int]:
    """Parse the numbers of layers of --depths."""
    depths = [int(part) for part in text.split(",")]
    if min(depths) < 1:
        raise ValueError
    return depths


def parse_arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--depths", type=parse_depths, required=True, metavar="2,3,4", help="layers of the rungs")
    add("--target", type=int, required=True, help="layers of the run to predict")
    add("--tokens-per-parameter", type=float, default=20.0, help="D / N of all rungs (default: 20)")
    add("--run-target", action="store_true", help="run it too, after its loss is predicted")
    add("--dry-run", action="store_true", help="only print the rungs")
    add("--ranks", type=int, default=1, help="of a run")
    add("run", nargs="*", metavar="-- ...", help="as of pretrain_gpt.py")
    return parser.parse_args()


if __name__ == "__main__":
    with allow_closed_output():
        main()
