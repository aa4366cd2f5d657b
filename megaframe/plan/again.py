"""Again: how many blocks of each stage are computed again in backward, as few as memory allows.

A rank's stages keep what their own microbatches in flight need, so each rank is decided by itself:
the first stages of a pipeline, which keep most, compute most again.
"""

from __future__ import annotations

from collections.abc import Mapping

from megaframe.config.schema import RunConfig
from megaframe.layout import Layout
from megaframe.plan.chips import Chip
from megaframe.plan.held import rank_memory
from megaframe.plan.room import leaves_room
from megaframe.plan.schedules import step_schedule
from megaframe.plan.stages import stage_plans
from megaframe.plan.worst import overhead
from megaframe.schedule import Schedule, lower


def settled(config: RunConfig, layout: Layout, chip: Chip) -> RunConfig:
    """The config, with numbers in the place of `train.recompute_blocks=auto`."""
    if config.train.recompute_blocks != "auto":
        return config
    return _with_blocks(config, fewest_again(config, layout, chip))


def fewest_again(config: RunConfig, layout: Layout, chip: Chip) -> tuple[int, ...]:
    """Blocks of each stage: so many that each rank leaves room on the chip by its planned memory,
    and one fewer of any stage does not. All of a rank's where even that is too few."""
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
    """Those of the stages of one rank: as many of each, and then of single ones fewer."""
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
    for stage in reversed(counts):  # later stages keep less, and need it least
        while counts[stage] and fits(fewer := {**counts, stage: counts[stage] - 1}):
            counts = fewer
    return counts


def _with_blocks(config: RunConfig, blocks: int | tuple[int, ...]) -> RunConfig:
    train = config.train.model_copy(update={"recompute_blocks": blocks})
    return config.model_copy(update={"train": train})
