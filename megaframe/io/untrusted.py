"""Files and texts from elsewhere, which may be damaged, hostile or secret: how they are opened,
parsed and shown.

A file that somebody names, or that lies in a folder of somebody else, is opened here: a pipe would
block, and a device may never end. `UserError` passes its text through here, so no message can drive
a terminal or repeat a password.
"""

from __future__ import annotations

import argparse
import errno
import json
import os
import re
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO

import yaml

from megaframe.io.regular_file import Name, open_regular

MAX_DEPTH = 32
"""Deepest nesting of YAML and JSON that is read."""
MAX_NODES = 50_000
"""Most keys, values and lists of a YAML text; a second of reading."""
_LONGEST_INTEGER = 19
"""Digits of the longest integers that stay integers; Python refuses to print ones of thousands."""
_SECRET_NAMES = re.compile(r"secret|token|passw|credential|key|sas|auth", re.IGNORECASE)
"""Matches names of settings whose values are secrets."""
_SHORTEST_SECRET = 6
_URL = r"(://|\b(?:https?|s3a?|gs|gcs|abfss?|az|adl|s?ftp|hdfs):/)"  # paths lose a slash
_SECRETS = (
    (re.compile(_URL + r"[^\s/'\"@]*:[^\s'\"]*@"), r"\1***@"),
    (re.compile(r"(https?://?)[^\s/'\"@]+@", re.IGNORECASE), r"\1***@"),
    (re.compile(_URL + r"([^\s'\"?#]*[?#])[^\s'\"]+"), r"\1\2***"),
    (re.compile(r"(AKIA|ASIA)[A-Z0-9]{12,}"), "***"),
    (re.compile(r"((Signature|Credential|X-Amz-[A-Za-z-]+)=)[^\s&,]+"), r"\1***"),
    (re.compile(r"\b(hf_[A-Za-z0-9]{30,}|gh[opsur]_[A-Za-z0-9]{30,}|github_pat_\w{30,})"), "***"),
)
"""Matches secrets by their form: in a URL, or as services make them."""


def open_file(path: Name, buffering: int = -1, *, inside: Name | None = None) -> BinaryIO:
    """Open a regular file for reading, without waiting for anything.

    Args:
        path: The file.
        buffering: As of `open`.
        inside: A folder above it, of somebody else, below which no link is followed.

    Raises:
        OSError: With a `strerror` for users, for all else: pipes, devices, folders, and names that
            no file can have.
    """
    return open(open_regular(path, inside), "rb", buffering)


def read_file(path: Name, limit: int, *, inside: Name | None = None) -> bytes:
    """Read a whole regular file.

    Raises:
        OSError: As `open_file` does, and for a file of more than `limit` bytes.
    """
    with open_file(path, inside=inside) as file:
        if os.fstat(file.fileno()).st_size > limit:
            raise OSError(errno.EFBIG, f"it is larger than {limit:,} bytes", os.fspath(path))
        return file.read()


def parse_json(data: bytes) -> Any:
    """Parse JSON.

    Integers of very many digits become floats.

    Raises:
        ValueError: For what is not JSON, or is nested more than `MAX_DEPTH` deep.
    """
    try:
        value = json.loads(data, parse_int=_parse_integer)
    except RecursionError:
        value = None
        depth = MAX_DEPTH + 1
    else:
        depth = _measure_nesting(value)
    if depth > MAX_DEPTH:
        raise ValueError(f"nested more than {MAX_DEPTH} deep")
    return value


def _parse_integer(text: str) -> int | float:
    return int(text) if len(text) <= _LONGEST_INTEGER else float(text)


def _measure_nesting(value: Any) -> int:
    """Return how deep a value is nested, or `MAX_DEPTH + 1` if deeper."""
    level, depth = [value], 0
    while level and depth <= MAX_DEPTH:
        inside = [container for container in level if isinstance(container, dict | list)]
        level = [
            item
            for container in inside
            for item in (container.values() if isinstance(container, dict) else container)
        ]
        depth += bool(inside)
    return depth


