"""Makes a `RunConfig` from files and overrides, and writes one back as YAML.

All mistakes are collected and raised as one `UserError`, so that a user can fix a config in one go.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from megaframe.config.keys import (
    describe_type_at,
    drop_kinds,
    format_value,
    get_config_keys,
    suggest_keys,
)
from megaframe.config.read import (
    MAX_MISTAKES,
    ConfigMistake,
    ConfigReader,
    ConfigTable,
    ConfigValue,
    merge_layers,
    merge_tables,
)
from megaframe.config.schema import RunConfig
from megaframe.config.section import MOST
from megaframe.config.shipped import find_shipped_config, is_shipped_name, suggest_shipped_configs
from megaframe.errors import UserError
from megaframe.io.run_files import CONFIG_FILE

MAX_SHOWN = 60
"""Maximum number of characters of a wrong value that a message repeats."""


def load(path: str | None, overrides: Sequence[str] = ()) -> RunConfig:
    """Return the config in a YAML file (all defaults without one), with `section.key=value`
    overrides applied.

    `path` may also be the name of a shipped config, such as llama3-8b. A file may name others with
    `extends`, relative to itself or by the name of a shipped config, and its keys replace theirs.

    Raises:
        UserError: With all mistakes, each with its file and line.
    """
    reader = ConfigReader()
    table = reader.read_file(resolve_config_path(path)) if path is not None else {}
    table = merge_layers(table, reader.read_overrides(overrides))
    return _validate_or_raise(table, reader.mistakes)


def load_from_run(folder: Path, names: Collection[str] | None = None) -> RunConfig:
    """Return the config in the folder of a run, which may be somebody else's: it is read as it is,
    without `extends` and without following a link.

    Args:
        folder: The folder.
        names: The keys that are used, such as `run.dir`; the others, which may be of parts that
            are not loaded, are at their defaults. None uses all.

    Raises:
        UserError: With all mistakes in these keys, and all of YAML.
    """
    reader = ConfigReader(folder)
    table = reader.read_file(str(folder / CONFIG_FILE))
    used = {key: value for key, value in table.items() if names is None or key in names}
    return _validate_or_raise(used, reader.mistakes)


def apply_overrides(config: RunConfig, overrides: Sequence[str]) -> RunConfig:
    """Return a config with `section.key=value` overrides applied. What follows from other keys
    follows from their new values.

    Raises:
        UserError: With all mistakes.
    """
    nested = config.model_dump(mode="json", exclude_unset=True)
    reader = ConfigReader()
    table = reader.read_text(yaml.safe_dump(nested).encode(), "config")
    table = merge_tables(table, reader.read_overrides(overrides))
    return _validate_or_raise(table, reader.mistakes)


def list_overridden_keys(overrides: Sequence[str]) -> frozenset[str]:
    """Return the keys that `section.key=value` overrides name.

    Raises:
        UserError: With the mistakes of those that name none.
    """
    reader = ConfigReader()
    table = reader.read_overrides(overrides)
    if reader.mistakes:
        raise UserError("; ".join(mistake.text for mistake in reader.mistakes))
    return frozenset(table)


def _validate_or_raise(table: ConfigTable, read_mistakes: Sequence[ConfigMistake]) -> RunConfig:
    config, mistakes = _validate(table)
    mistakes += read_mistakes
    if config is None or mistakes:
        lines = dict.fromkeys(str(mistake) for mistake in sorted(mistakes, key=lambda m: m.order))
        count = "1 mistake" if len(lines) == 1 else f"{len(lines)} mistakes"
        raise UserError("\n  ".join([f"{count} in the config", *lines]))
    return config


def read_extension_names(
    path: str | None, overrides: Sequence[str] = ()
) -> list[tuple[str, str, int]]:
    """Return the items of `run.extensions` as a config gives them, each with its file and line.
    Other mistakes are left to `load`."""
    reader = ConfigReader()
    table = reader.read_file(resolve_config_path(path)) if path is not None else {}
    return _list_extension_names(merge_tables(table, reader.read_overrides(overrides)))


def read_extension_names_from_run(folder: Path) -> list[str]:
    """Return the items of `run.extensions` in the config of a run's folder, as `load_from_run`
    reads it."""
    table = ConfigReader(folder).read_file(str(folder / CONFIG_FILE))
    return [name for name, _, _ in _list_extension_names(table)]


def _list_extension_names(table: ConfigTable) -> list[tuple[str, str, int]]:
    value = table.get("run.extensions")
    names = None if value is None else value.to_plain()
    if value is None or not isinstance(names, list):
        return []
    items = [value.get_at((index,)) for index in range(len(names))]
    return [
        (name, item.origin, item.line)
        for name, item in zip(names, items, strict=True)
        if isinstance(name, str) and name
    ]


def resolve_config_path(name: str) -> str:
    """Return the file that `--config` means: a path is returned unchanged, and a bare name, such as
    llama3-8b, is a shipped config.

    Raises:
        UserError: If no shipped config has that name.
    """
    given = Path(name)
    if not is_shipped_name(name) or (given.exists() and not given.is_dir()):
        return name
    path = find_shipped_config(name)
    if path is None:
        raise UserError(
            f"--config {name}: no such file or shipped config; use {suggest_shipped_configs(name)}"
        )
    return str(path)


def dump(config: RunConfig) -> str:
    """Return all keys of a config as YAML; `load` reads it back to an equal config."""
    # No allow_unicode: PyYAML would write U+0085 (next line) as a line break, and fold it.
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False)


def _validate(table: ConfigTable) -> tuple[RunConfig | None, list[ConfigMistake]]:
    nested: dict[str, Any] = {}
    for name, value in table.items():
        *sections, last = name.split(".")
        inner = nested
        for section in sections:
            inner = inner.setdefault(section, {})
        inner[last] = value.to_plain()
    try:
        return RunConfig.model_validate(nested), []
    except ValidationError as errors:
        # A default derived from an invalid key cannot be computed; that is no mistake of its own.
        relevant_errors = [e for e in errors.errors() if e["type"] != "default_factory_not_called"]
        return None, [
            _to_config_mistake(e["type"], e["loc"], table) for e in relevant_errors[:MAX_MISTAKES]
        ]


def _to_config_mistake(
    kind: str, location: tuple[int | str, ...], table: ConfigTable
) -> ConfigMistake:
    """Convert a pydantic error to a `ConfigMistake` in our words, located where the value was
    given."""
    name, given_path = _split_location(location)
    path = drop_kinds(get_config_keys()[name], given_path)
    full = ".".join(map(str, (name, *path)))
    if name not in table:
        section = name.rpartition(".")[0]
        first = next(value for key, value in table.items() if key.startswith(f"{section}."))
        takes = get_config_keys()[name].allowed
        text = f"{name}: missing, but other keys of {section} are given; it takes {takes}"
        return ConfigMistake(first.origin, first.line, text)
    value = table[name].get_at(path)
    if kind == "extra_forbidden":
        text = f"{full}: unknown key; {suggest_keys(_drop_indices(full))}"
    elif kind == "missing" and isinstance(path[-1], str):
        text = f"{full}: missing; it takes {describe_type_at(get_config_keys()[name], given_path)}"
    elif kind == "missing":
        # A list has too few items: report the whole list.
        text = f"{name}={_format_shortened(table[name])}: takes {get_config_keys()[name].allowed}"
    else:
        takes = describe_type_at(get_config_keys()[name], given_path)
        text = f"{full}={_format_shortened(value)}: takes {takes}"
    return ConfigMistake(value.origin, value.line, text + _suggest_value(value, text))


def _split_location(location: tuple[int | str, ...]) -> tuple[str, tuple[int | str, ...]]:
    """Split a location into the longest known key that it starts with and the path inside its
    value. The path is empty if values may be of several types, because pydantic then reports a
    different error for each type."""
    end = max(
        end
        for end in range(1, len(location) + 1)
        if ".".join(map(str, location[:end])) in get_config_keys()
    )
    name = ".".join(map(str, location[:end]))
    return name, () if get_config_keys()[name].several else location[end:]


def _drop_indices(name: str) -> str:
    return ".".join(part for part in name.split(".") if not part.isdigit())


def _suggest_value(config_value: ConfigValue, text: str) -> str:
    """Return how to write a list of one item that was given without brackets, or a whole number
    that was given as, e.g., 1e6, or that it is too large; empty if not needed."""
    value = config_value.to_plain()
    if isinstance(value, str) and "takes a list, each" in text:
        return f"; write [{_format_shortened(config_value)}]"
    if not isinstance(value, str | int) or "takes a whole number" not in text:
        return ""
    try:
        number = float(value)
    except (ValueError, OverflowError):
        return ""
    if number > MOST:
        return f", at most {MOST:,}"
    if not isinstance(value, str):
        return ""
    writable = number.is_integer() and abs(number) < 1e15 and "e" in value.lower()
    return f"; write {int(number)}" if writable else ""


def _format_shortened(value: ConfigValue) -> str:
    text = format_value(value.to_plain())
    return text if len(text) <= MAX_SHOWN else text[:MAX_SHOWN] + "..."
