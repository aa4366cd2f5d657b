"""Reads YAML files and dotted overrides into one flat table: key -> value as given, and its origin.

The table is flat so that `extends`, overrides, duplicate keys and line numbers are dict operations
on full dotted names. No objects are constructed from YAML: only its node tree is walked, and
scalars stay text. A tag can therefore do no harm, and the type of a field determines what `1e-4`
means. Files are bounded in size and depth, and aliases are refused.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from megaframe.config.keys import get_config_keys, suggest_keys
from megaframe.config.migration import upgrade_name
from megaframe.config.shipped import find_shipped_config, is_shipped_name, suggest_shipped_configs
from megaframe.config.url import find_text_mistake
from megaframe.io.untrusted import PlainLoader, open_file, to_plain_data

COMMAND_LINE = "command line"
MAX_BYTES = 1_000_000
MAX_FILES = 64
MAX_MISTAKES = 100
"""Number of mistakes after which no more keys are read: the file is probably the wrong one."""
_LENGTHS = ("train.steps", "data.epochs", "data.phases")
_PREFIX = "tag:yaml.org,2002:"
_TAGS = {
    _PREFIX + kind
    for kind in ["null", "bool", "int", "float", "timestamp", "str", "seq", "map", "value", "merge"]
}


@dataclass(frozen=True)
class ConfigMistake:
    """One mistake: its file (or the command line), its line, and what is wrong.

    Line 0 means the file as a whole.
    """

    origin: str
    line: int
    text: str

    def __str__(self) -> str:
        if self.line == 0 or self.origin == COMMAND_LINE:
            return f"{self.origin}: {self.text}"
        return f"{self.origin}:{self.line}: {self.text}"

    @property
    def order(self) -> tuple[bool, str, int]:
        """Sort key: by file and line, with the command line last."""
        typed = self.origin == COMMAND_LINE
        return (typed, self.origin, 0 if typed else self.line)


@dataclass(frozen=True)
class ConfigValue:
    """The value given for a key, as a YAML node, and its origin: a file or the command line."""

    node: yaml.Node
    origin: str

    @property
    def line(self) -> int:
        """Line of the value, counted from 1."""
        return self.node.start_mark.line + 1

    def get_at(self, path: Sequence[int | str]) -> ConfigValue:
        """Return the item at `path` inside this value, or the innermost existing one around it."""
        node = self.node
        for part in path:
            inside = _get_children(node).get(part)
            if inside is None:
                break
            node = inside
        return ConfigValue(node, self.origin)

    def to_plain(self) -> Any:
        """Return the value as plain lists, dicts and text; None for null."""
        return to_plain_data(self.node)


ConfigTable = dict[str, ConfigValue]


@dataclass
class ConfigReader:
    """Reads the parts of one config, and collects their mistakes in `mistakes`.

    Attributes:
        run_folder: That of a run, if its config is read. It may be somebody else's, so it is read
            as it is: no link in the folder is followed, and the config extends nothing. Sections
            may have the names of an earlier version.
    """

    run_folder: Path | None = None
    mistakes: list[ConfigMistake] = field(default_factory=list)
    files: int = 0

    def read_file(self, path: str, chain: tuple[str, ...] = ()) -> ConfigTable:
        """Return the keys of a file, which replace those of the files that it extends.

        Args:
            path: Path or URL of the file.
            chain: The files that led here through `extends`. A file that cannot be used adds a
                mistake and has no keys.
        """
        self.files += 1
        try:
            with open_file(path, inside=self.run_folder) as stream:
                raw = stream.read(MAX_BYTES + 1)
        except OSError as error:
            self._add_mistake(path, None, f"cannot be read: {error.strerror}")
            return {}
        if len(raw) > MAX_BYTES:
            self._add_mistake(
                path, None, f"is larger than {MAX_BYTES} bytes; a config is a few thousand"
            )
            return {}
        return self.read_text(raw, path, chain)

    def read_text(self, raw: bytes, origin: str, chain: tuple[str, ...] = ()) -> ConfigTable:
        """Return the keys of a YAML text, which replace those of the files that it extends.

        Args:
            raw: The text.
            origin: Where it is from, for messages; the path of its file, if it extends others.
            chain: The files that led here through `extends`.
        """
        root = self._compose(raw, origin)
        if root is None:
            return {}
        if not isinstance(root, yaml.MappingNode):
            self._add_mistake(origin, root, "a config must be made of sections, such as `train:`")
            return {}
        chain_with_file = (*chain, os.path.realpath(origin))
        table: ConfigTable = {}
        for name, node in self._list_items(root, origin):
            if name == "extends":
                for base, base_node in self._read_bases(node, origin):
                    table = merge_layers(
                        table, self._read_base(base, base_node, origin, chain_with_file)
                    )
        return merge_layers(table, self._flatten(root, "", origin, skip="extends"))

    def read_overrides(self, texts: Iterable[str]) -> ConfigTable:
        """Return the keys of `section.key=value` texts; a later text wins.

        The parts of `section.key = value` may be texts of their own.
        """
        table: ConfigTable = {}
        for text in _join_spaced_overrides(texts):
            name, equals, value = text.partition("=")
            if any(
                0xDC80 <= ord(character) <= 0xDCFF for character in text
            ):  # how Python passes other bytes
                self._add_mistake(COMMAND_LINE, None, f"{text!r} has bytes that are not UTF-8")
                continue
            if not equals:
                self._add_mistake(
                    COMMAND_LINE, None, f"{text!r} is not of the form section.key=value"
                )
                continue
            node = self._compose(value.encode("utf-8", "replace"), COMMAND_LINE, f"{name}: ")
            if node is not None:
                table = merge_tables(
                    table, self._read_entry(name.strip(), node, node, COMMAND_LINE)
                )
        return table

    def _add_mistake(self, origin: str, node: yaml.Node | None, text: str) -> None:
        line = node.start_mark.line + 1 if node else 0
        self.mistakes.append(ConfigMistake(origin, line, text))

    def _compose(self, raw: bytes, origin: str, about: str = "") -> yaml.Node | None:
        """Return the node tree of a YAML text. If it is not YAML, record a mistake and return None.

        An empty file also gives None; an override without a value gives null.
        """
        try:
            loader = PlainLoader(raw.decode("utf-8-sig"))
            node = loader.get_single_node()
            if node is None and origin == COMMAND_LINE:
                return yaml.ScalarNode(_PREFIX + "null", "", loader.get_mark())
            return node
        except yaml.MarkedYAMLError as error:
            line = error.problem_mark.line + 1 if error.problem_mark else 1
            problem = error.problem or error.context
            self.mistakes.append(ConfigMistake(origin, line, f"{about}not valid YAML: {problem}"))
        except (yaml.YAMLError, UnicodeDecodeError) as error:
            reason = str(error).splitlines()[0]
            self._add_mistake(origin, None, f"{about}not valid YAML text: {reason}")
        return None

    def _read_bases(self, node: yaml.Node, origin: str) -> list[tuple[str, yaml.Node]]:
        if self.run_folder is not None:
            self._add_mistake(origin, node, "extends: refused in a run folder")
            return []
        items = node.value if isinstance(node, yaml.SequenceNode) else [node]
        names = [item for item in items if isinstance(item, yaml.ScalarNode) and item.value]
        if len(names) < len(items):
            self._add_mistake(origin, node, "extends: takes a file name or a list of them")
        return [(item.value, item) for item in names]

    def _read_base(
        self, base: str, node: yaml.Node, origin: str, chain: tuple[str, ...]
    ) -> ConfigTable:
        if mistake := find_text_mistake(base):
            self._add_mistake(origin, node, f"extends: {mistake}")
            return {}
        path = os.path.normpath(os.path.join(os.path.dirname(origin), base))
        # A folder of that name, such as that of a run, is no config.
        is_there = os.path.exists(path) and not os.path.isdir(path)
        shipped = None if is_there else find_shipped_config(base)
        path = path if shipped is None else str(shipped)
        if os.path.realpath(path) in chain:
            files = [*chain[chain.index(os.path.realpath(path)) :], path]
            circle = " -> ".join(Path(file).name for file in files)
            self._add_mistake(origin, node, f"extends: {base} goes in a circle: {circle}")
            return {}
        if self.files >= MAX_FILES:
            self._add_mistake(origin, node, f"extends: more than {MAX_FILES} files are read")
            return {}
        if not os.path.isfile(path):
            near = f", and no shipped config {base}; use {suggest_shipped_configs(base)}"
            text = f"extends: there is no file {path}" + near * is_shipped_name(base)
            self._add_mistake(origin, node, text)
            return {}
        return self.read_file(path, chain)

    def _list_items(
        self, mapping: yaml.MappingNode, origin: str, prefix: str = ""
    ) -> list[tuple[str, yaml.Node]]:
        """Return keys and values of a mapping. Keys that are not text or repeated are mistakes."""
        items: dict[str, yaml.Node] = {}
        lines: dict[str, int] = {}
        for key, value in mapping.value:
            if not isinstance(key, yaml.ScalarNode):
                self._add_mistake(origin, key, "a key must be plain text")
            elif key.value in items:
                first = lines[key.value]
                self._add_mistake(
                    origin, key, f"{prefix}{key.value}: given twice, first on line {first}"
                )
            else:
                items[key.value] = value
                lines[key.value] = key.start_mark.line + 1
        return list(items.items())

    def _flatten(
        self, mapping: yaml.MappingNode, prefix: str, origin: str, skip: str | None = None
    ) -> ConfigTable:
        """Return the table of one mapping, whose keys all start with `prefix`."""
        nodes = {key.value: key for key, _ in mapping.value if isinstance(key, yaml.ScalarNode)}
        table: ConfigTable = {}
        for name, value in self._list_items(mapping, origin, prefix):
            if name == skip:
                continue
            full = prefix + name
            if self.run_folder is not None:  # which may be of an earlier version
                full = upgrade_name(full)
            entry = self._read_entry(full, nodes[name], value, origin)
            for twice in table.keys() & entry.keys():
                self._add_mistake(
                    origin, value, f"{twice}: given twice, first on line {table[twice].line}"
                )
            table |= entry
        return table

    def _read_entry(self, name: str, at: yaml.Node, value: yaml.Node, origin: str) -> ConfigTable:
        """Return what a key and its value add to the table: the key, or the keys of a section."""
        key = get_config_keys().get(name)
        if len(self.mistakes) >= MAX_MISTAKES:
            return {}
        if key is None:
            self._add_mistake(origin, at, _describe_unknown_key(name))
            return {}
        if key.section is None:
            return {name: ConfigValue(value, origin)} if self._is_plain(name, value, origin) else {}
        if isinstance(value, yaml.MappingNode):
            return self._flatten(value, f"{name}.", origin)
        if not _is_null(value):
            self._add_mistake(
                origin, value, f"{name}: is a section; give its keys, {_give_example_key(name)}"
            )
            return {}
        return {name: ConfigValue(value, origin)} if key.nullable else {}

    def _is_plain(self, name: str, node: yaml.Node, origin: str) -> bool:
        """Return whether a value is, all the way down, plain YAML without duplicate keys."""
        if node.tag not in _TAGS:
            self._add_mistake(
                origin, node, f"{name}: YAML tag {node.tag.replace(_PREFIX, '!!')} refused"
            )
            return False
        if isinstance(node, yaml.ScalarNode) and (mistake := find_text_mistake(node.value)):
            self._add_mistake(origin, node, f"{name}: {mistake}")
            return False
        if isinstance(node, yaml.MappingNode):
            before = len(self.mistakes)
            inside = [value for _, value in self._list_items(node, origin, f"{name}: ")]
            if len(self.mistakes) > before:
                return False
        else:
            inside = node.value if isinstance(node, yaml.SequenceNode) else []
        # A list, not a generator: every item is checked, so that all mistakes are reported.
        return all([self._is_plain(name, item, origin) for item in inside])


def merge_tables(base: ConfigTable, over: Mapping[str, ConfigValue]) -> ConfigTable:
    """Return `base` with the keys of `over` added or replaced.

    A section set to null removes the keys beneath it; a key beneath a section set to null removes
    the null.
    """
    table = dict(base)
    for name in over:
        for old in list(table):
            if old.startswith(f"{name}.") or name.startswith(f"{old}."):
                del table[old]
    return table | dict(over)


def merge_layers(base: ConfigTable, over: ConfigTable) -> ConfigTable:
    """Return `merge_tables` of a file and what extends it, or of files and the command line. The
    length of the run is given by one key of `_LENGTHS`: what `over` gives replaces it."""
    if any(name in over and not _is_null(over[name].node) for name in _LENGTHS):
        base = {name: value for name, value in base.items() if name not in _LENGTHS}
    return merge_tables(base, over)


def _join_spaced_overrides(texts: Iterable[str]) -> list[str]:
    """Return the texts with the parts of `key = value`, `key =value` and `key= value` joined. By
    themselves these parts are mistakes, except for `key=` before another override."""
    joined: list[str] = []
    alone = False  # after an equals sign of its own, anything is a value
    for text in texts:
        before = joined[-1] if joined else ""
        _, equals, value = before.partition("=")
        continues = bool(before) and not equals and text.startswith("=")
        if continues or (equals and not value and (alone or "=" not in text)):
            joined[-1] += text
        else:
            joined.append(text)
        alone = continues and text == "="
    return joined


def _describe_unknown_key(name: str) -> str:
    """Return the message about an unknown key."""
    parent = name.rpartition(".")[0]
    while parent and parent not in get_config_keys():
        parent = parent.rpartition(".")[0]
    if parent and get_config_keys()[parent].section is None:
        return (
            f"{name}: {parent} has no keys beneath it; it takes {get_config_keys()[parent].allowed}"
        )
    return f"{name}: unknown key; {suggest_keys(name)}"


def _give_example_key(section: str) -> str:
    return "such as " + next(name for name in get_config_keys() if name.startswith(f"{section}."))


def _is_null(node: yaml.Node) -> bool:
    return bool(node.tag == _PREFIX + "null")


def _get_children(node: yaml.Node) -> dict[int | str, yaml.Node]:
    if isinstance(node, yaml.MappingNode):
        return {key.value: value for key, value in node.value}
    return dict(enumerate(node.value)) if isinstance(node, yaml.SequenceNode) else {}
