"""Estimates of many layouts of one config at a time, by closed forms on arrays."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from megaframe.config.schema import RunConfig
from megaframe.plan.cluster import Cluster
from megaframe.plan.constants import Constants

Array = np.ndarray[Any, Any]
RECOMPUTE = ("none", "selective", "full")
SCHEDULES = (
    "gpipe",
    "1f1b",
    "interleaved",
    "breadth-first",
    "zb-h1",
    "zb-h2",
    "zb-v",
    "v-half",
    "dualpipe-v",
)


@dataclass(frozen=True)
class Candidates:
    """Layouts to estimate, a whole number in each array for each of them; they must be valid.

    recompute: index into `RECOMPUTE`. schedule: index into `SCHEDULES`. `train.global_batch`,
    precision, model and optimizer are those of the config for all.
    """

    tensor: Array
    context: Array
    pipeline: Array
    chunks: Array
    data: Array
    data_replicate: Array
    expert: Array
    expert_tensor: Array
    zero: Array
    recompute: Array
    microbatch: Array
    schedule: Array


@dataclass(frozen=True)
class Estimates:
    """Of each candidate: seconds of a step, bytes of the worst rank, whether these fit, and the
    seconds by part, named as in `Prediction.breakdown`."""

    step_seconds: Array
    memory_bytes: Array
    fits: Array
    breakdown: Mapping[str, Array]


def estimate(
    config: RunConfig, cluster: Cluster, constants: Constants, candidates: Candidates
) -> Estimates:
    """Estimates of all candidates at once; at least 100,000 a second."""
    raise NotImplementedError
