"""Again: how many blocks of each stage are recomputed in backward, as few as memory allows.

Each rank is decided on its own, because its memory depends on its own microbatches in flight. The
first stages of a pipeline keep most, and so recompute most.
"""

from __future__ import annotations

from collections.abc import Mapping

from megaframe.architecture.pipeline import step_schedule
from megaframe.architecture.stages import stage_plans
from megaframe.config.schema import RunConfig
from megaframe.hardware.chips import Chip
from megaframe.layout import Layout
from megaframe.planner.memory_budget import leaves_room
from megaframe.planner.parameter_counts import rank_memory
from megaframe.planner.peak_memory import overhead
from megaframe.schedule import Schedule, lower


def settled(config: RunConfig, layout: Layout, chip: Chip) -> RunConfig:
    """Return the config with numbers in place of `train.recompute_blocks=auto`."""
    if config.train.recompute_blocks != "auto":
        return config
    return _with_blocks(config, fewest_again(config, layout, chip))


def fewest_again(config: RunConfig, layout: Layout, chip: Chip) -> tuple[int, ...]:
    """Return the number of recomputed blocks of each stage: the fewest with which the planned
    memory of each rank leaves room on the chip (one fewer on any stage would not). All blocks of a
    rank if even that does not suffice."""
    plain = _with_blocks(config, 0)
    many = config.train.global_batch // (config.train.microbatch * layout.data)
    schedule = lower(step_schedule(plain, many))
    found = [0] * len(stage_plans(plain))
    for rank in range(layout.pipeline):
        for stage, count in _of_rank(plain, layout, chip, schedule, rank).items():
            found[stage] = count
    return tuple(found)


def _of_rank(
    config: RunConfig, layout: Layout, chip: Chip, schedule: Schedule, rank: int
) -> dict[int, int]:
    """Return the number for each stage of one rank: first the same for all stages, then fewer on
    single ones."""
    plans = stage_plans(config)
    blocks = {stage: len(plans[stage].blocks) for stage in schedule.stages(rank)}

    def fits(counts: Mapping[int, int]) -> bool:
        tried = tuple(counts.get(stage, 0) for stage in range(len(plans)))
        stages = stage_plans(_with_blocks(config, tried))
        needed = rank_memory(config, layout, stages, schedule, rank, host=chip.is_host)
        return bool(leaves_room(needed.total + overhead(chip), chip))

    counts = dict.fromkeys(blocks, 0)
    for limit in range(1, max(blocks.values()) + 1):
        if fits(counts):
            break
        counts = {stage: min(limit, most) for stage, most in blocks.items()}
    for stage in reversed(counts):  # later stages keep less, and need recompute least
        while counts[stage] and fits(fewer := {**counts, stage: counts[stage] - 1}):
            counts = fewer
    return counts


def _with_blocks(config: RunConfig, blocks: int | tuple[int, ...]) -> RunConfig:
    train = config.train.model_copy(update={"recompute_blocks": blocks})
    return config.model_copy(update={"train": train})
