"""The constants of a chip generation, fitted to published tables: to all, and without one source.

All rows of a table are predicted with the constants that were fitted without its source (all tables
of the same publication), so that what predicts a row has not seen it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from published import PreparedStep, PublishedRun, find_cluster, predict_run, prepare_step
from published_tables import TABLES

from megaframe.planner.constants import Constants, get_family_constants

BOUNDS: Mapping[str, Mapping[str, tuple[float, float]]] = {
    "a100": {
        "product": (0.6, 1.0),
        "attention": (0.4, 0.85),
        "memory": (0.6, 0.98),
        "launch": (2e-6, 1e-4),
        "contention": (0.02, 12.0),
    },
    "h100": {
        "product": (0.6, 1.0),
        "older": (0.75, 1.0),
        "attention": (0.4, 0.85),
        "memory": (0.6, 0.98),
        "contention": (0.02, 9.0),
    },
}
"""Physical bounds of each fitted constant. A fit that ends at one has absorbed something that is
not declared.

- product: no kernel is faster than the peak at the clock that power leaves; those of cuBLAS reach
  0.84 of it in a step on an H200 (benchmarks/results/h200), and under 0.6 no library would be used.
- older: libraries do not become slower; a quarter is more than any release gained.
- attention: FlashAttention-3 reaches 0.75 of an H100's peak, 0.88 of what power leaves of it,
  without a mask, and FlashAttention-2 0.73 of an A100's (Shah et al. 2024, Dao 2023).
- memory: a copy on an H200 moves 0.88 of the memory's bandwidth and AdamW 0.98
  (benchmarks/results/h200); kernels that keep values in cache between passes move less than is
  counted, plain ones are slower.
- launch: 2 microseconds in C++, up to 100 for an operator of torch called from Python on a slow
  host.
- contention: at 9 (H100) and 12 (A100) a transfer between nodes delays compute by its whole
  duration.
"""
KERNELS: Mapping[str, Mapping[str, float]] = {
    "h100": {"product": 0.84, "attention": 0.695, "memory": 0.88},
    "a100": {"attention": 0.65, "memory": 0.88, "launch": 3.7e-5},
}
"""What kernels were seen to reach by themselves: the products of a step, cuDNN's attention and a
copy on an H200 (benchmarks/results/h200), and attention on an A100 (Dao 2023, figure 5, causal);
and the time of a kernel on the host of that H200, whose blocks of 120 kernels take 4.4 ms. A fit
departs from these only for what the tables tell, so that what few rows depend on stays where it was
measured."""
GUESSES: Mapping[str, Mapping[str, float]] = {
    "h100": {"older": 0.95, "contention": 0.5},
    "a100": {"product": 0.85, "contention": 1.5},
}
"""Where fits begin with the other constants: within the bounds, and from no table."""
_PULL, _STAY = 0.1, 0.01
"""Error of a table that is accepted for a constant to be nearer to `KERNELS` or to `GUESSES`, per
unit of its logarithm: a mean error of 1% or 0.1% for a tenth of the constant."""
MOST_ROWS = 14
"""Most rows of a table that a fit uses."""
_MODELS = 3
"""Linear models of a fit, one after the other."""
_SOLVES = 200
"""Times that a linear model is solved with new weights."""
_REACH = 0.5
"""Change of a logarithm up to which a linear model is used."""
_STEP = 0.05
"""Change of a constant's logarithm that measures its slope."""


@dataclass(frozen=True)
class FittedRun:
    """A row, prepared to be predicted many times.

    Attributes:
        weight: All rows of a table together have 1.
        alternatives: What it may have run.
    """

    row: PublishedRun
    weight: float
    alternatives: tuple[PreparedStep, ...]

    def compute_error(self, constants: Constants) -> float:
        """Return the logarithm of predicted over measured seconds, times the weight."""
        constants = replace(constants, software=self.row.software)
        seconds = [step.estimate_seconds(constants) for step in self.alternatives]
        return self.weight * float(np.log(np.mean(seconds) / self.row.seconds))


def list_sources(family: str) -> list[tuple[str, ...]]:
    """Return the names of the tables with rows of a chip family, source by source."""
    sources: dict[str, tuple[str, ...]] = {}
    for name, table in TABLES.items():
        if any(find_cluster(row.cluster).chip.family == family for row in table.rows()):
            sources[table.citation] = (*sources.get(table.citation, ()), name)
    return list(sources.values())


