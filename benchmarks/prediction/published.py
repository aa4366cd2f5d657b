"""Published measurements compared with predictions.

Without arguments it prints the errors of every table. `--write` makes
`docs/reference/prediction.md` and its plot; what needs a table whose file is missing stays as it
is, and its lines are named. `--fit FAMILY` fits the constants of a generation of chips to its
tables, and once without each source; the latter are kept in `left_out.json`.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from published_tables import TABLES, PublishedRun

from megaframe.architecture.pipeline import build_step_schedule
from megaframe.config import RunConfig
from megaframe.hardware.cluster import Cluster, load_cluster
from megaframe.layout import Layout
from megaframe.planner.constants import Constants, get_family_constants
from megaframe.planner.data_parallel_times import resolve_bucket_size
from megaframe.planner.layout_sizes import LayoutSizes, make_layout_sizes
from megaframe.planner.machine import Machine
from megaframe.planner.prediction import Prediction, count_model_flops, estimate_step, predict
from megaframe.schedule import Schedule

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "reference" / "prediction.md"
PLOT = ROOT / "docs" / "images" / "prediction.svg"
LEFT_OUT = Path(__file__).with_name("left_out.json")
INDISTINGUISHABLE = 0.05
"""Alternatives closer to each other than this cannot be told apart. It is about the error of
predictions on the tables in which everything is published."""


@dataclass(frozen=True)
class PublishedPrediction:
    """A row with its prediction, by constants that were fitted without its source.

    Attributes:
        config: The alternative that is predicted to be fastest.
        prediction: Its step.
        near: All alternatives that cannot be told from it.
        seconds: Their mean.
        fitted_seconds: Their mean by the shipped constants, which were fitted to this source, too.
    """

    row: PublishedRun
    config: RunConfig
    prediction: Prediction
    near: tuple[RunConfig, ...]
    seconds: float
    fitted_seconds: float

    @property
    def error(self) -> float:
        """Relative error of the predicted step time."""
        return self.seconds / self.row.seconds - 1

    @property
    def fitted_error(self) -> float:
        """The same by the shipped constants."""
        return self.fitted_seconds / self.row.seconds - 1


@lru_cache
def find_cluster(name: str) -> Cluster:
    """Return a cluster; it is read once."""
    return load_cluster(name)


@lru_cache
def read_left_out() -> dict[str, dict[str, dict[str, float]]]:
    """Return the constants that were fitted without the source of a table, by family and table."""
    table: dict[str, dict[str, dict[str, float]]] = json.loads(LEFT_OUT.read_text("utf-8"))
    return table


def get_left_out_constants(table: str, family: str) -> Constants:
    """Return the constants of a family that were fitted without the source of a table."""
    values: dict[str, Any] = dict(read_left_out()[family][table])
    return replace(get_family_constants(family), **values)


def predict_run(row: PublishedRun, *, shipped: bool = False) -> PublishedPrediction:
    """Predict a row by the alternative that is predicted to be fastest of those that fit.

    If others are within `INDISTINGUISHABLE` of it, any of them may be the configuration of the
    published, tuned run, and the minimum of so many predictions would be too low. The mean of them
    is therefore predicted.

    Args:
        row: The published run.
        shipped: Whether to predict it with the shipped constants, not with those that were fitted
            without its source.
    """
    cluster = find_cluster(row.cluster)
    family = cluster.chip.family
    fitted = replace(get_family_constants(family), software=row.software)
    constants = fitted
    if not shipped:
        constants = replace(get_left_out_constants(row.table, family), software=row.software)
    predictions = []
    for config in row.configs:
        layout = Layout.from_parallel(config.parallel, row.world)
        predictions.append((predict(config, layout, cluster, constants), config))
    predictions = [predicted for predicted in predictions if predicted[0].fits] or predictions
    predictions.sort(key=lambda predicted: predicted[0].step_seconds)
    prediction, config = predictions[0]
    near = [
        predicted
        for predicted in predictions
        if predicted[0].step_seconds <= (1 + INDISTINGUISHABLE) * prediction.step_seconds
    ]
    seconds = float(np.mean([predicted.step_seconds for predicted, _ in near]))
    configs = tuple(config for _, config in near)
    steps = [prepare_step(config, row.world, cluster) for config in configs]
    fitted_seconds = float(np.mean([step.estimate_seconds(fitted) for step in steps]))
    return PublishedPrediction(row, config, prediction, configs, seconds, fitted_seconds)


@dataclass(frozen=True)
class PreparedStep:
    """A step of a run, prepared to be predicted with many constants, without its memory."""

    config: RunConfig
    cluster: Cluster
    sizes: LayoutSizes
    schedule: Schedule

    def estimate_seconds(self, constants: Constants) -> float:
        """Return the predicted seconds."""
        machine = Machine(self.config, self.cluster, constants, self.sizes)
        return sum(estimate_step(machine, self.schedule).values())


def prepare_step(config: RunConfig, world: int, cluster: Cluster) -> PreparedStep:
    """Return a step of `config` on `world` ranks."""
    layout = Layout.from_parallel(config.parallel, world)
    config = resolve_bucket_size(config, layout, cluster)
    sizes = make_layout_sizes(config.parallel, config.train, layout)
    schedule = build_step_schedule(config, int(sizes.microbatches))
    return PreparedStep(config, cluster, sizes, schedule)


@lru_cache
def predict_table(name: str) -> tuple[PublishedPrediction, ...]:
    """Return the rows of a table, or none if it is read from a file that is missing."""
    return tuple(predict_run(row) for row in TABLES[name].rows())


def compute_null_errors(rows: Sequence[PublishedRun]) -> list[float]:
    """Return the errors of a null model, which every planner must beat: the best constant rate for
    each chip, with whichever count of operations gives the smallest errors (causal attention as
    half or whole, with or without recompute)."""
    counts = [_count_flops(row) for row in rows]
    errors_by_count = [
        _compute_constant_rate_errors(rows, [count[n] for count in counts])
        for n in range(len(counts[0]))
    ]
    return min(errors_by_count, key=lambda errors: sum(map(abs, errors)))


def _count_flops(row: PublishedRun) -> tuple[float, ...]:
    """Return a rank's operations in a step, counted in different ways."""
    config = row.configs[0]
    tokens = config.train.global_batch * config.train.seq / row.world
    model, hardware = count_model_flops(config)
    m = config.model
    masked = 6.0 * m.layers * m.heads * m.head_dim * config.train.seq
    recomputed = masked / 3 if config.train.recompute == "full" else 0.0
    counts = (model, hardware, model + masked, hardware + masked + recomputed)
    return tuple(tokens * count for count in counts)


