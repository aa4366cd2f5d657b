"""A step as data: lists of actions that are generated, lowered, printed and executed."""

from megaframe.schedule.actions import Action, Kind, parse_action
from megaframe.schedule.generators import one_stage
from megaframe.schedule.lowering import lower
from megaframe.schedule.schedule import Schedule

__all__ = ["Action", "Kind", "Schedule", "lower", "one_stage", "parse_action"]
