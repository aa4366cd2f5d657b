"""Estimates of many layouts of one config at a time, by closed forms on arrays.

The costs of blocks, ends and updates are those of one prediction; what is different is the bubble,
which has a closed form for each schedule, and stages, of which the fullest speaks for all.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from megaframe.config.schema import RunConfig
from megaframe.plan.candidates import SCHEDULES, Array, Candidates
from megaframe.plan.cluster import Cluster
from megaframe.plan.constants import Constants
from megaframe.plan.costs import Machine, Part, Passes, block
from megaframe.plan.experts import has_experts
from megaframe.plan.room import blocks_of_fullest, memory_bytes
from megaframe.plan.step import jitter
from megaframe.plan.update import (
    Owned,
    block_owned,
    data_seconds,
    head,
    stage_seconds,
    table_owned,
    update_seconds,
)

_AT_ONCE = 1 << 15
"""Candidates of a round, whose arrays stay in cache."""
_BUBBLES: Mapping[str, tuple[float, float, float]] = {
    "gpipe": (1, 1, 1),
    "1f1b": (1, 1, 1),
    "interleaved": (1, 1, 1),
    "breadth-first": (1, 1, 1),
    "zb-h1": (1, 1, -1),
    "zb-h2": (1, 1, -2),
    "zb-v": (0.5, 0.5, -1),
    "v-half": (0.5, 0.5, 0.5),
    "dualpipe-v": (0.5, 1, -1.5),
}
"""Bubble by schedule: p - 1 times so much of F, of B and of W of a rank, never less than none."""


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
    rounds = [
        _estimate(config, cluster, constants, candidates.taken(slice(start, start + _AT_ONCE)))
        for start in range(0, len(candidates), _AT_ONCE)
    ]
    return Estimates(
        *(
            np.concatenate([getattr(one, name) for one in rounds])
            for name in ("step_seconds", "memory_bytes", "fits")
        ),
        {
            name: np.concatenate([one.breakdown[name] for one in rounds])
            for name in rounds[0].breakdown
        },
    )


def _estimate(
    config: RunConfig, cluster: Cluster, constants: Constants, candidates: Candidates
) -> Estimates:
    sizes = candidates.sizes(config)
    machine = Machine(config, cluster, constants, sizes)
    rank, held = _fullest_rank(machine)
    m, p = sizes.microbatches, sizes.pipeline
    found = {name: m * part.total * np.ones(len(candidates)) for name, part in rank.named().items()}
    whole = rank.whole
    factors = np.array([_BUBBLES[name] for name in SCHEDULES])[candidates.schedule].T
    of_a_round = sum(
        factor * seconds
        for factor, seconds in zip(
            factors, (whole.forward, whole.backward, whole.weight), strict=True
        )
    )
    chunks = np.where(np.isin(candidates.schedule, _IN_TURNS), sizes.chunks, 1)
    transfer = stage_seconds(machine)
    overlapped = machine.software.overlap_pipeline
    found["pipeline"] = np.where(overlapped, 0.0, 2 * m * sizes.chunks * transfer)
    trip = 2 * (p * sizes.chunks - 1) * transfer
    found["bubble"] = np.maximum(0.0, (p - 1) * of_a_round / chunks) + trip * overlapped
    found["data"] = data_seconds(machine, held, rank.compute)
    found["optimizer"] = update_seconds(machine, held)
    step = sum(found.values())
    found["other"] = machine.software.step_seconds + jitter(cluster, sizes.world) * step
    memory = memory_bytes(config, cluster.chip, sizes, candidates.schedule)
    return Estimates(step + found["other"], memory, memory <= cluster.chip.memory, found)


_IN_TURNS = [SCHEDULES.index(name) for name in ("interleaved", "breadth-first")]


def _fullest_rank(machine: Machine) -> tuple[Part, Owned]:
    """The stages of the rank with most to do, and what it has of the parameters."""
    model, sizes = machine.config.model, machine.sizes
    kinds = [model.moe is not None and has_experts(model.moe, n) for n in range(model.layers)]
    blocks = blocks_of_fullest(machine.config, sizes.pipeline * sizes.chunks) * sizes.chunks
    blocks = np.minimum(blocks, model.layers)
    last = head(machine)
    # The rank with the head has fewer blocks, where there are others.
    part, held = Part(Passes()), Owned(0.0, 0.0)
    for kind in set(kinds):
        layer, share = kinds.index(kind), kinds.count(kind) / model.layers
        part = part + times(block(machine, layer), share * blocks)
        one = block_owned(machine, layer)
        held = Owned(
            held.dense + share * blocks * one.dense, held.experts + share * blocks * one.experts
        )
    rest = np.maximum(0.0, model.layers - (sizes.pipeline - 1) * blocks) / np.maximum(blocks, 1)
    with_head = times(part, rest) + last
    more = with_head.whole.total > part.whole.total
    part = _chosen(more, with_head, part)
    tables = np.where(sizes.pipeline == 1, 2 - model.tie_embeddings, 1) * table_owned(machine)
    return part, Owned(held.dense + tables, held.experts)


def times(part: Part, factor: Any) -> Part:
    """So many of these."""
    return Part(*(passes.times(factor) for passes in part.named().values()))


def _chosen(which: Array, one: Part, other: Part) -> Part:
    """The one where `which` is true."""
    return Part(
        *(
            Passes(
                np.where(which, a.forward, b.forward),
                np.where(which, a.backward, b.backward),
                np.where(which, a.weight, b.weight),
            )
            for a, b in zip(one.named().values(), other.named().values(), strict=True)
        )
    )
