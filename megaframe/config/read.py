"""From YAML files and dotted overrides to one flat table: key -> what was given, and where.

The table is flat because then `extends`, overrides, duplicate keys and line numbers are all dict
operations on full dotted names. Nothing is constructed from YAML: only its node tree is walked and
scalars stay text, so a tag can do no harm and `1e-4` means whatever the type of its field says.
Files are bounded in size and depth, and aliases are refused.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from megaframe.config.describe import keys, nearest

COMMAND_LINE = "command line"
MAX_BYTES = 1_000_000
MAX_DEPTH = 32
MAX_FILES = 64
MAX_MISTAKES = 100
"""Mistakes after which a file is read no further; whoever made so many chose a wrong file."""
_PREFIX = "tag:yaml.org,2002:"
_TAGS = {
    _PREFIX + kind
    for kind in ["null", "bool", "int", "float", "timestamp", "str", "seq", "map", "value", "merge"]
}


@dataclass(frozen=True)
class Mistake:
    """One thing that is wrong: in which file (or on the command line), on which line, and what.

    Line 0 is the file as a whole.
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
        """Sorts mistakes by file and line, the command line last."""
        typed = self.origin == COMMAND_LINE
        return (typed, self.origin, 0 if typed else self.line)


@dataclass(frozen=True)
class Given:
    """The value given for one key, as a YAML node, and the file that it stands in."""

    node: yaml.Node
    origin: str

    @property
    def line(self) -> int:
        """Line of the value, from 1."""
        return self.node.start_mark.line + 1

    def at(self, path: Sequence[int | str]) -> Given:
        """The item at `path` inside this value, or the innermost one around it that exists."""
        node = self.node
        for part in path:
            inside = _children(node).get(part)
            if inside is None:
                break
            node = inside
        return Given(node, self.origin)

    def value(self) -> Any:
        """Plain lists, dicts and text; None for null."""
        return _plain(self.node)


Table = dict[str, Given]


@dataclass
class Reader:
    """Reads the parts of one config; `mistakes` gathers what is wrong in any of them."""

    mistakes: list[Mistake] = field(default_factory=list)
    files: int = 0

    def file(self, path: str, chain: tuple[str, ...] = ()) -> Table:
        """The keys of a file over those of the files that it extends.

        A path that cannot be opened is a mistake of the last file in `chain`, which named it.
        """
        self.files += 1
        try:
            with open(path, "rb") as stream:
                raw = stream.read(MAX_BYTES + 1)
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else str(error)
            self._wrong(path, None, f"cannot be read: {reason}")
            return {}
        if len(raw) > MAX_BYTES:
            self._wrong(path, None, f"is larger than {MAX_BYTES} bytes; a config is a few thousand")
            return {}
        root = self._compose(raw, path)
        if root is None:
            return {}
        if not isinstance(root, yaml.MappingNode):
            self._wrong(path, root, "a config must be made of sections, such as `train:`")
            return {}
        here = (*chain, os.path.realpath(path))
        table: Table = {}
        for name, node in self._items(root, path):
            if name == "extends":
                for base, base_node in self._bases(node, path):
                    table = merged(table, self._extended(base, base_node, path, here))
        return merged(table, self._flat(root, "", path, skip="extends"))

    def overrides(self, texts: Iterable[str]) -> Table:
        """The keys of `section.key=value` texts; a later one wins."""
        table: Table = {}
        for text in texts:
            name, equals, value = text.partition("=")
            if not equals:
                self._wrong(COMMAND_LINE, None, f"{text!r} is not of the form section.key=value")
                continue
            node = self._compose(value.encode("utf-8", "replace"), COMMAND_LINE, f"{name}: ")
            if node is not None:
                table = merged(table, self._entry(name.strip(), node, node, COMMAND_LINE))
        return table

    def _wrong(self, origin: str, node: yaml.Node | None, text: str) -> None:
        line = node.start_mark.line + 1 if node else 0
        self.mistakes.append(Mistake(origin, line, text))

    def _compose(self, raw: bytes, origin: str, about: str = "") -> yaml.Node | None:
        """The node tree of a YAML text; None, and a mistake, for what is not YAML.

        A file without content gives None too, an override without a value null.
        """
        try:
            loader = _Loader(raw.decode("utf-8-sig"))
            node = loader.get_single_node()
            if node is None and origin == COMMAND_LINE:
                return yaml.ScalarNode(_PREFIX + "null", "", loader.get_mark())
            return node
        except yaml.MarkedYAMLError as error:
            line = error.problem_mark.line + 1 if error.problem_mark else 1
            problem = error.problem or error.context
            self.mistakes.append(Mistake(origin, line, f"{about}not valid YAML: {problem}"))
        except (yaml.YAMLError, UnicodeDecodeError) as error:
            reason = str(error).splitlines()[0]
            self._wrong(origin, None, f"{about}not valid YAML text: {reason}")
        return None

    def _bases(self, node: yaml.Node, origin: str) -> list[tuple[str, yaml.Node]]:
        items = node.value if isinstance(node, yaml.SequenceNode) else [node]
        names = [item for item in items if isinstance(item, yaml.ScalarNode) and item.value]
        if len(names) < len(items):
            self._wrong(origin, node, "extends: takes a file name or a list of them")
        return [(item.value, item) for item in names]

    def _extended(self, base: str, node: yaml.Node, origin: str, chain: tuple[str, ...]) -> Table:
        path = os.path.normpath(os.path.join(os.path.dirname(origin), base))
        if os.path.realpath(path) in chain:
            files = [*chain[chain.index(os.path.realpath(path)) :], path]
            circle = " -> ".join(Path(file).name for file in files)
            self._wrong(origin, node, f"extends: {base} goes in a circle: {circle}")
            return {}
        if self.files >= MAX_FILES:
            self._wrong(origin, node, f"extends: more than {MAX_FILES} files are read")
            return {}
        if not os.path.isfile(path):
            self._wrong(origin, node, f"extends: there is no file {path}")
            return {}
        return self.file(path, chain)

    def _items(
        self, mapping: yaml.MappingNode, origin: str, prefix: str = ""
    ) -> list[tuple[str, yaml.Node]]:
        """Keys and values of a mapping; keys that are no text or stand twice are mistakes."""
        items: dict[str, yaml.Node] = {}
        lines: dict[str, int] = {}
        for key, value in mapping.value:
            if not isinstance(key, yaml.ScalarNode):
                self._wrong(origin, key, "a key must be plain text")
            elif key.value in items:
                first = lines[key.value]
                self._wrong(origin, key, f"{prefix}{key.value}: given twice, first on line {first}")
            else:
                items[key.value] = value
                lines[key.value] = key.start_mark.line + 1
        return list(items.items())

    def _flat(
        self, mapping: yaml.MappingNode, prefix: str, origin: str, skip: str | None = None
    ) -> Table:
        """The table of one mapping, which holds the keys that start with `prefix`."""
        nodes = {key.value: key for key, _ in mapping.value if isinstance(key, yaml.ScalarNode)}
        table: Table = {}
        for name, value in self._items(mapping, origin, prefix):
            if name == skip:
                continue
            entry = self._entry(prefix + name, nodes[name], value, origin)
            for twice in table.keys() & entry.keys():
                self._wrong(
                    origin, value, f"{twice}: given twice, first on line {table[twice].line}"
                )
            table |= entry
        return table

    def _entry(self, name: str, at: yaml.Node, value: yaml.Node, origin: str) -> Table:
        """What one key and its value add to the table: itself, or all that is beneath it."""
        key = keys().get(name)
        if len(self.mistakes) >= MAX_MISTAKES:
            return {}
        if key is None:
            self._wrong(origin, at, _unknown(name))
            return {}
        if key.section is None:
            return {name: Given(value, origin)} if self._sound(name, value, origin) else {}
        if isinstance(value, yaml.MappingNode):
            return self._flat(value, f"{name}.", origin)
        if not _is_null(value):
            self._wrong(origin, value, f"{name}: is a section; give its keys, {_example(name)}")
            return {}
        return {name: Given(value, origin)} if key.nullable else {}

    def _sound(self, name: str, node: yaml.Node, origin: str) -> bool:
        """Whether a value is made of plain YAML only, inside too."""
        if node.tag not in _TAGS:
            self._wrong(origin, node, f"{name}: YAML tag {node.tag.replace(_PREFIX, '!!')} refused")
            return False
        if isinstance(node, yaml.MappingNode):
            before = len(self.mistakes)
            inside = [value for _, value in self._items(node, origin, f"{name}: ")]
            if len(self.mistakes) > before:
                return False
        else:
            inside = node.value if isinstance(node, yaml.SequenceNode) else []
        return all([self._sound(name, item, origin) for item in inside])