def parse_yaml(data: bytes) -> Any:
    """Parse YAML into dicts, lists and text (None for null), whatever its tags say.

    Raises:
        ValueError: For what is not YAML, and for what `PlainLoader` refuses; it does not quote the
            text, because half of a secret would not be recognised.
    """
    try:
        node = PlainLoader(data.decode("utf-8-sig")).get_single_node()
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise ValueError(f"line {line}: {error.problem or error.context}") from None
    except yaml.YAMLError as error:
        raise ValueError(str(error).splitlines()[0]) from None
    return None if node is None else to_plain_data(node)


class PlainLoader(yaml.SafeLoader):
    """Makes node trees only; refuses deep nesting, very many nodes, and aliases, which can grow
    without bound."""

    depth = nodes = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        event = self.peek_event()
        problem = None
        if isinstance(event, yaml.AliasEvent):
            problem = f"alias *{event.anchor} refused; share keys by extends"
        elif self.depth == MAX_DEPTH:
            problem = f"nested more than {MAX_DEPTH} deep"
        elif self.nodes == MAX_NODES:
            problem = f"more than {MAX_NODES:,} keys and values"
        if problem:
            raise yaml.composer.ComposerError(None, None, problem, event.start_mark)
        self.depth += 1
        self.nodes += 1
        node: yaml.Node | None = super().compose_node(parent, index)
        self.depth -= 1
        return node


def to_plain_data(node: yaml.Node) -> Any:
    """Return a node tree as dicts, lists and text, None for null.

    Keys that are not text are left out.
    """
    if isinstance(node, yaml.MappingNode):
        return {
            key.value: to_plain_data(value)
            for key, value in node.value
            if isinstance(key, yaml.ScalarNode)
        }
    if isinstance(node, yaml.SequenceNode):
        return [to_plain_data(item) for item in node.value]
    return None if node.tag == "tag:yaml.org,2002:null" else node.value


def make_integer_parser(least: int, most: int = 10**9) -> Callable[[str], int]:
    """Return a parser of whole numbers from `least` to `most`, as a `type` of argparse."""

    def parse(text: str) -> int:
        number = int(text) if re.fullmatch(r"-?[0-9]{1,18}", text) else None
        if number is None or not least <= number <= most:
            raise argparse.ArgumentTypeError(
                f"{escape_unprintable(text[:40])!r} is not a whole number from {least} to {most}"
            )
        return number

    return parse


def escape_unprintable(text: str) -> str:
    """Return the text with escapes for what a terminal would obey, what nobody sees, and what
    cannot be encoded. Line ends stay."""
    if text.isprintable():
        return text
    return "".join(
        character
        if character.isprintable() or character == "\n"
        else character.encode("unicode_escape").decode()
        for character in text
    )


def sanitize_text(text: str) -> str:
    """Return the text without secrets and control characters."""
    return escape_unprintable(mask_secrets(text))


def mask_secrets(text: str, *settings: Any) -> str:
    """Return the text with secrets masked: those that are known by their form, and those in
    settings (mappings and lists, at any depth) whose names suggest one."""
    secrets = {secret for table in settings for secret in _find_secrets(table)}
    for secret in sorted(secrets, key=len, reverse=True):
        text = text.replace(secret, "***")
    for pattern, mask in _SECRETS:
        text = pattern.sub(mask, text)
    return text


def _find_secrets(settings: Any, is_secret: bool = False) -> Iterator[str]:
    """Yield the values of settings whose names suggest a secret, at any depth. is_secret: whether
    an enclosing name does."""
    if isinstance(settings, dict):
        for name, value in settings.items():
            yield from _find_secrets(value, is_secret or bool(_SECRET_NAMES.search(str(name))))
    elif isinstance(settings, list | tuple):
        for value in settings:
            yield from _find_secrets(value, is_secret)
    elif is_secret and isinstance(settings, str) and len(settings) >= _SHORTEST_SECRET:
        yield settings


def make_printable(text: object) -> str:
    """Return a foreign name as it can be printed: on one line, not too long, without escape
    sequences."""
    plain = str(text)
    plain = plain if plain.isprintable() else ascii(plain)
    return plain if len(plain) <= 200 else f"{plain[:200]}..."
