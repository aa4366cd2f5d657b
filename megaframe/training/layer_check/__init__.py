"""Whether descriptions of layers tell the truth: real layers are built and measured on real ranks,
and compared with what their descriptions say (`tools/check_layers.py`)."""

from megaframe.training.layer_check.compare import (
    DescribedPart,
    Lie,
    find_lies,
    is_measured,
    list_described_parts,
)
from megaframe.training.layer_check.measure import LayerMeasurement, measure_layers

__all__ = [
    "DescribedPart",
    "LayerMeasurement",
    "Lie",
    "find_lies",
    "is_measured",
    "list_described_parts",
    "measure_layers",
]
