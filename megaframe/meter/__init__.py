"""Metrics of every step of a run, with where its time went and its MFU."""

from megaframe.meter.flops import Flops, count_flops
from megaframe.meter.meter import Meter
from megaframe.meter.timers import PARTS, Part, StepTimer

__all__ = ["PARTS", "Flops", "Meter", "Part", "StepTimer", "count_flops"]
