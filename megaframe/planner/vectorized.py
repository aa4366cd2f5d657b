"""Estimates of many layouts of one config at a time, by closed forms on arrays.

The costs of blocks and transfers are those of `predict`, computed for all candidates at once. The
division into stages, the bubble of each named schedule and the activations that it keeps come from
closed forms instead of a simulation.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from megaframe.config import ModelConfig
from megaframe.planner.candidates import Candidates, SearchSpace
from megaframe.planner.communication_times import (
    estimate_pipeline_wait_seconds,
    estimate_stage_transfer_seconds,
)
from megaframe.planner.constants import Constants
from megaframe.planner.data_parallel_times import (
    ParameterLoad,
    compute_block_load,
    count_buckets,
    count_layer_table_elements,
    count_overlapping_passes,
    count_table_elements,
    estimate_exposed_exchange_seconds,
    estimate_optimizer_seconds,
)
from megaframe.planner.goodput import estimate_straggler_share
from megaframe.planner.island_times import estimate_exposed_sync_seconds
from megaframe.planner.layer_times import (
    estimate_block_times,
    estimate_embedding_times,
    estimate_head_times,
)
from megaframe.planner.layout_sizes import Array, LayoutSizes, count_blocks_per_rank
from megaframe.planner.machine import CostBreakdown, Machine, PassTimes
from megaframe.planner.memory_estimates import estimate_peak_memory
from megaframe.planner.parameter_counts import list_layer_kinds
from megaframe.planner.searched_schedules import ScheduleColumn
from megaframe.schedule import NamedSchedule, PipelineSizes

_AT_ONCE = 1 << 15
"""Candidates per round, few enough that their arrays stay in cache."""


@dataclass(frozen=True)
class Estimates:
    """For each candidate: seconds of a step, bytes on the rank that needs most, whether these fit,
    and the seconds by part under the names of `Prediction.breakdown`."""

    step_seconds: Array
    memory_bytes: Array
    fits: Array
    breakdown: Mapping[str, Array]


def estimate(space: SearchSpace, constants: Constants, candidates: Candidates) -> Estimates:
    """Estimate all candidates, at least 100,000 per second.

    Args:
        space: The run, whose layout is ignored, and its cluster.
        constants: What kernels and collectives reach there.
        candidates: The layouts.
    """
    config, cluster = space.config, space.cluster
    rounds = []
    for start in range(0, len(candidates), _AT_ONCE):
        part = candidates.select(slice(start, start + _AT_ONCE))
        sizes = part.make_sizes(config.train, config.parallel.islands)
        machine = Machine(config, cluster, constants, sizes)
        rounds.append(_estimate_round(machine, part.schedule_column))
    step, memory, fits = (
        np.concatenate([getattr(one_round, name) for one_round in rounds])
        for name in ("step_seconds", "memory_bytes", "fits")
    )
    causes = rounds[0].breakdown
    breakdown = {
        name: np.concatenate([one_round.breakdown[name] for one_round in rounds]) for name in causes
    }
    return Estimates(step, memory, fits, breakdown)


def _estimate_round(machine: Machine, schedule: ScheduleColumn) -> Estimates:
    config, chip, sizes = machine.config, machine.cluster.chip, machine.sizes
    block, block_parameters = _compute_mean_block(machine)
    head = estimate_head_times(machine)
    busiest = _find_busiest_rank(machine, block, head)
    rank = block.scale(busiest.blocks) + head.scale(busiest.heads)
    rank = rank + estimate_embedding_times(machine).scale(1.0 * (sizes.pipeline == 1))
    blocks = block_parameters.scale(busiest.blocks)
    load = replace(
        blocks,
        tables=count_table_elements(machine) * _count_tables(config.model, sizes)
        + count_layer_table_elements(machine),
        buckets=count_buckets(machine, blocks.total, sizes.chunks, busiest.blocks),
    )
    breakdown = _break_down_step(machine, rank, load, schedule)
    memory = estimate_peak_memory(config, chip, sizes, schedule)
    return Estimates(
        np.add.reduce(list(breakdown.values())), memory, memory <= chip.memory, breakdown
    )


def _compute_mean_block(machine: Machine) -> tuple[CostBreakdown, ParameterLoad]:
    """Return the mean costs and parameters of a layer."""
    kinds = list_layer_kinds(machine.config.model, machine.config.frozen_patterns)
    times, load = CostBreakdown(PassTimes()), ParameterLoad()
    for kind, number in Counter(kinds).items():
        layer, share = kinds.index(kind), number / len(kinds)
        times = times + estimate_block_times(machine, layer).scale(share)
        load = load + compute_block_load(machine, layer).scale(share)
    return times, load


@dataclass(frozen=True)
class BusiestRank:
    """What the rank with most work has.

    Attributes:
        blocks: Its blocks.
        heads: 1 if it has the head, else 0.
    """

    blocks: Array
    heads: Array


def _find_busiest_rank(machine: Machine, block: CostBreakdown, head: CostBreakdown) -> BusiestRank:
    """Return what the rank with most work has: the most blocks, or fewer blocks and the head."""
    config = machine.config
    division = count_blocks_per_rank(
        config.model, config.train, machine.sizes, config.frozen_patterns
    )
    fullest, last = division.fullest, division.last
    head_rank_is_busiest = (
        last * block.combined.total + head.combined.total > fullest * block.combined.total
    )
    head_rank_is_busiest = head_rank_is_busiest | (machine.sizes.pipeline == 1)
    return BusiestRank(np.where(head_rank_is_busiest, last, fullest), head_rank_is_busiest * 1.0)


def _count_tables(model: ModelConfig, sizes: LayoutSizes) -> Array:
    """Return the number of vocabulary tables of the rank that has most of them."""
    all_tables = 1.0 if model.tie_embeddings else 2.0
    return np.where(sizes.pipeline == 1, all_tables, 1.0)


def estimate_bubble_seconds(
    schedule: ScheduleColumn, sizes: LayoutSizes, passes: PassTimes
) -> Array:
    """Return the seconds that a rank is idle in a step, from its start to the end of the last rank.

    Args:
        schedule: The schedules of the layouts.
        sizes: The layouts.
        passes: Seconds of all of a rank's stages for one microbatch.
    """
    shape = np.shape(schedule.index)
    times = [
        np.broadcast_to(seconds, shape)
        for seconds in (passes.forward, passes.backward, passes.weight)
    ]

    def compute(named: NamedSchedule, part: PipelineSizes, rows: Array) -> tuple[Array]:
        return (named.estimate_bubble(part, *(seconds[rows] for seconds in times)),)

    (seconds,) = schedule.compute(sizes, 1, compute)
    return seconds


def _break_down_step(
    machine: Machine, rank: CostBreakdown, load: ParameterLoad, schedule: ScheduleColumn
) -> dict[str, Array]:
    sizes, software = machine.sizes, machine.software
    microbatches = sizes.microbatches
    seconds = {name: microbatches * part.total for name, part in rank.split_by_cause().items()}
    transfer = np.maximum(
        estimate_stage_transfer_seconds(machine), estimate_pipeline_wait_seconds(machine)
    )
    seconds["pipeline"] = 2 * sizes.chunks * microbatches * estimate_pipeline_wait_seconds(machine)
    is_looped = schedule.mark(lambda each: each.is_looped)
    overlapped = count_overlapping_passes(sizes, is_looped)
    seconds["data"] = estimate_exposed_exchange_seconds(machine, load, rank.compute, overlapped)
    bubble = estimate_bubble_seconds(schedule, sizes, rank.combined)
    seconds["bubble"] = bubble + 2 * (sizes.pipeline - 1) * transfer
    seconds["optimizer"] = estimate_optimizer_seconds(machine, load)
    if machine.config.trains_in_islands:
        step = sum(seconds.values())
        seconds["islands"] = estimate_exposed_sync_seconds(machine, load, step)
    step = sum(seconds.values())
    straggling = estimate_straggler_share(machine.cluster, sizes.world)
    seconds["other"] = software.step_kernels * machine.rate.launch + straggling * step
    return {name: np.broadcast_to(value, microbatches.shape) for name, value in seconds.items()}
