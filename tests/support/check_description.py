"""Asserts that the descriptions of a config's layers are those of its real layers, on this rank."""

from megaframe.config import RunConfig
from megaframe.training.layer_check import find_lies, measure_layers


def check_descriptions(config: RunConfig) -> None:
    """Compare all descriptions of a config with their layers. An error names layers, numbers and
    lines."""
    lies = find_lies(config, [measure_layers(config)])
    assert not lies, "\n".join(map(str, lies))
