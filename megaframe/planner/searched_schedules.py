"""The schedules that a search of layouts chooses from: ours, and those of extensions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from pydantic import ValidationError

from megaframe.config.parts import PipelineSchedulePart
from megaframe.config.registry import get_registry
from megaframe.planner.layout_sizes import Array, LayoutSizes
from megaframe.schedule import NAMED_SCHEDULES, NamedSchedule, PipelineSizes
from megaframe.validate.schedule_part import refuse_faulty_schedule


def list_searched_schedules(fixed: str | NamedSchedule | None = None) -> tuple[NamedSchedule, ...]:
    """Return the schedules that candidates are made of.

    Extensions' schedules have their default keys, unless one is given.

    Args:
        fixed: The schedule that a search may not change, or its name; None if it chooses.

    Raises:
        UserError: The schedule of an extension is faulty.
    """
    if isinstance(fixed, PipelineSchedulePart):
        refuse_faulty_schedule(fixed)
        return (*NAMED_SCHEDULES.values(), fixed)
    return (*NAMED_SCHEDULES.values(), *make_registered_schedules())


def make_registered_schedules() -> list[PipelineSchedulePart]:
    """Return the schedules of extensions with their default keys, without those that have no
    default for each key.

    Raises:
        UserError: One is faulty.
    """
    parts = []
    for name in get_registry().list_names("pipeline_schedule"):
        section = get_registry().find("pipeline_schedule", name)
        assert section is not None and issubclass(section, PipelineSchedulePart)
        try:
            part = section()
        except ValidationError:
            continue
        refuse_faulty_schedule(part)
        parts.append(part)
    return parts


def get_config_value(schedule: NamedSchedule) -> str | NamedSchedule:
    """Return the value of `parallel.schedule` that asks for a schedule."""
    return schedule.name if schedule.name in NAMED_SCHEDULES else schedule


@dataclass(frozen=True)
class ScheduleColumn:
    """The schedule of each of many candidates.

    Attributes:
        schedules: All that there are.
        index: Which of them each candidate has.
    """

    schedules: Sequence[NamedSchedule]
    index: Array

    def mark(self, condition: Callable[[NamedSchedule], bool]) -> Array:
        """Return whether the schedule of each candidate fulfils a condition."""
        return np.array([condition(schedule) for schedule in self.schedules])[self.index]

    def compute(
        self,
        sizes: LayoutSizes,
        count: int,
        compute: Callable[[NamedSchedule, PipelineSizes, Array], Sequence[Array]],
    ) -> list[Array]:
        """Compute closed forms, those of each schedule for its candidates.

        Args:
            sizes: The sizes of the candidates.
            count: How many values there are.
            compute: Returns the values, from a schedule, the sizes of its candidates, and their
                positions.

        Returns:
            Each value of all candidates; zero for those without a pipeline.
        """
        results = [np.zeros(len(self.index)) for _ in range(count)]
        pipelined = np.where(sizes.pipeline > 1, self.index, -1)
        for number, schedule in enumerate(self.schedules):
            (rows,) = np.nonzero(pipelined == number)
            if len(rows):
                columns = (sizes.pipeline, sizes.chunks, sizes.microbatches)
                part = PipelineSizes(*(column[rows] for column in columns))
                for result, value in zip(results, compute(schedule, part, rows), strict=True):
                    result[rows] = value
        return results
