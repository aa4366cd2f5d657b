"""What an extension may use to bring parts of its own (docs/guides/extensions.md)."""

from megaframe.config.parts import OptimizerPart, Part, Registry, SchedulePart
from megaframe.extensions.load import find_mistakes, load_extensions, load_with_extensions

__all__ = [
    "OptimizerPart",
    "Part",
    "Registry",
    "SchedulePart",
    "find_mistakes",
    "load_extensions",
    "load_with_extensions",
]