def _compute_constant_rate_errors(
    rows: Sequence[PublishedRun], flops: Sequence[float]
) -> list[float]:
    errors = [0.0] * len(rows)
    for cluster in dict.fromkeys(row.cluster for row in rows):
        indices = [n for n, row in enumerate(rows) if row.cluster == cluster]
        rates = [flops[n] / rows[n].seconds for n in indices]
        tried = [[flops[n] / rate / rows[n].seconds - 1 for n in indices] for rate in rates]
        best = min(tried, key=lambda errors_of_rate: sum(map(abs, errors_of_rate)))
        for n, error in zip(indices, best, strict=True):
            errors[n] = error
    return errors


@dataclass(frozen=True)
class ErrorSummary:
    """Errors of a table.

    Attributes:
        mean: Of all rows, by constants that were fitted without their source.
        most: The largest of these.
        fitted: Mean of all rows by the shipped constants.
        null: Mean of the null model.
        lost: The most that the alternative predicted to be best loses to the one that is best;
            None without alternatives.
    """

    mean: float
    most: float
    fitted: float
    null: float
    lost: float | None

    @property
    def removed(self) -> float:
        """Share of the null model's error that the prediction removes."""
        return 1 - self.mean / self.null if self.null else 0.0


def summarize_errors(lines: Sequence[PublishedPrediction]) -> ErrorSummary:
    """Return the errors of the rows of a table."""
    errors = np.abs([line.error for line in lines])
    null = np.abs(compute_null_errors([line.row for line in lines]))
    return ErrorSummary(
        mean=float(errors.mean()),
        most=float(errors.max()),
        fitted=float(np.mean([abs(line.fitted_error) for line in lines])),
        null=float(null.mean()),
        lost=max(compute_choice_losses(lines), default=None),
    )


def compute_choice_losses(lines: Sequence[PublishedPrediction]) -> Iterator[float]:
    """Yield, for each set of rivals, what the predicted best loses to the true best."""
    rivals: dict[str, list[PublishedPrediction]] = {}
    for line in lines:
        if line.row.rivals:
            rivals.setdefault(line.row.rivals, []).append(line)
    for lines in rivals.values():
        if len(lines) > 1:
            chosen = min(lines, key=lambda line: line.seconds)
            yield chosen.row.seconds / min(line.row.seconds for line in lines) - 1


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tables", nargs="+", choices=list(TABLES), default=list(TABLES))
    parser.add_argument("--fit", metavar="FAMILY", choices=("a100", "h100"))
    pages = "make docs/reference/prediction.md and its plot"
    parser.add_argument("--write", action="store_true", help=pages)
    arguments = parser.parse_args()
    if arguments.fit:
        from published_fit import write_fits

        write_fits(arguments.fit, LEFT_OUT)
        return
    from published_page import (
        describe_missing,
        draw_plot,
        format_page,
        format_summary_header,
        format_summary_row,
    )

    predictions = {name: rows for name in arguments.tables if (rows := predict_table(name))}
    print(format_summary_header())
    for name, rows in predictions.items():
        print(format_summary_row(TABLES[name], summarize_errors(rows)))
    page = PAGE.read_text(encoding="utf-8")
    for name in arguments.tables:
        if missing_file := TABLES[name].missing_file:
            print(describe_missing(page, name, missing_file))
    if arguments.write:
        PAGE.write_text(format_page(predictions, page), encoding="utf-8")
        if len(predictions) == len(TABLES):
            PLOT.write_text(draw_plot(predictions), encoding="utf-8")
        else:
            print("docs/images/prediction.svg is drawn only from all tables, and stays as it is")


if __name__ == "__main__":
    main()
