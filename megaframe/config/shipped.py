"""The configs that come with megaframe, by name: of a checkout, or of an installed wheel.

A wheel has the folder `configs` as `megaframe_configs` beside the package, because a folder of the
first name would not be ours alone.
"""

from __future__ import annotations

from difflib import get_close_matches
from pathlib import Path

from megaframe.errors import UserError

_BESIDE = Path(__file__).resolve().parents[2]
_INSTALLED = _BESIDE / "megaframe_configs"
CONFIGS = _INSTALLED if _INSTALLED.is_dir() else _BESIDE / "configs"


def config_path(given: str) -> str:
    """The file that `--config` means: a path as it stands; a mere name, such as llama3-8b, one of
    ours. Raises `UserError` for a name that none of ours has."""
    if "/" in given or given.endswith((".yaml", ".yml")) or Path(given).exists():
        return given
    path = CONFIGS / f"{given}.yaml"
    if not path.is_file():
        names = sorted(found.stem for found in CONFIGS.glob("*.yaml"))
        close = get_close_matches(given, names, 3, 0.0)
        raise UserError(f"--config {given}: no such file or shipped config; use {', '.join(close)}")
    return str(path)
