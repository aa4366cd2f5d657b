"""Search: the best layouts of a config on a given number of GPUs, ranked.

All valid layouts are estimated at once. The best few of these, limited per kind, are then
simulated, and the simulation determines their order.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from megaframe.config.schema import RunConfig
from megaframe.errors import UserError
from megaframe.hardware.cluster import Cluster
from megaframe.layout import Layout
from megaframe.planner.candidates import Array, Candidates
from megaframe.planner.constants import Constants
from megaframe.planner.enumerate import Fixed, candidates, configured
from megaframe.planner.memory_budget import leaves_room
from megaframe.planner.recompute_budget import settled
from megaframe.planner.step import Prediction, predict
from megaframe.planner.suggestions import nothing_fits
from megaframe.planner.vectorized import Estimates, estimate
from megaframe.validate.run import check

SIMULATED = 24
"""Number of layouts that are simulated."""
_OF_A_KIND = 2
"""The most of these with the same numbers of tensor, context and pipeline ranks."""
_SIMPLER = {"context": 0.004, "data_replicate": 0.002, "expert_tensor": 0.002, "chunks": 0.002}
"""Share of the step that an axis must gain to be used at all; otherwise rounding errors would
choose axes that gain nothing. `zero` and `recompute` must gain 0.001 for each level."""
_PASSES = 60_000
"""Most passes of a schedule that a search simulates; more would take seconds per layout."""


@dataclass(frozen=True)
class Choice:
    """A layout, the config that has it, and its prediction. place: its index among the candidates
    of a search, -1 outside of one."""

    config: RunConfig
    layout: Layout
    prediction: Prediction
    place: int = -1


@dataclass(frozen=True)
class Found:
    """Result of a search. choices: simulated layouts that fit, best first. candidates, estimates:
    all layouts that were considered. estimated_seconds, seconds: how long the estimates and the
    whole search took."""

    choices: tuple[Choice, ...]
    candidates: Candidates
    estimates: Estimates
    estimated_seconds: float
    seconds: float

    @property
    def best(self) -> Choice:
        """The best layout."""
        return self.choices[0]


def search(
    config: RunConfig,
    gpus: int,
    cluster: Cluster,
    constants: Constants,
    fixed: Fixed | None = None,
    simulated: int = SIMULATED,
) -> Found:
    """Return the best layouts for `gpus` GPUs.

    fixed: values of keys that the search may not choose (`valid.FREE`). simulated: number of
    layouts to simulate. Raises `UserError` if none is valid or none fits, with what would be
    needed.
    """
    begin = time.perf_counter()
    if gpus > cluster.size:
        raise UserError(
            f"{gpus} GPUs are more than the {cluster.size} of cluster {cluster.name}; use "
            f"{cluster.size} or fewer"
        )
    every = candidates(config, gpus, cluster, fixed)
    if not len(every):
        raise UserError(_none_valid(config, gpus, cluster, fixed))
    before = time.perf_counter()
    estimates = estimate(config, cluster, constants, every)
    between = time.perf_counter()
    choices = _simulated(config, gpus, cluster, constants, every, estimates, simulated)
    if not choices:
        raise UserError(nothing_fits(config, gpus, cluster, constants, every, estimates, fixed))
    end = time.perf_counter()
    return Found(choices, every, estimates, between - before, end - begin)


def _simulated(
    config: RunConfig,
    gpus: int,
    cluster: Cluster,
    constants: Constants,
    every: Candidates,
    estimates: Estimates,
    most: int,
) -> tuple[Choice, ...]:
    """Simulate the best candidates by estimate, and return those that fit, best first.

    most: number of candidates to simulate.
    """
    fits = leaves_room(estimates.memory_bytes, cluster.chip)
    penalty = _penalty(every)
    order = np.argsort(np.where(fits, estimates.step_seconds * penalty, np.inf), kind="stable")
    kinds: Counter[tuple[int, ...]] = Counter()
    found: list[Choice] = []
    looked = 0
    passes = every.sizes(config).microbatches * every.pipeline * every.chunks * 3
    for place in order.tolist():
        if looked == most or not fits[place]:
            break
        kind = tuple(int(a[place]) for a in (every.tensor, every.context, every.pipeline))
        if kinds[kind] == _OF_A_KIND or (passes[place] > _PASSES and found):
            continue
        kinds[kind] += 1
        looked += 1
        one = configured(config, every, place)
        check(one, gpus, data=False)
        layout = Layout.from_parallel(one.parallel, gpus)
        for each in _with_fewer(one, config, layout, cluster):
            prediction = predict(each, layout, cluster, constants)
            if leaves_room(sum(prediction.memory_bytes.values()), cluster.chip):
                found.append(Choice(each, layout, prediction, place))
    return tuple(sorted(found, key=lambda one: one.prediction.step_seconds * penalty[one.place]))


def _with_fewer(
    one: RunConfig, asked: RunConfig, layout: Layout, cluster: Cluster
) -> Iterator[RunConfig]:
    """Yield the config of a candidate. If `asked` has `train.recompute_blocks=auto` and the
    candidate recomputes all blocks, also yield it with as few recomputed blocks as fit."""
    yield one
    if asked.train.recompute_blocks == "auto" and one.train.recompute == "full":
        train = one.train.model_copy(update={"recompute": "selective", "recompute_blocks": "auto"})
        yield settled(one.model_copy(update={"train": train}), layout, cluster.chip)


def _penalty(every: Candidates) -> Array:
    """Return for each candidate the factor by which its step counts as longer because its layout is
    less simple."""
    found = 1.0 + 0.001 * (every.zero + every.recompute)
    for name, share in _SIMPLER.items():
        found = found + share * (getattr(every, name) > 1)
    return found


def _none_valid(config: RunConfig, gpus: int, cluster: Cluster, fixed: Fixed | None) -> str:
    train, model = config.train, config.model
    near = [n for n in range(gpus, 0, -1) if len(candidates(config, n, cluster, fixed))][:1]
    given = "".join(f", {key}={value}" for key, value in (fixed or {}).items())
    return (
        f"no layout divides model.layers={model.layers}, model.heads={model.heads} and "
        f"train.global_batch={train.global_batch} among {gpus} GPUs{given}; "
        + (f"use {near[0]} GPUs, or " if near else "use ")
        + "a train.global_batch with more divisors"
    )