def prepare_runs(family: str) -> dict[str, list[FittedRun]]:
    """Return at most `MOST_ROWS` rows of each measured table of a family, evenly spaced."""
    runs = {}
    for name in (name for names in list_sources(family) for name in names):
        if not TABLES[name].measured:
            continue
        rows = [r for r in TABLES[name].rows() if find_cluster(r.cluster).chip.family == family]
        rows = rows[:: -(-len(rows) // MOST_ROWS)]
        runs[name] = [_prepare_run(row, 1 / len(rows)) for row in rows]
    return runs


def _prepare_run(row: PublishedRun, weight: float) -> FittedRun:
    configs = row.configs if len(row.configs) == 1 else predict_run(row, shipped=True).near
    cluster = find_cluster(row.cluster)
    return FittedRun(
        row, weight, tuple(prepare_step(config, row.world, cluster) for config in configs)
    )


@dataclass(frozen=True)
class LinearErrors:
    """The errors of runs near some constants, as a linear function of logarithms of constants.

    Attributes:
        at: Logarithms of the constants.
        errors: Weighted errors there, by run.
        slopes: Their derivatives, by run and constant.
    """

    at: np.ndarray
    errors: np.ndarray
    slopes: np.ndarray

    def select(self, kept: Sequence[bool]) -> LinearErrors:
        """Return those of some runs."""
        return LinearErrors(self.at, self.errors[list(kept)], self.slopes[list(kept)])

    def minimize(self, low: np.ndarray, high: np.ndarray) -> np.ndarray:
        """Return the logarithms between two bounds with the least sum of absolute errors, by
        least squares with weights that are taken again from what is left."""
        at, damping = self.at, 1e-6 * np.eye(len(self.at))
        for _ in range(_SOLVES):
            errors = self.errors + self.slopes @ (at - self.at)
            weights = 1 / np.maximum(np.abs(errors), 1e-4)
            square = self.slopes.T @ (weights[:, None] * self.slopes) + damping
            move = np.linalg.solve(square, -self.slopes.T @ (weights * errors))
            at = np.clip(
                at + move / 2, np.maximum(low, self.at - _REACH), np.minimum(high, self.at + _REACH)
            )
        return at


class Fit:
    """Fits of one family to all of its measured tables, or to some of them.

    Args:
        family: Chip family.
        runs: All rows that are fitted to, by table.
    """

    def __init__(self, family: str, runs: Mapping[str, Sequence[FittedRun]]) -> None:
        self.start = get_family_constants(family)
        self.names = list(BOUNDS[family])
        begin, measured = {**GUESSES[family], **KERNELS[family]}, KERNELS[family]
        self.begin = np.log([begin[name] for name in self.names])
        self.pulls = np.array([_PULL if name in measured else _STAY for name in self.names])
        self.low, self.high = np.log(np.array(list(BOUNDS[family].values()))).T
        self.runs = [run for of_table in runs.values() for run in of_table]
        self.nearby = self._linearize(self.begin, self.runs)

    def run(self, without: Sequence[str] = ()) -> Constants:
        """Return the constants with the least absolute errors of all rows but those of some tables.
        Each linear model begins where the one before has its minimum."""
        kept = [run.row.table not in without for run in self.runs]
        runs = [run for run, is_kept in zip(self.runs, kept, strict=True) if is_kept]
        at = self._minimize(self.nearby.select(kept))
        for _ in range(_MODELS - 1):
            at = self._minimize(self._linearize(at, runs))
        return self._make_constants(at)

    def _minimize(self, model: LinearErrors) -> np.ndarray:
        """Return the logarithms with the least errors, with that of leaving where fits begin."""
        pulled = LinearErrors(
            model.at,
            np.concatenate([model.errors, self.pulls * (model.at - self.begin)]),
            np.concatenate([model.slopes, np.diag(self.pulls)]),
        )
        return pulled.minimize(self.low, self.high)

    def _make_constants(self, logs: np.ndarray) -> Constants:
        values: dict[str, Any] = dict(zip(self.names, map(float, np.exp(logs)), strict=True))
        return replace(self.start, **values)

    def _linearize(self, at: np.ndarray, runs: Sequence[FittedRun]) -> LinearErrors:
        def compute_errors(logs: np.ndarray) -> np.ndarray:
            constants = self._make_constants(logs)
            return np.array([run.compute_error(constants) for run in runs])

        errors = compute_errors(at)
        moved = [compute_errors(at + step) for step in _STEP * np.eye(len(at))]
        return LinearErrors(at, errors, (np.stack(moved, axis=1) - errors[:, None]) / _STEP)


def select_fitted(family: str, constants: Constants) -> dict[str, float]:
    """Return the fitted constants by name, with four digits."""
    return {name: float(f"{getattr(constants, name):.4g}") for name in BOUNDS[family]}


def write_fits(family: str, path: Path) -> None:
    """Fit a family to all of its sources, and without each; print the constants, and write the
    latter by family and table.

    Args:
        family: Chip family.
        path: The file, which keeps those of other families.
    """
    fits = Fit(family, prepare_runs(family))
    print(f"{family}: {select_fitted(family, fits.run())}", flush=True)
    left_out: dict[str, dict[str, float]] = {}
    for names in list_sources(family):
        constants = select_fitted(family, fits.run(without=names))
        print(f"without {', '.join(names)}: {constants}", flush=True)
        left_out |= dict.fromkeys(names, constants)
    written = json.loads(path.read_text("utf-8")) if path.exists() else {}
    path.write_text(json.dumps({**written, family: left_out}, indent=1) + "\n", "utf-8")
