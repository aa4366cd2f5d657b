"""RunConfig from files and overrides, and back to YAML.

All mistakes are gathered and raised as one `UserError`, so that a user mends a config in one go.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import yaml
from pydantic import ValidationError

from megaframe.config.describe import allowed_inside, keys, nearest, shown
from megaframe.config.read import MAX_MISTAKES, Given, Mistake, Reader, Table, merged
from megaframe.config.schema import RunConfig
from megaframe.config.shipped import config_path
from megaframe.errors import UserError

MAX_SHOWN = 60
"""Characters of a wrong value that a message repeats."""


def load(path: str | None, overrides: Sequence[str] = ()) -> RunConfig:
    """The config of a YAML file (defaults without one) under `section.key=value` overrides.

    The name of one of ours, such as llama3-8b, is as good as a path. A file may name others with
    `extends`, relative to itself: their keys come first. Raises `UserError` with every mistake,
    each with its file and line.
    """
    reader = Reader()
    table = reader.file(config_path(path)) if path is not None else {}
    table = merged(table, reader.overrides(overrides))
    config, mistakes = _validated(table)
    mistakes += reader.mistakes
    if config is None or mistakes:
        lines = dict.fromkeys(str(mistake) for mistake in sorted(mistakes, key=lambda m: m.order))
        count = "1 mistake" if len(lines) == 1 else f"{len(lines)} mistakes"
        raise UserError("\n  ".join([f"{count} in the config", *lines]))
    return config


def dump(config: RunConfig) -> str:
    """All keys of a config as YAML that `load` reads back to an equal one."""
    # Without allow_unicode: PyYAML writes a next line (U+0085) as a line break that it folds.
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False)


def _validated(table: Table) -> tuple[RunConfig | None, list[Mistake]]:
    nested: dict[str, Any] = {}
    for name, given in table.items():
        *sections, last = name.split(".")
        inner = nested
        for section in sections:
            inner = inner.setdefault(section, {})
        inner[last] = given.value()
    try:
        return RunConfig.model_validate(nested), []
    except ValidationError as errors:
        # A default that follows from a key with a mistake cannot be derived; not one of its own.
        own = [e for e in errors.errors() if e["type"] != "default_factory_not_called"]
        return None, [_mistake(e["type"], e["loc"], table) for e in own[:MAX_MISTAKES]]


def _mistake(kind: str, location: tuple[int | str, ...], table: Table) -> Mistake:
    """A pydantic error in our words, at the place where the value was given."""
    name, path = _split(location)
    full = ".".join(map(str, (name, *path)))
    if name not in table:
        section = name.rpartition(".")[0]
        first = next(given for key, given in table.items() if key.startswith(f"{section}."))
        takes = keys()[name].allowed
        text = f"{name}: missing, but other keys of {section} are given; it takes {takes}"
        return Mistake(first.origin, first.line, text)
    place = table[name].at(path)
    if kind == "extra_forbidden":
        text = f"{full}: unknown key; did you mean {nearest(_without_numbers(full))}?"
    elif kind == "missing" and isinstance(path[-1], str):
        text = f"{full}: missing; it takes {allowed_inside(keys()[name], path)}"
    elif kind == "missing":
        # Too few items: speak of the list.
        text = f"{name}={_shown(table[name])}: takes {keys()[name].allowed}"
    else:
        text = f"{full}={_shown(place)}: takes {allowed_inside(keys()[name], path)}"
    return Mistake(place.origin, place.line, text + _whole_number(place, text))


def _split(location: tuple[int | str, ...]) -> tuple[str, tuple[int | str, ...]]:
    """The longest known key that a location starts with, and the path inside its value; none where
    values may be of several types, each of which finds another thing wrong."""
    end = max(
        end for end in range(1, len(location) + 1) if ".".join(map(str, location[:end])) in keys()
    )
    name = ".".join(map(str, location[:end]))
    return name, () if keys()[name].several else location[end:]


def _without_numbers(name: str) -> str:
    return ".".join(part for part in name.split(".") if not part.isdigit())


def _whole_number(given: Given, text: str) -> str:
    """How to write a whole number such as 1e6 where one is wanted."""
    value = given.value()
    if not isinstance(value, str) or "takes a whole number" not in text:
        return ""
    try:
        number = float(value)
    except ValueError:
        return ""
    writable = number.is_integer() and abs(number) < 1e15 and "e" in value.lower()
    return f"; write {int(number)}" if writable else ""


def _shown(given: Given) -> str:
    text = shown(given.value())
    return text if len(text) <= MAX_SHOWN else text[:MAX_SHOWN] + "..."
