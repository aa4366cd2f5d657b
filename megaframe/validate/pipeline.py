"""Checks of pipeline parallelism: stages, and the schedule."""

from __future__ import annotations

from collections.abc import Iterator

from megaframe.config.keys import format_value
from megaframe.config.schema import RunConfig
from megaframe.errors import TIMES, join_or
from megaframe.schedule import find_schedule_mistakes


def find_stage_mistakes(config: RunConfig) -> Iterator[str]:
    """Yield a message for each mistake in the number of stages and in what is listed per stage."""
    parallel, layers = config.parallel, config.model.layers
    pipeline, chunks = parallel.pipeline, parallel.chunks
    stages = pipeline * chunks
    size = f"parallel.pipeline={pipeline}" + f"{TIMES}parallel.chunks={chunks}" * (chunks > 1)
    if stages > layers:
        mend = [f"parallel.pipeline={min(pipeline, layers)}"]
        if chunks > 1 and pipeline <= layers:
            mend = [
                f"parallel.chunks={layers // pipeline}",
                f"parallel.pipeline={layers // chunks}",
            ]
        valid = join_or(text for text in mend if not text.endswith("=0"))
        yield f"{size} is {stages} stages for model.layers={layers}; use {valid}"
        return
    layers_per_stage = parallel.layers_per_stage
    if layers_per_stage is not None and (
        len(layers_per_stage) != stages or sum(layers_per_stage) != layers
    ):
        wrong = f"has {len(layers_per_stage)} stages, but {size} makes {stages}"
        if len(layers_per_stage) == stages:
            wrong = f"sums to {sum(layers_per_stage)}, not to model.layers={layers}"
        even = tuple((layers + number) // stages for number in reversed(range(stages)))
        yield (
            f"parallel.layers_per_stage={format_value(layers_per_stage)} {wrong}; use for example "
            f"{format_value(even)}, or leave it out to divide by work"
        )
    blocks = config.train.recompute_blocks
    if isinstance(blocks, tuple) and len(blocks) != stages:
        fitting = (blocks + (blocks[-1:] or (0,)) * stages)[:stages]
        yield (
            f"train.recompute_blocks={format_value(blocks)} has {len(blocks)} stages, but {size} "
            f"makes {stages}; use for example {format_value(fitting)}, or one number for all"
        )


def find_step_schedule_mistakes(config: RunConfig, data: int) -> Iterator[str]:
    """Yield a message for each reason why a step has no schedule, for every size of the batch.

    Args:
        config: The config.
        data: Number of data ranks.
    """
    parallel, train = config.parallel, config.train
    group = parallel.schedule_microbatches
    if group is not None and parallel.schedule == "interleaved" and not group.is_integer():
        yield (
            f"parallel.schedule_microbatches={group:g} is not a whole number, as "
            f"parallel.schedule=interleaved needs; use {int(group)} or {int(group) + 1}"
        )
    sizes = {train.global_batch} | ({train.batch_ramp.start} if train.batch_ramp else set())
    batch_unit = train.microbatch * data
    mistakes: dict[str, None] = {}  # ordered; most mistakes are the same for every batch size
    for size in sorted(sizes):
        if size % batch_unit == 0:
            mistakes |= dict.fromkeys(
                find_schedule_mistakes(
                    parallel.schedule,
                    parallel.pipeline,
                    parallel.chunks,
                    size // batch_unit,
                    group=None if parallel.schedule == "search" or group is None else int(group),
                )
            )
    yield from mistakes
