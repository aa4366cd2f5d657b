"""How long a step takes, where the time goes, and whether it fits.

    cluster = load_cluster("h100-ib")
    constants = constants_of(cluster.chip.family)
    predict(config, layout, cluster, constants) -> Prediction      exact: the schedule is simulated
    estimate(config, cluster, constants, candidates) -> Estimates  closed forms on arrays, `fast.py`

Both are the same arithmetic (`costs.py`), on numbers or on numpy arrays; they differ in the bubble,
which `predict` simulates and `estimate` takes from closed forms, and in stages, whose unequal
works `estimate` only bounds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from megaframe.config.schema import RunConfig
from megaframe.layout import Layout
from megaframe.plan.cluster import Cluster
from megaframe.plan.constants import Constants


@dataclass(frozen=True)
class Prediction:
    """One step of a run, predicted.

    step_seconds: mean time of a step, stragglers included, failures not.
    breakdown: seconds by part, which add up to `step_seconds`: compute, tensor, context, expert,
    data, pipeline (exposed communication of each axis), bubble, optimizer, other.
    mfu, hfu: of the chip's dense peak, with causal attention; None where no peak is known.
    tflops_per_gpu: of the model, causal attention counted as half.
    memory_bytes: by kind, of the rank that needs most. fits: whether that is within the chip.
    reasons: sentences with numbers, the most important first.
    """

    step_seconds: float
    breakdown: Mapping[str, float]
    mfu: float | None
    hfu: float | None
    tflops_per_gpu: float
    tokens_per_second: float
    memory_bytes: Mapping[str, int]
    fits: bool
    reasons: tuple[str, ...]


def predict(
    config: RunConfig, layout: Layout, cluster: Cluster, constants: Constants
) -> Prediction:
    """The step of `config` on `layout`; `config` has passed `check`.

    Raises `UserError` where the cluster has no such number of ranks or no such type.
    """
    raise NotImplementedError
