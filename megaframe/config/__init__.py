"""The configuration of a run: typed sections, read from YAML and overrides, and checked."""

from megaframe.config.data import DataConfig, DataSourceConfig
from megaframe.config.describe import (
    describe_all_keys,
    describe_common_keys,
    describe_unknown_options,
    explain,
)
from megaframe.config.load import dump, load
from megaframe.config.model import (
    EmulationConfig,
    LatentAttentionConfig,
    ModelConfig,
    MoEConfig,
    RotaryScalingConfig,
)
from megaframe.config.optim import OptimConfig, ParameterGroupConfig
from megaframe.config.parallel import ParallelConfig
from megaframe.config.schema import (
    BatchRampConfig,
    CheckpointConfig,
    EvaluateConfig,
    FaultToleranceConfig,
    MetricsConfig,
    RunConfig,
    RunSection,
    TrainConfig,
)

__all__ = [
    "BatchRampConfig",
    "CheckpointConfig",
    "DataConfig",
    "DataSourceConfig",
    "EmulationConfig",
    "EvaluateConfig",
    "FaultToleranceConfig",
    "LatentAttentionConfig",
    "MetricsConfig",
    "MoEConfig",
    "ModelConfig",
    "OptimConfig",
    "ParallelConfig",
    "ParameterGroupConfig",
    "RotaryScalingConfig",
    "RunConfig",
    "RunSection",
    "TrainConfig",
    "describe_all_keys",
    "describe_common_keys",
    "describe_unknown_options",
    "dump",
    "explain",
    "load",
]
