"""Checks of pipeline parallelism: stages, and the schedule."""

from __future__ import annotations

from collections.abc import Iterator

from megaframe.config.keys import format_value
from megaframe.config.model import ModelConfig
from megaframe.config.parallel import ParallelConfig
from megaframe.config.parts import PipelineSchedulePart
from megaframe.config.registry import get_registry
from megaframe.config.schema import TrainConfig
from megaframe.errors import TIMES, UserError, join_or
from megaframe.schedule import NamedSchedule, PipelineSizes, find_schedule_mistakes
from megaframe.schedule.named import SEARCH, find_named_schedule, get_schedule_name
from megaframe.validate.schedule_part import refuse_faulty_schedule, refuse_faulty_size


def find_stage_mistakes(
    model: ModelConfig, parallel: ParallelConfig, train: TrainConfig
) -> Iterator[str]:
    """Yield a message for each mistake in the number of stages and in what is listed per stage."""
    layers = model.layers
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
    if isinstance(layers_per_stage, tuple) and (
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
    blocks = train.recompute_blocks
    if isinstance(blocks, tuple) and len(blocks) != stages:
        fitting = (blocks + (blocks[-1:] or (0,)) * stages)[:stages]
        yield (
            f"train.recompute_blocks={format_value(blocks)} has {len(blocks)} stages, but {size} "
            f"makes {stages}; use for example {format_value(fitting)}, or one number for all"
        )


def find_step_schedule_mistakes(
    parallel: ParallelConfig, train: TrainConfig, data: int
) -> Iterator[str]:
    """Yield a message for each reason why a step has no schedule, for every size of the batch.

    Args:
        parallel: The section `parallel`.
        train: The section `train`.
        data: Number of data ranks.
    """
    group = parallel.schedule_microbatches
    schedule = parallel.schedule
    named = find_named_schedule(schedule)
    takes_turns = named is not None and named.takes_turns
    if group is not None and takes_turns and not group.is_integer():
        yield (
            f"parallel.schedule_microbatches={group:g} is not a whole number, as "
            f"parallel.schedule={get_schedule_name(schedule)} needs; use {int(group)} or "
            f"{int(group) + 1}"
        )
    if isinstance(schedule, PipelineSchedulePart):
        try:
            refuse_faulty_schedule(schedule)
        except UserError as error:
            yield str(error)
            return
    batches = {train.global_batch} | ({train.batch_ramp.start} if train.batch_ramp else set())
    batch_unit = train.microbatch * data
    mistakes: dict[str, None] = {}  # ordered; most mistakes are the same for every batch size
    for size in sorted(batches):
        if size % batch_unit == 0:
            sizes = PipelineSizes(
                parallel.pipeline,
                parallel.chunks,
                size // batch_unit,
                None if schedule == SEARCH or group is None else int(group),
            )
            mistakes |= dict.fromkeys(_find_mistakes_at(schedule, sizes))
    yield from mistakes


def _find_mistakes_at(schedule: str | NamedSchedule, sizes: PipelineSizes) -> list[str]:
    mistakes = find_schedule_mistakes(
        schedule,
        sizes.ranks,
        sizes.chunks,
        sizes.microbatches,
        group=sizes.group,
        registered=get_registry().list_names("pipeline_schedule"),
    )
    if isinstance(schedule, PipelineSchedulePart) and not mistakes:
        try:
            refuse_faulty_size(schedule, sizes)
        except UserError as error:
            mistakes = [str(error)]
    return mistakes
