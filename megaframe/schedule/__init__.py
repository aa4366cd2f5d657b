"""Schedules: a step as lists of actions, which are generated, lowered, printed and executed."""

from megaframe.schedule.actions import Action, ActionKind, parse_action
from megaframe.schedule.generators import find_schedule_mistakes, generate
from megaframe.schedule.limits import ScheduleLimits
from megaframe.schedule.lowering import lower
from megaframe.schedule.named import NAMED_SCHEDULES, SCHEDULE_NAMES
from megaframe.schedule.named_schedule import NamedSchedule, PipelineSizes
from megaframe.schedule.schedule import Schedule

__all__ = [
    "NAMED_SCHEDULES",
    "SCHEDULE_NAMES",
    "Action",
    "ActionKind",
    "NamedSchedule",
    "PipelineSizes",
    "Schedule",
    "ScheduleLimits",
    "find_schedule_mistakes",
    "generate",
    "lower",
    "parse_action",
]
