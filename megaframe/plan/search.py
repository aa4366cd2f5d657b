"""Search: the best layouts of a config on so many GPUs, ranked, and why.

All valid ones are estimated at once; the best few, no more than some of one kind, are then
simulated, and what comes out of that is the order.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from megaframe.config.schema import RunConfig
from megaframe.errors import UserError
from megaframe.layout import Layout
from megaframe.plan.again import settled
from megaframe.plan.candidates import SCHEDULES, Array, Candidates
from megaframe.plan.check import check
from megaframe.plan.cluster import Cluster
from megaframe.plan.constants import Constants
from megaframe.plan.fast import Estimates, estimate
from megaframe.plan.nearest import nothing_fits
from megaframe.plan.room import leaves_room
from megaframe.plan.sizes import RECOMPUTE
from megaframe.plan.step import Prediction, predict
from megaframe.plan.valid import PARALLEL, Fixed, candidates

SIMULATED = 24
"""Survivors of the estimates."""
_OF_A_KIND = 2
"""Of these, most with the same tensor, context and pipeline ranks."""
_SIMPLER = {"context": 0.004, "data_replicate": 0.002, "expert_tensor": 0.002, "chunks": 0.002}
"""What an axis must gain, as a share of the step, to be used at all: those that gain nothing would
else be chosen by the last digit. Dearer ones of zero and recompute, each step of them, 0.001."""
_PASSES = 60_000
"""Most passes of a schedule that is simulated for a search: more would take seconds each."""


@dataclass(frozen=True)
class Choice:
    """A layout, the config that has it, and what is predicted of it. place: among candidates, of a
    search."""

    config: RunConfig
    layout: Layout
    prediction: Prediction
    place: int = -1


@dataclass(frozen=True)
class Found:
    """choices: those that fit, fastest first. candidates, estimates: all that were considered.
    estimated_seconds, seconds: what the estimates and the whole search took."""

    choices: tuple[Choice, ...]
    candidates: Candidates
    estimates: Estimates
    estimated_seconds: float
    seconds: float

    @property
    def best(self) -> Choice:
        """The first."""
        return self.choices[0]


def search(
    config: RunConfig,
    gpus: int,
    cluster: Cluster,
    constants: Constants,
    fixed: Fixed | None = None,
    simulated: int = SIMULATED,
) -> Found:
    """The best layouts. Raises `UserError` where none is valid or none fits, with what would be
    needed."""
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


def configured(config: RunConfig, one: Candidates, place: int) -> RunConfig:
    """The config with the layout at a place."""
    parallel = {name: int(getattr(one, name)[place]) for name in PARALLEL}
    given = config.parallel
    changed = {
        **parallel,
        "schedule": SCHEDULES[int(one.schedule[place])],
        "schedule_group": None,
        "schedule_memory": None,
        "layers_per_stage": None,
        "tensor_chunks": given.tensor_chunks if parallel["tensor"] > 1 else 1,
        "expert_overlap": given.expert_overlap
        and parallel["pipeline"] > 1
        and parallel["expert"] * parallel["expert_tensor"] > 1
        and parallel["zero"] < 3,
    }
    train = {
        "microbatch": int(one.microbatch[place]),
        "recompute": RECOMPUTE[int(one.recompute[place])],
        "recompute_blocks": 0,
    }
    return config.model_copy(
        update={
            "parallel": given.model_copy(update=changed),
            "train": config.train.model_copy(update=train),
        }
    )


def _simulated(
    config: RunConfig,
    gpus: int,
    cluster: Cluster,
    constants: Constants,
    every: Candidates,
    estimates: Estimates,
    most: int,
) -> tuple[Choice, ...]:
    """The best that fit, by simulation."""
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
    """The config of a candidate; where `train.recompute_blocks=auto` was asked for and all blocks
    run again, also with as few of them as fit."""
    yield one
    if asked.train.recompute_blocks == "auto" and one.train.recompute == "full":
        train = one.train.model_copy(update={"recompute": "selective", "recompute_blocks": "auto"})
        yield settled(one.model_copy(update={"train": train}), layout, cluster.chip)


def _penalty(every: Candidates) -> Array:
    """Factor by which the step of a less simple layout counts as longer."""
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
