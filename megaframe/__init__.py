"""megaframe: pretrains GPT-style transformers; layout never changes the answer.

The names in `__all__` are all that the package promises; docs/guides/library.md describes them.
Each is imported when it is first used, so `import megaframe` costs nothing.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megaframe.errors import UserError as UserError
    from megaframe.inference.library import build_model as build_model
    from megaframe.inference.library import load_config as load_config
    from megaframe.inference.library import load_model as load_model
    from megaframe.inference.library import open_checkpoint as open_checkpoint
    from megaframe.inference.model import Model as Model
    from megaframe.training.entry import train as train

__version__ = "0.1.0"
"""Defined only here: pyproject.toml reads it, and CHANGELOG.md lists what each version changes."""

_MODULES = {
    "Model": "megaframe.inference.model",
    "UserError": "megaframe.errors",
    "build_model": "megaframe.inference.library",
    "load_config": "megaframe.inference.library",
    "load_model": "megaframe.inference.library",
    "open_checkpoint": "megaframe.inference.library",
    "train": "megaframe.training.entry",
}
"""Where each name is defined."""
__all__ = ["__version__", *_MODULES]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_MODULES[name]), name)
    return value


def __dir__() -> list[str]:
    return [*globals(), *_MODULES]
