"""Fit of a law to losses of small runs, to say what a larger one will reach.

Of runs that have the same number of tokens for each parameter, the loss is E + A C^-a in their
FLOPs (Kaplan et al. 2020, section 6; Hoffmann et al. 2022, with D proportional to N and equal
exponents).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megaframe.errors import UserError

LEAST_RUNS = 3
"""As many as the law has numbers."""
_LEAST_EXPONENT, _MOST_EXPONENT, _TRIED, _REFINEMENTS = 0.01, 1.0, 201, 4


@dataclass(frozen=True)
class ComputeLaw:
    """The loss E + A (C / C0)^-a.

    Attributes:
        irreducible: E, in nats per token.
        factor: A, what is above E at C0.
        exponent: a.
        unit: C0, in FLOPs.
    """

    irreducible: float
    factor: float
    exponent: float
    unit: float

    def compute_loss(self, flops: float) -> float:
        """Return the loss after so many FLOPs, in nats per token."""
        return float(self.irreducible + self.factor * (flops / self.unit) ** -self.exponent)


def fit_compute_law(flops: Sequence[float], losses: Sequence[float]) -> ComputeLaw:
    """Return the law whose relative errors have the smallest sum of squares, with E at least 0.

    For each exponent the best E and A are those of a linear problem, so only exponents are tried.

    Args:
        flops: C of each run.
        losses: Of these runs, in nats per token.

    Raises:
        UserError: There are fewer runs than numbers of the law, or losses do not fall.
    """
    sizes, values = np.array(flops, float), np.array(losses, float)
    if len({*flops}) < LEAST_RUNS:
        raise UserError(
            f"{len({*flops})} runs of different sizes are too few to fit the {LEAST_RUNS} numbers "
            f"of E + A C^-a; run {LEAST_RUNS} or more"
        )
    unit = float(np.exp(np.log(sizes).mean()))
    exponents = np.geomspace(_LEAST_EXPONENT, _MOST_EXPONENT, _TRIED)
    for _ in range(_REFINEMENTS):
        fits = [_fit_linear((sizes / unit) ** -exponent, values) for exponent in exponents]
        best = int(np.argmin([error for *_, error in fits]))
        exponent, (irreducible, factor, _) = float(exponents[best]), fits[best]
        # Between the neighbours of the best one the error has one minimum.
        around = exponents[max(0, best - 1)], exponents[min(best + 1, _TRIED - 1)]
        exponents = np.geomspace(*around, _TRIED)
    if factor <= 0.0:
        raise UserError(
            f"the losses {', '.join(f'{loss:.4g}' for loss in losses)} do not fall with the FLOPs "
            f"of the runs; look for a better learning rate, or train longer"
        )
    return ComputeLaw(irreducible, factor, exponent, unit)


def _fit_linear(powers: np.ndarray, losses: np.ndarray) -> tuple[float, float, float]:
    """Return E >= 0 and A for one exponent, and the sum of squares of relative errors."""
    columns = np.stack((1.0 / losses, powers / losses), 1)
    (irreducible, factor), *_ = np.linalg.lstsq(columns, np.ones(len(losses)), rcond=None)
    if irreducible < 0.0:
        irreducible, scaled = 0.0, columns[:, 1]
        factor = scaled.sum() / (scaled @ scaled)
    errors = columns @ (irreducible, factor) - 1.0
    return float(irreducible), float(factor), float(errors @ errors)
