"""Published measurements compared with predictions.

Without arguments it prints the errors of every table. `--write` makes
`docs/reference/prediction.md` and its plot; what needs a table whose file is missing stays as it
is, and its lines are named. `--fit FAMILY` fits the constants of a generation of chips to every
other row of its tables.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from published_tables import TABLES, PublishedRun

from megaframe.config import RunConfig
from megaframe.hardware.cluster import Cluster, load_cluster
from megaframe.layout import Layout
from megaframe.planner.constants import Constants, get_family_constants
from megaframe.planner.prediction import Prediction, count_model_flops, predict

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "reference" / "prediction.md"
PLOT = ROOT / "docs" / "images" / "prediction.svg"
FITTED = {
    # Bounds of each constant.
    "product": (0.3, 1.1),
    "start": (5.0, 1200.0),
    "attention": (0.1, 0.9),
    "memory": (0.3, 1.0),
    "launch": (1e-6, 5e-5),
    "contention": (0.01, 12.0),
}
UNSEEN = {"h100": ("launch",)}
"""Constants about which no row of a family's tables says anything: no run waits for its host."""
DOUBLE_WEIGHT = ("sc21_1", "korthikanti", "readme")
"""Tables that count twice in a fit, because their goals are the strictest."""
MOST_ROWS = 14
"""Most rows of a table that a fit uses."""
INDISTINGUISHABLE = 0.05
"""Alternatives closer to each other than this cannot be told apart. It is about the error of
predictions on the tables in which everything is published."""


@dataclass(frozen=True)
class PublishedPrediction:
    """A row with its prediction.

    Attributes:
        config: The alternative that is predicted to be fastest.
        prediction: Its step.
        near: All alternatives that cannot be told from it.
        seconds: Their mean.
    """

    row: PublishedRun
    config: RunConfig
    prediction: Prediction
    near: tuple[RunConfig, ...]
    seconds: float

    @property
    def error(self) -> float:
        """Relative error of the predicted step time."""
        return self.seconds / self.row.seconds - 1


@lru_cache
def find_cluster(name: str) -> Cluster:
    """Return a cluster; it is read once."""
    return load_cluster(name)


def predict_run(
    row: PublishedRun, by_family: Mapping[str, Constants] | None = None
) -> PublishedPrediction:
    """Predict a row by the alternative that is predicted to be fastest of those that fit.

    If others are within `INDISTINGUISHABLE` of it, any of them may be the configuration of the
    published, tuned run, and the minimum of so many predictions would be too low. The mean of them
    is therefore predicted.

    Args:
        row: The published run.
        by_family: Constants by family, in place of the shipped ones.
    """
    cluster = find_cluster(row.cluster)
    family = cluster.chip.family
    constants = by_family[family] if by_family else get_family_constants(family)
    constants = replace(constants, software=row.software)
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
    return PublishedPrediction(
        row, config, prediction, tuple(config for _, config in near), seconds
    )


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
        mean: Of all rows.
        most: The largest of all rows.
        fitted: Mean of those to which constants were fitted (every other row).
        held_out: Mean of the rest.
        null: Mean of the null model.
        lost: The most that the alternative predicted to be best loses to the one that is best;
            None without alternatives.
    """

    mean: float
    most: float
    fitted: float
    held_out: float
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
        fitted=float(errors[::2].mean()),
        held_out=float(errors[1::2].mean()),
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


def fit(family: str, rounds: int = 6) -> Constants:
    """Return the constants with the least absolute relative errors over every other row of the
    family's tables. All tables have the same weight, except those in `DOUBLE_WEIGHT`. The best of
    several starting points is used."""
    start = get_family_constants(family)
    rows: list[tuple[PublishedRun, float]] = []
    for name, table in TABLES.items():
        family_rows = [
            r for r in list(table.rows())[::2] if find_cluster(r.cluster).chip.family == family
        ]
        family_rows = family_rows[:: max(1, len(family_rows) // MOST_ROWS)]
        weight = (2.0 if name in DOUBLE_WEIGHT else 1.0) / max(1, len(family_rows))
        rows += [(replace(r, configs=predict_run(r).near), weight) for r in family_rows]
    names = [name for name in FITTED if name not in UNSEEN.get(family, ())]
    begin = np.log([getattr(start, name) for name in names])
    other_rows = [
        begin + np.log([move.get(name, 1.0) for name in names])
        for move in ({}, {"memory": 0.8, "product": 1.05}, {"start": 0.6, "contention": 0.4})
    ]
    fits = [_run_gauss_newton(family, start, rows, names, at, rounds) for at in other_rows]
    return min(fits, key=lambda fitted: fitted[1])[0]


def _run_gauss_newton(
    family: str,
    start: Constants,
    rows: Sequence[tuple[PublishedRun, float]],
    names: Sequence[str],
    at: np.ndarray,
    rounds: int,
) -> tuple[Constants, float]:
    """Improve the constants from `at` (logarithms) by Gauss-Newton. Return them and the sum of
    their errors."""
    low, high = np.log(np.array([FITTED[name] for name in names])).T
    at = np.clip(at, low, high)

    def make_constants(logs: np.ndarray) -> Constants:
        values: dict[str, Any] = dict(zip(names, map(float, np.exp(logs)), strict=True))
        return replace(start, **values)

    def compute_errors(logs: np.ndarray) -> np.ndarray:
        constants = {family: make_constants(logs)}
        return np.array([w * np.log1p(predict_run(row, constants).error) for row, w in rows])

    now, damping = compute_errors(at), 1e-2
    for _ in range(rounds):
        steps = 0.05 * np.eye(len(at))
        slopes = np.stack([(compute_errors(at + step) - now) / 0.05 for step in steps], axis=1)
        weights = 1 / np.maximum(np.abs(now), 5e-4)
        square = slopes.T @ (weights[:, None] * slopes)
        for _ in range(4):
            damped = square + damping * np.diag(np.diag(square) + 1e-3)
            move = np.clip(np.linalg.solve(damped, -slopes.T @ (weights * now)), -0.5, 0.5)
            candidate = np.clip(at + move, low, high)
            candidate_errors = compute_errors(candidate)
            if np.abs(candidate_errors).sum() < np.abs(now).sum():
                at, now, damping = candidate, candidate_errors, damping / 4
                break
            damping *= 6
        else:
            break
    return make_constants(at), float(np.abs(now).sum())


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tables", nargs="+", choices=list(TABLES), default=list(TABLES))
    parser.add_argument("--fit", metavar="FAMILY", choices=("a100", "h100"))
    pages = "make docs/reference/prediction.md and its plot"
    parser.add_argument("--write", action="store_true", help=pages)
    arguments = parser.parse_args()
    if arguments.fit:
        fitted = fit(arguments.fit)
        print(", ".join(f"{name}={getattr(fitted, name):.4g}" for name in FITTED))
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
