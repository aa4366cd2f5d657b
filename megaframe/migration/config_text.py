"""Writes a conversion as YAML, with the source of each key and all notes as comments."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import yaml

from megaframe.io.untrusted import escape_unprintable, mask_secrets
from megaframe.migration.conversion import HEADINGS, Conversion, nest
from megaframe.migration.shell_script import MARK

_WIDTH = 100
_MOST_SHOWN = 400
"""Characters of a comment that are shown, and of a value in one: a script may hold anything."""


def format_config(conversion: Conversion, source: str) -> str:
    """Return a config with comments.

    Args:
        conversion: What is to be written.
        source: The name of the file that it comes from.
    """
    lines = [f"# {_clean(source)}, settings of {conversion.program}, by tools/migrate.py.", "#"]
    for heading in HEADINGS:
        notes = conversion.notes[heading]
        if notes:
            lines += [f"# {heading}:", *(f"#   {_clean(note)}" for note in notes), "#"]
    lines += _format_section(nest(conversion.keys), "")
    return "\n".join(lines) + "\n"


def _format_section(section: Mapping[str, Any], indent: str) -> Iterator[str]:
    for name, inside in section.items():
        if isinstance(inside, Mapping):
            yield f"{indent}{name}:"
            yield from _format_section(inside, f"{indent}  ")
            continue
        value, origin = inside
        line = f"{indent}{name}: {_format_value(value)}"
        yield f"{line}  # {_clean(origin)}" if origin else line


def _format_value(value: Any) -> str:
    """Return a value as YAML on one line."""
    style = '"' if isinstance(value, str) and not value.isprintable() else None
    text = yaml.safe_dump(value, default_flow_style=True, default_style=style, width=10**9)
    return text.removesuffix("\n").removesuffix("\n...")


def _clean(text: str) -> str:
    """Return a text that stays on the line of its comment, without secrets."""
    flat = " ".join(text.replace(MARK, "").split())
    shown = escape_unprintable(mask_secrets(flat))
    return shown if len(shown) <= _MOST_SHOWN else f"{shown[:_MOST_SHOWN]}..."
