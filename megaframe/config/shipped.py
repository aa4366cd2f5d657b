"""Configs that come with megaframe: their names, and what each says of itself."""

from __future__ import annotations

import re
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

# In a wheel the folder `configs` is named `megaframe_configs` and lies next to the package, because
# other packages could install a folder named `configs` too.
_BESIDE = Path(__file__).resolve().parents[2]
_INSTALLED = _BESIDE / "megaframe_configs"
CONFIGS = _INSTALLED if _INSTALLED.is_dir() else _BESIDE / "configs"


@dataclass(frozen=True)
class ShippedConfig:
    """A shipped config.

    Attributes:
        name: By which `--config` and `extends` take it.
        text: The first sentence of its file.
        machine: What its file says that it is for, such as `8 x H100`.
    """

    name: str
    text: str
    machine: str


def list_shipped_configs() -> list[ShippedConfig]:
    """Return all shipped configs, by name."""
    return [_describe_file(path) for path in sorted(CONFIGS.glob("*.yaml"))]


def _describe_file(path: Path) -> ShippedConfig:
    lines = path.read_text(encoding="utf-8").splitlines()
    count = next((n for n, line in enumerate(lines) if not line.startswith("# ")), len(lines))
    comments = [line[2:] for line in lines[:count]]
    machines = [match[1] for line in comments if (match := re.match(r"(\d+ x [^:]+): ", line))]
    words = " ".join(line for line in comments if not re.match(r"\d+ x [^:]+: ", line))
    sentence = re.split(r"(?<!al)\.(?:\s|$)", words, maxsplit=1)[0]
    return ShippedConfig(path.stem, sentence, machines[0] if machines else "")


def is_shipped_name(name: str) -> bool:
    """Return whether a name is that of a shipped config by its form: not a path, and no suffix."""
    return "/" not in name and not name.endswith((".yaml", ".yml"))


def find_shipped_config(name: str) -> Path | None:
    """Return the file of a shipped config, None if there is none of this name."""
    path = CONFIGS / f"{name}.yaml"
    return path if is_shipped_name(name) and path.is_file() else None


def suggest_shipped_configs(name: str) -> str:
    """Return the names of shipped configs that are most like a name, for a message."""
    names = sorted(path.stem for path in CONFIGS.glob("*.yaml"))
    return ", ".join(get_close_matches(name[:100], names, 3, 0.0))
