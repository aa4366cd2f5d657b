"""The configs shipped with megaframe, by name: in a checkout or in an installed wheel.

In a wheel the folder `configs` is named `megaframe_configs` and is next to the package, because
other packages could install a folder named `configs` too.
"""

from __future__ import annotations

from difflib import get_close_matches
from pathlib import Path

from megaframe.errors import UserError

_BESIDE = Path(__file__).resolve().parents[2]
_INSTALLED = _BESIDE / "megaframe_configs"
CONFIGS = _INSTALLED if _INSTALLED.is_dir() else _BESIDE / "configs"


def config_path(given: str) -> str:
    """Return the file that `--config` means: a path is returned unchanged, and a bare name, such as
    llama3-8b, is a shipped config. Raises `UserError` if no shipped config has that name."""
    if "/" in given or given.endswith((".yaml", ".yml")) or Path(given).exists():
        return given
    path = CONFIGS / f"{given}.yaml"
    if not path.is_file():
        names = sorted(found.stem for found in CONFIGS.glob("*.yaml"))
        close = get_close_matches(given, names, 3, 0.0)
        raise UserError(f"--config {given}: no such file or shipped config; use {', '.join(close)}")
    return str(path)
