"""Search: the best layouts of a config on a given number of GPUs, ranked.

All valid layouts are estimated at once. The best few of these, limited per kind, are then
simulated, and the simulation determines their order. If a model fits in no layout, the message has
the nearest alternatives that would work, with their price.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from megaframe.architecture.absorption import decide_absorption
from megaframe.config.batch_ramp import count_samples
from megaframe.config.schema import RunConfig
from megaframe.errors import UserError
from megaframe.hardware.cluster import list_cluster_names, load_cluster
from megaframe.layout import Layout
from megaframe.planner.candidates import (
    Candidates,
    SearchSpace,
)
from megaframe.planner.constants import Constants, get_cluster_constants
from megaframe.planner.layout_sizes import RECOMPUTE, Array
from megaframe.planner.peak_memory import fits_with_margin, resolve_recompute_blocks
from megaframe.planner.prediction import Prediction, predict
from megaframe.planner.vectorized import Estimates, estimate
from megaframe.validate.gradient_noise import find_gradient_noise_mistakes
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
    """A layout, the config that has it, and its prediction.

    Attributes:
        index: Its number among the candidates of a search, -1 outside of one.
    """

    config: RunConfig
    layout: Layout
    prediction: Prediction
    index: int = -1


@dataclass(frozen=True)
class SearchResult:
    """Result of a search.

    Attributes:
        choices: Simulated layouts that fit, best first.
        candidates, estimates: All layouts that were considered.
        estimated_seconds, seconds: How long the estimates and the whole search took.
    """

    choices: tuple[LayoutChoice, ...]
    candidates: Candidates
    estimates: Estimates
    estimated_seconds: float
    seconds: float

    @property
    def best(self) -> LayoutChoice:
        """The best layout."""
        return self.choices[0]


def search(space: SearchSpace, constants: Constants, simulated: int = SIMULATED) -> SearchResult:
    """Return the best layouts.

    Args:
        space: The layouts to choose among.
        constants: What kernels and collectives reach there.
        simulated: Number of layouts to simulate.

    Raises:
        UserError: No layout is valid or none fits; the message says what would be needed.
    """
    begin = time.perf_counter()
    space = replace(space, config=decide_absorption(space.config))
    gpus, cluster = space.gpus, space.cluster
    if gpus > cluster.size:
        raise UserError(
            f"{gpus} GPUs are more than the {cluster.size} of cluster {cluster.name}; use "
            f"{cluster.size} or fewer"
        )
    candidates = space.list_candidates()
    if not len(candidates):
        raise UserError(_describe_no_valid_layout(space))
    enumerated = time.perf_counter()
    estimates = estimate(space, constants, candidates)
    estimated = time.perf_counter()
    choices = _simulate_best(space, constants, candidates, estimates, simulated)
    if not choices:
        raise UserError(describe_no_fit(space, constants, candidates, estimates))
    end = time.perf_counter()
    return SearchResult(choices, candidates, estimates, estimated - enumerated, end - begin)


def _simulate_best(
    space: SearchSpace,
    constants: Constants,
    candidates: Candidates,
    estimates: Estimates,
    max_simulated: int,
) -> tuple[LayoutChoice, ...]:
    """Simulate the best candidates by estimate, and return those that fit, best first.

    Args:
        max_simulated: Number of candidates to simulate.
    """
    config, gpus, cluster = space.config, space.gpus, space.cluster
    fits = fits_with_margin(estimates.memory_bytes, cluster.chip)
    penalty = _compute_penalty(candidates)
    order = np.argsort(np.where(fits, estimates.step_seconds * penalty, np.inf), kind="stable")
    simulated_per_kind: Counter[tuple[int, ...]] = Counter()
    choices: list[LayoutChoice] = []
    simulated = 0
    passes = (
        candidates.make_sizes(config.train, config.parallel.islands).microbatches
        * candidates.pipeline
        * candidates.chunks
        * 3
    )
    for index in order.tolist():
        if simulated == max_simulated or not fits[index]:
            break
        kind = tuple(
            int(a[index]) for a in (candidates.tensor, candidates.context, candidates.pipeline)
        )
        if simulated_per_kind[kind] == _OF_A_KIND or (passes[index] > _PASSES and choices):
            continue
        candidate = space.make_config(candidates, index)
        sizes = {"data": int(candidates.data[index])}
        # A layout in which a measurement that is asked for is impossible is none. One rank has no
        # other, and is told.
        if gpus > 1 and any(find_gradient_noise_mistakes(candidate, sizes)):
            continue
        simulated_per_kind[kind] += 1
        simulated += 1
        validate_config(candidate, gpus, data=False)
        layout = Layout.from_parallel(candidate.parallel, gpus)
        variants = [candidate]
        if config.train.recompute_blocks == "auto" and candidate.train.recompute == "full":
            few = candidate.replace(train={"recompute": "selective", "recompute_blocks": "auto"})
            variants.append(resolve_recompute_blocks(few, layout, cluster.chip))
        for variant in variants:
            prediction = predict(variant, layout, cluster, constants)
            if fits_with_margin(sum(prediction.memory_bytes.values()), cluster.chip):
                choices.append(LayoutChoice(variant, layout, prediction, index))
    choices.sort(key=lambda choice: choice.prediction.step_seconds * penalty[choice.index])
    return tuple(choices)


def _compute_penalty(candidates: Candidates) -> Array:
    """Return for each candidate the factor by which its step counts as longer because its layout is
    less simple."""
    penalty = 1.0 + 0.001 * (candidates.zero + candidates.recompute)
    for name, share in _SIMPLER.items():
        penalty = penalty + share * (getattr(candidates, name) > 1)
    return penalty


def _describe_no_valid_layout(space: SearchSpace) -> str:
    train, model, gpus = space.config.train, space.config.model, space.gpus
    valid_gpus = [n for n in range(gpus, 0, -1) if len(replace(space, gpus=n).list_candidates())][
        :1
    ]
    fixed_text = "".join(f", {key}={value}" for key, value in space.fixed.items())
    return (
        f"no layout divides model.layers={model.layers}, model.heads={model.heads} and "
        f"train.global_batch={train.global_batch} among {gpus} GPUs{fixed_text}; "
        + (f"use {valid_gpus[0]} GPUs, or " if valid_gpus else "use ")
        + "a train.global_batch with more divisors"
    )


def describe_no_fit(
    space: SearchSpace, constants: Constants, candidates: Candidates, estimates: Estimates
) -> str:
    """Return the message if nothing fits: the least memory that the model needs, the layout that
    needs it, and what would work.

    Args:
        space: The layouts to choose among.
        constants: What kernels and collectives reach there.
        candidates: All of these layouts, at least one.
        estimates: Their estimates.
    """
    cluster = space.cluster
    index = int(np.argmin(estimates.memory_bytes))
    needed, capacity = estimates.memory_bytes[index] / _GIB, cluster.chip.memory / _GIB
    fixed_text = "".join(f", {key}={value}" for key, value in space.fixed.items())
    lines = [
        f"no layout on {space.gpus} GPUs of {cluster.name}{fixed_text} leaves a GPU with less than "
        f"{needed:.1f} GiB of its {capacity:.0f} GiB: {describe_candidate(candidates, index)}",
        *suggest_alternatives(space, constants),
    ]
    return "\n  ".join(lines)


def describe_candidate(candidates: Candidates, index: int) -> str:
    """Return the layout of candidate number `index` in words."""
    axes = ("tensor", "context", "pipeline", "chunks", "data", "expert", "expert_tensor")
    sizes = {name: int(getattr(candidates, name)[index]) for name in axes}
    words = [f"{name} {size}" for name, size in sizes.items() if size > 1]
    replicas = int(candidates.data_replicate[index])
    if replicas > 1:
        words.append(f"replicas {replicas}")
    if sizes["pipeline"] > 1:
        words.append(candidates.get_schedule(index).name)
    words.append(f"zero {int(candidates.zero[index])}")
    words.append(f"recompute {RECOMPUTE[int(candidates.recompute[index])]}")
    words.append(f"microbatch {int(candidates.microbatch[index])}")
    return ", ".join(words)


def suggest_alternatives(space: SearchSpace, constants: Constants) -> Iterator[str]:
    """Yield what would work if no layout fits: without the given keys, more GPUs, optimizer state
    in 8 bits, a chip with more memory.

    Args:
        space: The layouts of which none fits.
        constants: What kernels and collectives reach there.
    """
    config, gpus, cluster = space.config, space.gpus, space.cluster
    if space.fixed:
        unfixed = _describe_fastest(replace(space, fixed={}), constants)
        if unfixed:
            yield f"without the given keys: {unfixed}"
    more_gpus = _suggest_more_gpus(space, constants)
    if more_gpus:
        yield more_gpus
    if config.optim.state == "master":
        with_int8 = replace(space, config=config.replace(optim={"state": "int8"}))
        int8_layout = _describe_fastest(with_int8, constants)
        if int8_layout:
            yield f"with optim.state=int8: {int8_layout}"
    for name in list_cluster_names():
        other = load_cluster(name)
        larger = other.chip.memory > cluster.chip.memory and other.size >= gpus
        if larger and other.chip.family in ("h100", "b200"):
            there = replace(space, cluster=other)
            fitting = _describe_fastest(there, get_cluster_constants(other))
            if fitting:
                yield f"{gpus} GPUs of {name}: {fitting}"
                return


def _suggest_more_gpus(space: SearchSpace, constants: Constants) -> str | None:
    """Return the smallest number of GPUs, doubled repeatedly, on which the model fits, with its
    layout; None if there is none."""
    gpus, cluster = 2 * space.gpus, space.cluster
    while gpus <= min(_MOST_TIMES * space.gpus, cluster.size):
        fitting = _describe_fastest(replace(space, gpus=gpus), constants)
        if fitting:
            return (
                f"{gpus} {'ranks' if cluster.chip.is_host else 'GPUs'} of {cluster.name}: {fitting}"
            )
        gpus *= 2
    return None


def find_fastest(space: SearchSpace, constants: Constants) -> tuple[Candidates, int, float] | None:
    """Return all candidates, the index of the one with the shortest estimated step that fits, and
    its seconds; None if no layout is valid and fits.

    Args:
        space: The layouts to choose among.
        constants: What kernels and collectives reach there.
    """
    candidates = space.list_candidates()
    if not len(candidates):
        return None
    estimates = estimate(space, constants, candidates)
    fits = fits_with_margin(estimates.memory_bytes, space.cluster.chip)
    if not fits.any():
        return None
    index = int(np.argmin(np.where(fits, estimates.step_seconds, np.inf)))
    return candidates, index, float(estimates.step_seconds[index])


def _describe_fastest(space: SearchSpace, constants: Constants) -> str | None:
    """Return the fastest layout that fits in words, with its step and price; None if none fits."""
    fastest = find_fastest(space, constants)
    if fastest is None:
        return None
    candidates, index, step = fastest
    train, price = space.config.train, space.gpus * space.cluster.price
    whole_steps = count_samples(train, train.steps) / train.global_batch  # of the full batch
    dollars = step * whole_steps / 3600 * price
    return (
        f"{step:.3g} s a step, ${price:,.0f} an hour, ${dollars:,.0f} for "
        f"train.steps={train.steps} ({describe_candidate(candidates, index)})"
    )
