"""Fit: whether every rank has the memory that it needs, and the nearest changes if one does not.

What a run needs is planned to a few percent. So only what needs more than there is cannot fit, and
what fits with less than that to spare gets a warning.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from megaframe.architecture.pipeline import build_step_schedule
from megaframe.config.keys import format_value
from megaframe.config.schema import RunConfig
from megaframe.errors import UserError
from megaframe.hardware.chips import Chip
from megaframe.hardware.cluster import DEFAULT, load_cluster
from megaframe.layout import Layout
from megaframe.planner.candidates import Candidates, SearchSpace
from megaframe.planner.constants import Constants, get_cluster_constants
from megaframe.planner.layout_search import search, suggest_alternatives
from megaframe.planner.layout_sizes import RECOMPUTE, Array
from megaframe.planner.peak_memory import (
    compute_pipeline_memory,
    fits_with_margin,
    resolve_recompute_blocks,
)
from megaframe.planner.prediction import predict
from megaframe.planner.vectorized import estimate
from megaframe.schedule.named import find_named_schedule
from megaframe.validate.run import find_mistakes

_GIB = 2.0**30
_AXES = ("tensor", "context", "pipeline", "expert", "expert_tensor", "data_replicate")
_SECTIONS = ("parallel", "train", "optim")
_TRIES, _SIMULATED = 6, 4
"""Most changes of the same axes that are predicted, and most layouts that the search simulates:
few, because each takes up to a second."""


@dataclass(frozen=True)
class MemoryFit:
    """What the rank that needs most memory needs, and what its device has.

    Attributes:
        rank: The first rank with its pipeline coordinate.
        kinds: Bytes by kind.
        chip: The device.
        ranks: Ranks, from that one on, that share the device's memory, as those of a host do;
            `kinds` are of all of them.
    """

    rank: int
    kinds: Mapping[str, int]
    chip: Chip
    ranks: int = 1

    @property
    def needed(self) -> int:
        """Bytes on the device, including what its software takes."""
        return sum(self.kinds.values())

    @property
    def fits(self) -> bool:
        """Whether the device has as many bytes."""
        return self.needed <= self.chip.memory

    @property
    def is_tight(self) -> bool:
        """Whether so little is left that the plan may be wrong about what fits."""
        return not fits_with_margin(self.needed, self.chip)

    @property
    def tensors(self) -> int:
        """Bytes on the device without what its software takes, which is only estimated."""
        return self.needed - self.kinds.get("overhead", 0)

    def __str__(self) -> str:
        largest = sorted(self.kinds.items(), key=lambda item: -item[1])
        parts = ", ".join(f"{kind} {size / _GIB:.1f}" for kind, size in largest if size)
        who = f"rank {self.rank} needs"
        if self.ranks > 1:
            who = f"ranks {self.rank} to {self.rank + self.ranks - 1} of a host need"
        rest = self.chip.memory - self.needed
        amount = f"{abs(rest) / _GIB:.1f} GiB {'to spare' if rest >= 0 else 'too much'}"
        where = "the host" if self.chip.is_host else f"its device ({self.chip.name})"
        return (
            f"{who} {self.needed / _GIB:.1f} GiB by the plan, and {where} "
            f"has {self.chip.memory / _GIB:.1f} GiB: {amount} ({parts})"
        )


def compute_fit(config: RunConfig, layout: Layout, chip: Chip, ranks: int = 1) -> MemoryFit:
    """Return whether the ranks of a run fit on devices of this kind. The config must have passed
    `check`, with numbers for `train.recompute_blocks`.

    Args:
        config: The run.
        layout: Its ranks.
        chip: The devices.
        ranks: Consecutive ranks that share the memory of one.
    """
    microbatches = config.train.global_batch // (config.train.microbatch * layout.data)
    share = replace(chip, memory=chip.memory / ranks)
    memories = compute_pipeline_memory(
        config, layout, build_step_schedule(config, microbatches), share
    )
    if ranks == 1:
        stage, memory = max(memories.items(), key=lambda item: item[1].total)
        return MemoryFit(layout.rank(pipeline=stage), memory.kinds, chip)
    # Of a long pipeline some coordinates are not counted: they need at least as much as the least.
    least = min(memories.values(), key=lambda memory: memory.total)
    fits = []
    for first in range(0, layout.world, ranks):
        members = range(first, min(first + ranks, layout.world))
        kinds: Counter[str] = Counter()
        for rank in members:
            kinds.update(memories.get(layout.get_coordinate(rank)["pipeline"], least).kinds)
        fits.append(MemoryFit(first, kinds, chip, len(members)))
    return max(fits, key=lambda fit: fit.needed)


@dataclass(frozen=True)
class _Change:
    """A change of a config that does not fit.

    Attributes:
        space: The config, and its GPUs.
        config: What to run instead.
    """

    space: SearchSpace
    config: RunConfig

    @cached_property
    def overrides(self) -> dict[str, str]:
        """The overrides that lead to it, by key, of the sections that determine memory."""
        overrides = {}
        for section in _SECTIONS:
            before, after = (getattr(c, section) for c in (self.space.config, self.config))
            for name in type(before).model_fields:
                old, new = getattr(before, name), getattr(after, name)
                is_derived = name == "data" and old is None  # what the other axes leave over
                if old != new and not is_derived:
                    overrides[f"{section}.{name}"] = format_value(new)
        return overrides

    def describe(self, constants: Constants, *, timed: bool) -> str | None:
        """Return the change in words, with the step that it leads to if `timed`; None if it cannot
        run or does not fit either."""
        gpus, cluster = self.space.gpus, self.space.cluster
        if find_mistakes(self.config, gpus, data=False):
            return None
        layout = Layout.from_parallel(self.config.parallel, gpus)
        resolved = resolve_recompute_blocks(self.config, layout, cluster.chip)
        prediction = predict(resolved, layout, cluster, constants)
        memory = sum(prediction.memory_bytes.values())
        if not fits_with_margin(memory, cluster.chip):
            return None
        keys = " ".join(f"{key}={_quote_for_shell(value)}" for key, value in self.overrides.items())
        step = f", {prediction.step_seconds:.3g} s a step" if timed else ""
        return f"{keys}: {memory / _GIB:.1f} GiB{step}"


def suggest_changes(space: SearchSpace, constants: Constants) -> Iterator[str]:
    """Yield the nearest changes with which a config that does not fit does: overrides for its
    command line, with the memory and the step that they lead to. If there are none on as many GPUs,
    yield what a search would suggest.

    The smallest come first: recompute, ZeRO stage and microbatch on the same axes, as few of them
    as possible; then the optimizer's state in 8 bits; then the fastest layout. If the speed of the
    chip is not known, they are ordered by that of another one, and no step is told.

    Args:
        space: The config that does not fit, and its GPUs; if the cluster has fewer, there are no
            suggestions. Nothing is fixed.
        constants: What kernels and collectives reach there.
    """
    config, cluster = space.config, space.cluster
    if space.gpus > cluster.size:
        return
    has_rates = (
        cluster.chip.get_sustained_flops(config.train.precision) is not None
        and cluster.chip.has_rates
    )
    if not has_rates:
        other = load_cluster(DEFAULT)
        chip = replace(other.chip, name=cluster.chip.name, memory=cluster.chip.memory)
        space = replace(space, cluster=replace(other, chip=chip))
        constants = get_cluster_constants(other)
    offers: dict[frozenset[str], str] = {}
    tries = 0
    for changed in (
        *_change_on_same_axes(space, constants),
        *([config.replace(optim={"state": "int8"})] if config.optim.state == "master" else []),
    ):
        change = _Change(space, changed)
        keys = frozenset(change.overrides)
        # What a smaller change achieves alone needs no larger one that includes it.
        if tries < _TRIES and keys and not any(smaller <= keys for smaller in offers):
            text = change.describe(constants, timed=has_rates)
            offers |= {} if text is None else {keys: text}
            tries += 1
    suggestions = dict.fromkeys(offers.values())
    for changed in _find_fastest(space, constants):
        text = _Change(space, changed).describe(constants, timed=has_rates)
        suggestions |= {} if text is None else {text: None}
    yield from suggestions
    if has_rates and not suggestions:
        yield from suggest_alternatives(space, constants)


def _quote_for_shell(value: str) -> str:
    """Return a value as a shell takes it."""
    return f'"{value}"' if " " in value else value


def _change_on_same_axes(space: SearchSpace, constants: Constants) -> Iterator[RunConfig]:
    """Yield the config with more recompute, a higher ZeRO stage and a smaller microbatch, where
    that is estimated to fit: the fewest changes first, and of these the fastest. Full recompute is
    that of as few blocks as fit."""
    config, gpus = space.config, space.gpus
    parallel, train = config.parallel, config.train
    fixed: dict[str, Any] = {name: getattr(parallel, name) for name in _AXES}
    if parallel.data is not None:
        fixed["data"] = parallel.data
    if gpus == parallel.tensor * parallel.pipeline * parallel.data_replicate:
        fixed["zero"] = parallel.zero  # no rank has another to share with
    if parallel.pipeline > 1:
        default = "interleaved" if parallel.chunks > 1 else "1f1b"
        is_searched = find_named_schedule(parallel.schedule) is not None
        fixed |= {
            "chunks": parallel.chunks,
            "schedule": parallel.schedule if is_searched else default,
        }
    changes = []
    current = (parallel.zero, RECOMPUTE.index(train.recompute), train.microbatch)
    for same in ({**fixed, "microbatch": train.microbatch}, fixed):
        candidates, seconds = _find_fitting_candidates(replace(space, fixed=same), constants)
        columns = (candidates.zero, candidates.recompute, candidates.microbatch, seconds)
        for zero, recompute, microbatch, step in zip(*(c.tolist() for c in columns), strict=True):
            if zero >= current[0] and recompute >= current[1] and microbatch <= current[2]:
                changed = (zero, recompute, microbatch)
                num_changed = sum(map(int.__ne__, current, changed))
                changes.append((num_changed, step, changed))
    for _, _, (zero, recompute, microbatch) in sorted(changes):
        recompute_update: dict[str, Any] = {"recompute": RECOMPUTE[recompute]}
        if recompute_update["recompute"] == "full" != train.recompute:
            recompute_update = {"recompute_blocks": "auto"}
        yield config.replace(
            parallel={"zero": zero}, train={"microbatch": microbatch, **recompute_update}
        )


def _find_fastest(space: SearchSpace, constants: Constants) -> Iterator[RunConfig]:
    """Yield the config with the layout that a search finds, if any fits."""
    with suppress(UserError):
        yield search(space, constants, _SIMULATED).best.config


def _find_fitting_candidates(space: SearchSpace, constants: Constants) -> tuple[Candidates, Array]:
    """Return the layouts that are estimated to fit, and their seconds of a step."""
    candidates = space.list_candidates()
    if not len(candidates):
        return candidates, np.zeros(0)
    estimates = estimate(space, constants, candidates)
    fits = fits_with_margin(estimates.memory_bytes, space.cluster.chip)
    return candidates.select(fits), estimates.step_seconds[fits]
