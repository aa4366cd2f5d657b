"""Estimates of many layouts of one config at a time, by closed forms on arrays.

The costs of blocks and transfers are those of `predict`, computed for all candidates at once. What
a simulation would find is replaced by closed forms: stages as `plan.stages` divides them, the
bubbles of the named schedules, the activations that they keep.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from megaframe.config.schema import RunConfig
from megaframe.plan.cluster import Cluster
from megaframe.plan.constants import Constants
from megaframe.plan.costs import block
from megaframe.plan.experts import expert_layers, has_experts
from megaframe.plan.machine import Machine, Part, Passes
from megaframe.plan.memory import LOSS_CHUNK, WIDTH, block_bytes
from megaframe.plan.room import room, state_width
from megaframe.plan.sizes import Sizes
from megaframe.plan.slow import jitter
from megaframe.plan.stages import block_work, end_work
from megaframe.plan.update import (
    Owned,
    block_owned,
    data_seconds,
    head,
    stage_seconds,
    table_owned,
    update_seconds,
)

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
    given = {name: np.asarray(value) for name, value in vars(candidates).items()}
    schedule = given.pop("schedule")
    many = config.train.global_batch // (given["microbatch"] * given["data"])
    machine = Machine(config, cluster, constants, Sizes(**given, microbatches=many))
    one, owned = _mean_block(machine)
    end = head(machine)
    share = _share(machine, one, end)
    rank = one.times(share.blocks) + end.times(share.heads)
    held = Owned(
        owned.dense * share.blocks + table_owned(machine) * _tables(config, machine.sizes),
        owned.experts * share.blocks,
        np.maximum(1.0, share.blocks),
    )
    breakdown = _breakdown(machine, rank, held, schedule)
    memory = _memory(machine, held, owned, share, schedule)
    fits = memory <= room(cluster.chip)
    return Estimates(np.add.reduce(list(breakdown.values())), memory, fits, breakdown)


def _mean_block(machine: Machine) -> tuple[Part, Owned]:
    """Costs and parameters of a layer, on average over dense ones and those with experts."""
    model = machine.config.model
    share = expert_layers(model) / model.layers
    whole, owned = Part(Passes()), Owned(0.0, 0.0)
    for experts, weight in ((False, 1 - share), (True, share)):
        if not weight:
            continue
        layer = next(
            n
            for n in range(model.layers)
            if (model.moe is not None and has_experts(model.moe, n)) == experts
        )
        one = block_owned(machine, layer)
        whole = whole + block(machine, layer).times(weight)
        owned = Owned(owned.dense + weight * one.dense, owned.experts + weight * one.experts)
    return whole, owned


@dataclass(frozen=True)
class Share:
    """blocks: of the rank that has most to do. heads: 1 where that is the one with the head."""

    blocks: Array
    heads: Array


def _share(machine: Machine, one: Part, end: Part) -> Share:
    """The division of `plan.stages.divide` in closed form: the largest stage is either so many
    blocks, or some blocks and the head."""
    sizes, layers = machine.sizes, machine.config.model.layers
    stages = sizes.pipeline * sizes.chunks
    weight = _head_weight(machine)
    above, below = np.ceil(weight), np.floor(weight)
    even = np.maximum(np.ceil((layers + above) / stages), above)
    beside = np.maximum(0.0, np.ceil((layers - (stages - 1) * below) / stages)) + weight
    largest = np.minimum(even, beside)
    wanted = np.rint((layers + weight) / stages - weight)
    last = np.clip(wanted, 0.0, np.maximum(0.0, np.floor(largest - weight + 1e-9)))
    last = np.where(stages > 1, last, layers)
    # The others are as even as they can be; those with one block more follow each other.
    others = np.maximum(1, stages - 1)
    low = np.floor((layers - last) / others)
    more = np.ceil((layers - last - low * others) / sizes.pipeline)
    middle = sizes.chunks * low + np.minimum(more, sizes.chunks)
    end_rank = (sizes.chunks - 1) * low + np.maximum(0.0, np.minimum(more, sizes.chunks) - 1) + last
    ends = end_rank * one.whole.total + end.whole.total > middle * one.whole.total
    ends = ends | (sizes.pipeline == 1)
    end_rank = np.where(sizes.pipeline == 1, layers, end_rank)
    return Share(np.where(ends, end_rank, middle), ends * 1.0)


def _head_weight(machine: Machine) -> Array:
    """Work of the head, in blocks, as `plan.stages` divides layers by it."""
    config, sizes = machine.config, machine.sizes
    works = [block_work(config, layer) for layer in range(config.model.layers)]
    forward = sum(work.forward for work in works) / len(works)
    others = sum(work.backward + work.weight for work in works) / len(works)
    end = end_work(config)
    twice = np.where(sizes.recompute == 2, 2.0, 1.0)
    head = end.forward + end.backward + end.weight
    return head / np.maximum(twice * forward + others, 1e-30)


def _tables(config: RunConfig, sizes: Sizes) -> Array:
    """Tables of a rank that has most of them."""
    both = 1.0 if config.model.tie_embeddings else 2.0
    return np.where(sizes.pipeline == 1, both, 1.0)


def bubble(schedule: Array, sizes: Sizes, passes: Passes) -> Array:
    """Seconds that a rank waits in the whole step, from its start to the last rank's end; passes:
    of a rank's whole share. Of zb-h2, zb-v and dualpipe-v these are more than the papers count,
    because ranks begin and end apart; v-half's is exact for equal passes and even ranks."""
    before = sizes.pipeline - 1
    forward, backward, weight = passes.forward, passes.backward, passes.weight
    whole = before * passes.total
    forms = {
        "gpipe": whole,
        "1f1b": whole,
        "interleaved": whole / sizes.chunks,
        "breadth-first": whole / sizes.chunks,
        "zb-h1": before * (forward + backward - weight),
        "zb-h2": before * np.maximum(forward, forward + backward - 2 * weight),
        "zb-v": before * np.maximum(backward / 2, backward - weight),
        "v-half": sizes.pipeline * (forward / 2 + 1.5 * backward - weight / 4) - forward,
        "dualpipe-v": sizes.pipeline * (backward - weight / 2) - (backward - weight),
    }
    return np.where(sizes.pipeline > 1, np.choose(schedule, [forms[n] for n in SCHEDULES]), 0.0)


