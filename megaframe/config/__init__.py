"""What a run is made of: typed sections, read from YAML and overrides, checked and documented."""

from megaframe.config.check import check
from megaframe.config.describe import explain, listing
from megaframe.config.load import dump, load
from megaframe.config.schema import (
    BatchRamp,
    Checkpoint,
    Data,
    Meter,
    Model,
    Optim,
    Parallel,
    RotaryScaling,
    Run,
    RunConfig,
    Source,
    Train,
)

__all__ = [
    "BatchRamp",
    "Checkpoint",
    "Data",
    "Meter",
    "Model",
    "Optim",
    "Parallel",
    "RotaryScaling",
    "Run",
    "RunConfig",
    "Source",
    "Train",
    "check",
    "dump",
    "explain",
    "listing",
    "load",
]
