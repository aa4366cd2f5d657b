"""Search: the best layouts of a config on a given number of GPUs, ranked.

All valid layouts are estimated at once. The best few of these, limited per kind, are then
simulated, and the simulation determines their order. If a model fits in no layout, the message has
the nearest alternatives that would work, with their price.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from megaframe.config.schema import RunConfig
from megaframe.errors import UserError
from megaframe.hardware.cluster import Cluster, cluster_names, load_cluster
from megaframe.layout import Layout
from megaframe.planner.candidates import (
    Candidates,
    FixedKeys,
    apply_candidate,
    enumerate_candidates,
)
from megaframe.planner.constants import Constants, cluster_constants
from megaframe.planner.layout_sizes import RECOMPUTE, SCHEDULES, Array
from megaframe.planner.peak_memory import fits_with_margin, resolve_recompute_blocks
from megaframe.planner.prediction import Prediction, predict
from megaframe.planner.vectorized import Estimates, estimate
from megaframe.validate.run import validate_config

SIMULATED = 24
"""Number of layouts that are simulated."""
_OF_A_KIND = 2
"""The most of these with the same numbers of tensor, context and pipeline ranks."""
_SIMPLER = {"context": 0.004, "data_replicate": 0.002, "expert_tensor": 0.002, "chunks": 0.002}
"""Share of the step that an axis must gain to be used at all; otherwise rounding errors would
choose axes that gain nothing. `zero` and `recompute` must gain 0.001 for each level."""
_PASSES = 60_000
"""Most passes of a schedule that a search simulates; more would take seconds per layout."""
_MOST_TIMES = 1024
"""Largest number of GPUs to try, as a multiple of the requested number."""
_GIB = 2.0**30


@dataclass(frozen=True)
class LayoutChoice:
    """A layout, the config that has it, and its prediction. place: its index among the candidates
    of a search, -1 outside of one."""

    config: RunConfig
    layout: Layout
    prediction: Prediction
    place: int = -1


@dataclass(frozen=True)
class SearchResult:
    """Result of a search. choices: simulated layouts that fit, best first. candidates, estimates:
    all layouts that were considered. estimated_seconds, seconds: how long the estimates and the
    whole search took."""

    choices: tuple[LayoutChoice, ...]
    candidates: Candidates
    estimates: Estimates
    estimated_seconds: float
    seconds: float

    @property
    def best(self) -> LayoutChoice:
        """The best layout."""
        return self.choices[0]


def search(
    config: RunConfig,
    gpus: int,
    cluster: Cluster,
    constants: Constants,
    fixed: FixedKeys | None = None,
    simulated: int = SIMULATED,
) -> SearchResult:
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
    every = enumerate_candidates(config, gpus, cluster, fixed)
    if not len(every):
        raise UserError(_describe_no_valid_layout(config, gpus, cluster, fixed))
    before = time.perf_counter()
    estimates = estimate(config, cluster, constants, every)
    between = time.perf_counter()
    choices = _simulate_best(config, gpus, cluster, constants, every, estimates, simulated)
    if not choices:
        raise UserError(describe_no_fit(config, gpus, cluster, constants, every, estimates, fixed))
    end = time.perf_counter()
    return SearchResult(choices, every, estimates, between - before, end - begin)


def _simulate_best(
    config: RunConfig,
    gpus: int,
    cluster: Cluster,
    constants: Constants,
    every: Candidates,
    estimates: Estimates,
    most: int,
) -> tuple[LayoutChoice, ...]:
    """Simulate the best candidates by estimate, and return those that fit, best first.

    most: number of candidates to simulate.
    """
    fits = fits_with_margin(estimates.memory_bytes, cluster.chip)
    penalty = _penalty(every)
    order = np.argsort(np.where(fits, estimates.step_seconds * penalty, np.inf), kind="stable")
    kinds: Counter[tuple[int, ...]] = Counter()
    found: list[LayoutChoice] = []
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
        one = apply_candidate(config, every, place)
        validate_config(one, gpus, data=False)
        layout = Layout.from_parallel(one.parallel, gpus)
        for each in _with_fewer_recomputed(one, config, layout, cluster):
            prediction = predict(each, layout, cluster, constants)
            if fits_with_margin(sum(prediction.memory_bytes.values()), cluster.chip):
                found.append(LayoutChoice(each, layout, prediction, place))
    return tuple(sorted(found, key=lambda one: one.prediction.step_seconds * penalty[one.place]))


def _with_fewer_recomputed(
    one: RunConfig, asked: RunConfig, layout: Layout, cluster: Cluster
) -> Iterator[RunConfig]:
    """Yield the config of a candidate. If `asked` has `train.recompute_blocks=auto` and the
    candidate recomputes all blocks, also yield it with as few recomputed blocks as fit."""
    yield one
    if asked.train.recompute_blocks == "auto" and one.train.recompute == "full":
        train = one.train.model_copy(update={"recompute": "selective", "recompute_blocks": "auto"})
        yield resolve_recompute_blocks(
            one.model_copy(update={"train": train}), layout, cluster.chip
        )


def _penalty(every: Candidates) -> Array:
    """Return for each candidate the factor by which its step counts as longer because its layout is
    less simple."""
    found = 1.0 + 0.001 * (every.zero + every.recompute)
    for name, share in _SIMPLER.items():
        found = found + share * (getattr(every, name) > 1)
    return found


def _describe_no_valid_layout(
    config: RunConfig, gpus: int, cluster: Cluster, fixed: FixedKeys | None
) -> str:
    train, model = config.train, config.model
    near = [n for n in range(gpus, 0, -1) if len(enumerate_candidates(config, n, cluster, fixed))][
        :1
    ]
    given = "".join(f", {key}={value}" for key, value in (fixed or {}).items())
    return (
        f"no layout divides model.layers={model.layers}, model.heads={model.heads} and "
        f"train.global_batch={train.global_batch} among {gpus} GPUs{given}; "
        + (f"use {near[0]} GPUs, or " if near else "use ")
        + "a train.global_batch with more divisors"
    )


def describe_no_fit(
    config: RunConfig,
    gpus: int,
    cluster: Cluster,
    constants: Constants,
    every: Candidates,
    estimates: Estimates,
    fixed: FixedKeys | None = None,
) -> str:
    """Return the message if nothing fits: the least memory that the model needs, the layout that
    needs it, and what would work."""
    place = int(np.argmin(estimates.memory_bytes))
    needed, there = estimates.memory_bytes[place] / _GIB, cluster.chip.memory / _GIB
    asked = "".join(f", {key}={value}" for key, value in (fixed or {}).items())
    lines = [
        f"no layout on {gpus} GPUs of {cluster.name}{asked} leaves a GPU with less than "
        f"{needed:.1f} GiB of its {there:.0f} GiB: {describe_candidate(every, place)}",
        *suggest_alternatives(config, gpus, cluster, constants, fixed),
    ]
    return "\n  ".join(lines)


def describe_candidate(every: Candidates, place: int) -> str:
    """Return the layout of candidate number `place` in words."""
    axes = ("tensor", "context", "pipeline", "chunks", "data", "expert", "expert_tensor")
    sizes = {name: int(getattr(every, name)[place]) for name in axes}
    named = [f"{name} {size}" for name, size in sizes.items() if size > 1]
    replicas = int(every.data_replicate[place])
    if replicas > 1:
        named.append(f"replicas {replicas}")
    if sizes["pipeline"] > 1:
        named.append(SCHEDULES[int(every.schedule[place])])
    named.append(f"zero {int(every.zero[place])}")
    named.append(f"recompute {RECOMPUTE[int(every.recompute[place])]}")
    named.append(f"microbatch {int(every.microbatch[place])}")
    return ", ".join(named)


def suggest_alternatives(
    config: RunConfig, gpus: int, cluster: Cluster, constants: Constants, fixed: FixedKeys | None
) -> Iterator[str]:
    """Yield what would work if no layout fits: without the given keys, more GPUs, optimizer state
    in 8 bits, a chip with more memory."""
    if fixed:
        free = _describe_fastest(config, gpus, cluster, constants)
        if free:
            yield f"without the given keys: {free}"
    more = _suggest_more_gpus(config, gpus, cluster, constants, fixed)
    if more:
        yield more
    if config.optim.state == "master":
        fewer = config.model_copy(
            update={"optim": config.optim.model_copy(update={"state": "int8"})}
        )
        small = _describe_fastest(fewer, gpus, cluster, constants, fixed)
        if small:
            yield f"with optim.state=int8: {small}"
    for name in cluster_names():
        other = load_cluster(name)
        larger = other.chip.memory > cluster.chip.memory and other.size >= gpus
        if larger and other.chip.family in ("h100", "b200"):
            found = _describe_fastest(config, gpus, other, cluster_constants(other), fixed)
            if found:
                yield f"{gpus} GPUs of {name}: {found}"
                return


def _suggest_more_gpus(
    config: RunConfig, gpus: int, cluster: Cluster, constants: Constants, fixed: FixedKeys | None
) -> str | None:
    """Return the smallest number of GPUs, doubled repeatedly, on which the model fits, with its
    layout; None if there is none."""
    times = 2
    while times <= _MOST_TIMES and gpus * times <= cluster.size:
        found = _describe_fastest(config, gpus * times, cluster, constants, fixed)
        if found:
            kind = "ranks" if cluster.chip.is_host else "GPUs"
            return f"{gpus * times} {kind} of {cluster.name}: {found}"
        times *= 2
    return None


def find_fastest(
    config: RunConfig,
    gpus: int,
    cluster: Cluster,
    constants: Constants,
    fixed: FixedKeys | None = None,
) -> tuple[Candidates, int, float] | None:
    """Return all candidates, the index of the one with the shortest estimated step that fits, and
    its seconds; None if no layout is valid and fits."""
    every = enumerate_candidates(config, gpus, cluster, fixed)
    if not len(every):
        return None
    found = estimate(config, cluster, constants, every)
    fits = fits_with_margin(found.memory_bytes, cluster.chip)
    if not fits.any():
        return None
    place = int(np.argmin(np.where(fits, found.step_seconds, np.inf)))
    return every, place, float(found.step_seconds[place])


def _describe_fastest(
    config: RunConfig,
    gpus: int,
    cluster: Cluster,
    constants: Constants,
    fixed: FixedKeys | None = None,
) -> str | None:
    """Return the fastest layout that fits in words, with its step and price; None if none fits."""
    found = find_fastest(config, gpus, cluster, constants, fixed)
    if found is None:
        return None
    every, place, step = found
    dollars = step * config.train.steps / 3600 * gpus * cluster.price
    return (
        f"{step:.3g} s a step, ${gpus * cluster.price:,.0f} an hour, ${dollars:,.0f} for "
        f"train.steps={config.train.steps} ({describe_candidate(every, place)})"
    )