def live(schedule: Array, sizes: Sizes) -> Array:
    """Most activations that a rank keeps, in microbatches of its whole share."""
    p, many = sizes.pipeline, sizes.microbatches
    forms = {
        "gpipe": many,
        "1f1b": p,
        "interleaved": p + (p - 1) / sizes.chunks,
        "breadth-first": many,
        "zb-h1": p,
        "zb-h2": 2 * p - 1,
        "zb-v": p,
        "v-half": p / 2 + 1,
        "dualpipe-v": p,
    }
    found = np.choose(schedule, [np.broadcast_to(forms[n], p.shape) for n in SCHEDULES])
    return np.minimum(found, many)


def _breakdown(machine: Machine, rank: Part, held: Owned, schedule: Array) -> dict[str, Array]:
    sizes, software = machine.sizes, machine.software
    many = sizes.microbatches
    found = {name: many * part.total for name, part in rank.named().items()}
    transfer = stage_seconds(machine)
    waiting = 0.0 if software.overlap_pipeline else 1.0
    found["pipeline"] = waiting * 2 * sizes.chunks * many * transfer
    found["data"] = data_seconds(machine, held, rank.compute)
    filling = bubble(schedule, sizes, rank.whole)
    found["bubble"] = filling + 2 * (sizes.pipeline - 1) * transfer
    found["optimizer"] = update_seconds(machine, held)
    step = sum(found.values())
    slow = jitter(machine.cluster, sizes.world)
    found["other"] = software.step_kernels * machine.rate.launch + slow * step
    return {name: np.broadcast_to(value, many.shape) for name, value in found.items()}


def _memory(machine: Machine, held: Owned, one: Owned, share: Share, schedule: Array) -> Array:
    """Bytes of the worst rank, as `plan.memory` counts them."""
    config, sizes = machine.config, machine.sizes
    width = WIDTH[config.train.precision]
    master = max(4, width)
    whole = held.dense + held.experts
    copies = sizes.tensor * sizes.context * sizes.data / (sizes.expert * sizes.expert_tensor)
    experts = np.maximum(1.0, copies / sizes.data_replicate)
    own = np.where(sizes.zero == 0, whole, held.dense / sizes.shard + held.experts / experts)
    lent = 2 * (one.dense + one.experts) + table_owned(machine)
    values = np.where(sizes.zero == 3, lent, whole) - (own if width == master else 0.0)
    gradients = np.where(sizes.zero >= 2, lent + own, whole)
    state = own * (master + state_width(config.optim, master))
    logits = np.minimum(LOSS_CHUNK, machine.tokens * table_owned(machine) / config.model.hidden)
    kept = _block_bytes(machine) * share.blocks * live(schedule, sizes)
    again = np.where(sizes.recompute == 2, _whole_block(config, "none") * sizes.microbatch, 0.0)
    again = again / (sizes.tensor * sizes.context)
    total = state + np.maximum(0.0, values) * width + gradients * master + kept + again
    return total + logits * width


def _block_bytes(machine: Machine) -> Array:
    """Bytes that a block keeps of one microbatch, its input included."""
    config, sizes = machine.config, machine.sizes
    stream = config.train.seq * config.model.hidden * WIDTH[config.train.precision]
    kinds = [_whole_block(config, "none"), _whole_block(config, "selective"), 0.0]
    each = stream + np.choose(sizes.recompute, kinds)
    return sizes.microbatch * each / (sizes.tensor * sizes.context)


def _whole_block(config: RunConfig, recompute: str) -> float:
    """Bytes that a block keeps of one sample beside its input, on average."""
    train = config.train.model_copy(update={"recompute": recompute, "microbatch": 1})
    one = config.model_copy(update={"train": train})
    layers = config.model.layers
    return sum(block_bytes(one, layer) for layer in range(layers)) / layers
