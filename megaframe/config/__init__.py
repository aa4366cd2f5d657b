"""The configuration of a run: typed sections, read from YAML and overrides, and checked."""

from megaframe.config.describe import common, explain, listing, unknown_options
from megaframe.config.load import dump, load
from megaframe.config.model import Emulate, Latent, Model, RotaryScaling
from megaframe.config.moe import Moe
from megaframe.config.schema import (
    BatchRamp,
    Checkpoint,
    Data,
    Faults,
    Meter,
    Optim,
    Parallel,
    ParameterGroup,
    Run,
    RunConfig,
    Source,
    Train,
)

__all__ = [
    "BatchRamp",
    "Checkpoint",
    "Data",
    "Emulate",
    "Faults",
    "Latent",
    "Meter",
    "Model",
    "Moe",
    "Optim",
    "Parallel",
    "ParameterGroup",
    "RotaryScaling",
    "Run",
    "RunConfig",
    "Source",
    "Train",
    "common",
    "dump",
    "explain",
    "listing",
    "load",
    "unknown_options",
]
