"""Metrics of every step of a run, with where its time went and its MFU."""

from megaframe.metrics.flops import Flops, count_flops
from megaframe.metrics.metrics_logger import MetricsLogger
from megaframe.metrics.timers import PARTS, Part, StepTimer

__all__ = ["PARTS", "Flops", "MetricsLogger", "Part", "StepTimer", "count_flops"]