def merged(base: Table, over: Mapping[str, Given]) -> Table:
    """`base` with the keys of `over` in their place.

    A section set to null ends the keys beneath it, and a key beneath ends the null.
    """
    table = dict(base)
    for name in over:
        for old in list(table):
            if old.startswith(f"{name}.") or name.startswith(f"{old}."):
                del table[old]
    return table | dict(over)


class _Loader(yaml.SafeLoader):
    """Makes node trees only; refuses aliases, which can grow without bound, and deep nesting."""

    depth = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        event = self.peek_event()
        problem = None
        if isinstance(event, yaml.AliasEvent):
            problem = f"alias *{event.anchor} refused; share keys by extends"
        elif self.depth == MAX_DEPTH:
            problem = f"nested more than {MAX_DEPTH} deep"
        if problem:
            raise yaml.composer.ComposerError(None, None, problem, event.start_mark)
        self.depth += 1
        node: yaml.Node | None = super().compose_node(parent, index)
        self.depth -= 1
        return node


def _unknown(name: str) -> str:
    """What to say of a key that is none."""
    parent = name.rpartition(".")[0]
    while parent and parent not in keys():
        parent = parent.rpartition(".")[0]
    if parent and keys()[parent].section is None:
        return f"{name}: {parent} has no keys beneath it; it takes {keys()[parent].allowed}"
    return f"{name}: unknown key; did you mean {nearest(name)}?"


def _example(section: str) -> str:
    return "such as " + next(name for name in keys() if name.startswith(f"{section}."))


def _is_null(node: yaml.Node) -> bool:
    return bool(node.tag == _PREFIX + "null")


def _children(node: yaml.Node) -> dict[int | str, yaml.Node]:
    if isinstance(node, yaml.MappingNode):
        return {key.value: value for key, value in node.value}
    return dict(enumerate(node.value)) if isinstance(node, yaml.SequenceNode) else {}


def _plain(node: yaml.Node) -> Any:
    if isinstance(node, yaml.MappingNode):
        return {key.value: _plain(value) for key, value in node.value}
    if isinstance(node, yaml.SequenceNode):
        return [_plain(item) for item in node.value]
    return None if _is_null(node) else node.value
