"""Peak memory: the rank that needs most, whether that fits, and what is recomputed so that it does.

Each rank's recomputed blocks are decided on their own, because its memory depends on its own
microbatches in flight. The first stages of a pipeline keep most, and so recompute most.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from megaframe.architecture.pipeline import build_step_schedule
from megaframe.architecture.stages import plan_stages
from megaframe.config.schema import RunConfig
from megaframe.hardware.chips import Chip
from megaframe.layout import Layout
from megaframe.planner.memory import RankMemory, compute_rank_memory
from megaframe.schedule import Schedule, lower

OVERHEAD = 2.0 * 2**30
"""Bytes for the driver's context, communication buffers and what torch keeps for itself."""
FRAGMENTS = 0.03
"""Share of the rest that the allocator cannot use because of fragmentation."""
_CHOSEN = 0.95
"""Share of a chip's memory that a chosen layout may take; plans are good to a few percent."""
_MANY = 32
"""Up to this many pipeline ranks all are counted; of more only the ends and the middle."""


def compute_usable_bytes(chip: Chip) -> float:
    """Return the bytes that a run may use. A CPU has no driver's context."""
    overhead = 0.0 if chip.units == 1 else OVERHEAD
    return (chip.memory - overhead) * (1 - FRAGMENTS)


def fits_with_margin(needed: Any, chip: Chip) -> Any:
    """Return whether a layout that needs so many bytes may be chosen, elementwise for an array."""
    return needed <= _CHOSEN * chip.memory


def compute_pipeline_memory(
    config: RunConfig, layout: Layout, schedule: Schedule, chip: Chip
) -> dict[int, RankMemory]:
    """Return the memory of the ranks of a pipeline by pipeline coordinate, the chip's overhead
    included; of a long pipeline only of those that may need most.

    Args:
        config: Model, precision, recompute and microbatch.
        layout: The sizes of the axes.
        schedule: That of one step, not lowered.
        chip: The device.
    """
    plans, lowered, num_ranks = plan_stages(config), lower(schedule), len(schedule.ranks)
    ranks = (
        range(num_ranks)
        if num_ranks <= _MANY
        else (0, 1, num_ranks // 2, num_ranks - 2, num_ranks - 1)
    )
    host, overhead = chip.is_host, round(compute_overhead_bytes(chip))
    memories = {
        rank: compute_rank_memory(config, layout, plans, lowered, rank, host=host) for rank in ranks
    }
    return {rank: replace(memory, overhead=overhead) for rank, memory in memories.items()}


def compute_overhead_bytes(chip: Chip) -> float:
    """Return the bytes of a chip that no run can use."""
    return chip.memory - compute_usable_bytes(chip)


def select_nonzero_kinds(memory: RankMemory) -> dict[str, int]:
    """Return the bytes of each kind on the device, without the kinds that are 0."""
    return {kind: size for kind, size in memory.kinds.items() if size}


def resolve_recompute_blocks(config: RunConfig, layout: Layout, chip: Chip) -> RunConfig:
    """Return the config with numbers in place of `train.recompute_blocks=auto`: for each stage the
    fewest blocks with which the planned memory of each rank leaves room on the chip (one fewer on
    any stage would not). All blocks of a rank if even that does not suffice.

    Args:
        config: The run.
        layout: Its ranks.
        chip: The devices.
    """
    if config.train.recompute_blocks != "auto":
        return config
    plain = config.replace(train={"recompute_blocks": 0})
    microbatches = config.train.global_batch // (config.train.microbatch * layout.data)
    schedule, plans = lower(build_step_schedule(plain, microbatches)), plan_stages(plain)

    def fits(rank: int, counts: Mapping[int, int]) -> bool:
        recomputed = tuple(counts.get(stage, 0) for stage in range(len(plans)))
        stages = plan_stages(plain.replace(train={"recompute_blocks": recomputed}))
        needed = compute_rank_memory(plain, layout, stages, schedule, rank, host=chip.is_host)
        return bool(fits_with_margin(needed.total + compute_overhead_bytes(chip), chip))

    counts: dict[int, int] = {}
    for rank in range(layout.pipeline):
        blocks = {stage: len(plans[stage].blocks) for stage in schedule.list_stages(rank)}
        counts |= _find_fewest(blocks, partial(fits, rank))
    by_stage = tuple(counts[stage] for stage in range(len(plans)))
    return config.replace(train={"recompute_blocks": by_stage})


def _find_fewest(
    blocks: Mapping[int, int], fits: Callable[[Mapping[int, int]], bool]
) -> dict[int, int]:
    """Return how many blocks each stage of a rank recomputes: first the same number on all stages,
    then fewer on single ones.

    Args:
        blocks: The blocks of each stage, in order.
        fits: Whether so many of each stage leave room on the chip.
    """
    counts = dict.fromkeys(blocks, 0)
    for limit in range(1, max(blocks.values()) + 1):
        if fits(counts):
            break
        counts = {stage: min(limit, most) for stage, most in blocks.items()}
    for stage in reversed(counts):  # later stages keep less, and need recompute least
        while counts[stage] and fits(fewer := {**counts, stage: counts[stage] - 1}):
            counts = fewer
    return counts
