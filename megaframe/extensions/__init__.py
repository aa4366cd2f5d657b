"""What an extension may use to bring parts of its own (docs/guides/extensions.md)."""

from megaframe.config.parts import (
    ActivationPart,
    CallbackPart,
    DataTransformPart,
    FeedForwardPart,
    LossPart,
    MixerPart,
    NormPart,
    OptimizerPart,
    Part,
    PipelineSchedulePart,
    SchedulePart,
    SinkPart,
)
from megaframe.config.registry import Registry
from megaframe.extensions.callback import Callback, RunView
from megaframe.extensions.load import (
    add_extension_option,
    find_mistakes,
    load_config_of_run,
    load_extensions,
    load_named_extensions,
    load_with_extensions,
    refuse_missing_extensions,
)
from megaframe.extensions.sink import Sink, TextSample

__all__ = [
    "ActivationPart",
    "Callback",
    "CallbackPart",
    "DataTransformPart",
    "FeedForwardPart",
    "LossPart",
    "MixerPart",
    "NormPart",
    "OptimizerPart",
    "Part",
    "PipelineSchedulePart",
    "Registry",
    "RunView",
    "SchedulePart",
    "Sink",
    "SinkPart",
    "TextSample",
    "add_extension_option",
    "find_mistakes",
    "load_config_of_run",
    "load_extensions",
    "load_named_extensions",
    "load_with_extensions",
    "refuse_missing_extensions",
]
