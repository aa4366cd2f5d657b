"""Describes the schema in words: every key with its type, range, default and documentation.

Error messages, `--explain` and `--help` all use this one walk over the pydantic models, so that
what a key takes is written down once, in the schema.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher, get_close_matches
from functools import lru_cache
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import Tag
from pydantic.fields import FieldInfo

from megaframe.config.migration import translate_setting
from megaframe.config.parts import Extensible, Part, is_part
from megaframe.config.schema import RunConfig, Section
from megaframe.config.section import MOST
from megaframe.errors import UserError, join_or

WIDTH = 100
MAX_NAME = 100
"""Number of characters of an unknown key that are compared with the known ones."""
COMMON = (
    "run.dir",
    "model.layers",
    "model.hidden",
    "model.heads",
    "parallel.auto",
    "parallel.tensor",
    "parallel.pipeline",
    "parallel.zero",
    "train.steps",
    "train.seq",
    "train.global_batch",
    "train.microbatch",
    "train.precision",
    "train.eval_every",
    "optim.lr",
    "optim.warmup",
    "data.sources",
    "data.tokenizer",
    "checkpoint.every",
    "checkpoint.resume",
    "meter.wandb",
)
"""The keys that people change, in the order of the schema: few enough for one screen."""


@dataclass(frozen=True)
class ConfigKey:
    """One dotted key.

    Attributes:
        name: `section.key`.
        field: Its pydantic field.
        section: The class of the keys beneath it, None for a key that holds a value.
    """

    name: str
    field: FieldInfo
    section: type[Section] | None

    @property
    def nullable(self) -> bool:
        """Whether `null` is one of its values."""
        return type(None) in get_args(self.field.annotation)

    @property
    def several(self) -> bool:
        """Whether its values may be of more than one type, not counting null."""
        return len(_list_non_null_members(self.field.annotation)) > 1

    @property
    def text(self) -> str:
        """Its documentation as one paragraph."""
        return " ".join((self.field.description or "").split())

    @property
    def allowed(self) -> str:
        """The values that it takes, in words."""
        return describe_type(self.field.annotation, tuple(self.field.metadata))

    @property
    def default(self) -> str:
        """Its default as written in a config; `derived` if it follows from other keys."""
        if self.field.is_required():
            return "required"
        return "derived" if self.field.default_factory else format_value(self.field.default)


@lru_cache
def get_config_keys() -> Mapping[str, ConfigKey]:
    """Return all keys by dotted name, in the order of the schema, each section before its keys."""
    return {key.name: key for key in _collect_keys(RunConfig, "")}


def _collect_keys(section: type[Section], prefix: str) -> list[ConfigKey]:
    keys = []
    for name, field in section.model_fields.items():
        inner = _find_section_class(field.annotation)
        keys.append(ConfigKey(prefix + name, field, inner))
        if inner:
            keys += _collect_keys(inner, f"{prefix}{name}.")
    return keys


def list_item_keys(key: ConfigKey) -> list[ConfigKey]:
    """Return the keys of the items of a list of sections, and of parts of extensions; none for
    other keys. Keys that only one kind of section has are named with the kind:
    `mixer[attention].window`."""
    keys: list[ConfigKey] = []
    for kind, part in _sections_by_kind(key.field.annotation, key.field.metadata).items():
        keys += _collect_keys(part, f"{key.name}[{kind}].")
    if keys:
        return keys
    for annotation in (key.field.annotation, *_list_union_members(key.field.annotation)):
        if get_origin(annotation) is tuple and (
            section := _find_section_class(get_args(annotation)[0])
        ):
            return _collect_kinds(section, f"{key.name}.")
    return []


def _collect_kinds(section: type[Section], prefix: str) -> list[ConfigKey]:
    keys = []
    for name, field in section.model_fields.items():
        kinds = _sections_by_kind(field.annotation, field.metadata)
        keys.append(ConfigKey(prefix + name, field, _find_section_class(field.annotation)))
        for kind, kind_section in kinds.items():
            keys += _collect_keys(kind_section, f"{prefix}{name}[{kind}].")
    return keys


def _sections_by_kind(annotation: Any, metadata: Iterable[Any] = ()) -> dict[str, type[Section]]:
    """Return the sections of a union in which `kind` says which one is meant; empty for others.

    Args:
        annotation: The type.
        metadata: What pydantic has taken off it.
    """
    if get_origin(annotation) is Annotated:
        metadata = (*metadata, *get_args(annotation)[1:])
        annotation = get_args(annotation)[0]
    kinds: dict[str, type[Section]] = {}
    for extensible in metadata:
        if isinstance(extensible, Extensible):
            kinds |= extensible.kinds
    for member in _list_union_members(annotation):
        tags = get_args(member)[1:] if get_origin(member) is Annotated else ()
        for tag in tags:
            if isinstance(tag, Tag):
                kinds[str(tag.tag)] = get_args(member)[0]
    return kinds


def _find_section_class(annotation: Any) -> type[Section] | None:
    """Return the section class in `annotation`, which may be nullable; None if there is none."""
    for kind in (annotation, *_list_union_members(annotation)):
        if isinstance(kind, type) and issubclass(kind, Section) and not is_part(kind):
            return kind
    return None


def _list_union_members(annotation: Any) -> tuple[Any, ...]:
    return get_args(annotation) if get_origin(annotation) in (Union, UnionType) else ()


def _list_non_null_members(annotation: Any) -> list[Any]:
    """Return the types of a union except null; none if it is not a union."""
    members = _list_union_members(annotation)
    return [kind for kind in members if kind is not type(None) and not is_part(kind)]


def describe_type(annotation: Any, bounds: tuple[Any, ...] = ()) -> str:
    """Describe the values of a type annotation in words, e.g. `a whole number >= 1`."""
    origin, args = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        inner = (item for field in args[1:] for item in getattr(field, "metadata", (field,)))
        return describe_type(args[0], (*bounds, *inner))
    if any(isinstance(bound, Extensible) for bound in bounds):
        own = [describe_type(kind) for kind in _list_non_null_members(annotation)]
        if kinds := _sections_by_kind(annotation, bounds):
            names = join_or(kinds)
            own += [names, f"or keys of a part, of kind {names}"]
        return ", ".join(own)
    if kinds := _sections_by_kind(annotation):
        return f"keys of a part, of kind {join_or(kinds)}"
    if _list_union_members(annotation):
        # Lists come last: what follows a list would read as one of its items.
        ordered = sorted(args, key=lambda kind: get_origin(kind) is tuple)
        return " or ".join("null" if a is type(None) else describe_type(a, bounds) for a in ordered)
    if origin is Literal:
        return args[0] if len(args) == 1 else "one of " + ", ".join(args)
    if origin is tuple:
        if args[-1] is Ellipsis:
            return f"a list, each {describe_type(args[0])}"
        return f"a list of {len(args)}, each {describe_type(args[0])}"
    if _find_section_class(annotation):
        fields = (
            f"{key.name}: {key.allowed} (default {key.default})"
            if not key.field.is_required()
            else f"{key.name}: {key.allowed}"
            for key in _collect_keys(annotation, "")
        )
        return "{" + ", ".join(fields) + "}"
    return _describe_scalar(annotation, bounds)


def describe_type_at(key: ConfigKey, path: Sequence[int | str]) -> str:
    """Describe in words the values allowed at `path` inside a key's value, e.g. `(0, "weight")`."""
    return describe_type(*_resolve(key, path)[:2])


def drop_kinds(key: ConfigKey, path: Sequence[int | str]) -> tuple[int | str, ...]:
    """Return a path inside a key's value without the kinds of sections that pydantic names in it,
    as it is written in a config."""
    return _resolve(key, path)[2]


def _resolve(
    key: ConfigKey, path: Sequence[int | str]
) -> tuple[Any, tuple[Any, ...], tuple[int | str, ...]]:
    """Return the type at `path`, its bounds, and the path without kinds of sections. It ends at a
    key that does not exist."""
    annotation, bounds = key.field.annotation, tuple(key.field.metadata)
    written: list[int | str] = []
    for part in path:
        kinds = _sections_by_kind(annotation, bounds)
        if str(part) in kinds:
            annotation, bounds = kinds[str(part)], ()
            continue
        written.append(part)
        alternatives = _list_non_null_members(annotation)
        annotation = (
            alternatives[0] if len(alternatives) == 1 else annotation
        )  # null has nothing inside
        section, items = _find_section_class(annotation), get_args(annotation)
        if section is not None:
            field = section.model_fields.get(str(part))
            if field is None:
                break
            annotation, bounds = field.annotation, tuple(field.metadata)
        else:
            annotation, bounds = items[0 if items[-1] is Ellipsis else int(part)], ()
    return annotation, bounds, tuple(written)


def _describe_scalar(kind: type, bounds: tuple[Any, ...]) -> str:
    if kind is bool:
        return "true or false"
    if kind is str:
        return "text"
    limits = {
        name: getattr(bound, name)
        for bound in bounds
        for name in ("gt", "ge", "lt", "le")
        if getattr(bound, name, None) not in (None, MOST)  # a limit that nobody needs to know
    }
    if kind is int:
        if "gt" in limits:
            limits["ge"] = limits.pop("gt") + 1
        noun = "a whole number"
    else:
        noun = "a number"
    if {"ge", "le"} <= limits.keys():
        return f"{noun} from {_format_bound(limits['ge'])} to {_format_bound(limits['le'])}"
    signs = {"gt": ">", "ge": ">=", "lt": "<", "le": "<="}
    parts = [
        f"{sign} {_format_bound(limits[name])}" for name, sign in signs.items() if name in limits
    ]
    return " ".join([noun, " and ".join(parts)]).strip()


def _format_bound(limit: float) -> str:
    return str(limit) if isinstance(limit, int) else f"{limit:g}"


def format_value(value: Any) -> str:
    """Return a value as it is written in a config."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, Section):
        if isinstance(value, Part) and value.model_fields_set <= {"kind"}:
            return value.name
        given = {key: getattr(value, key) for key in value.model_fields_set | {"kind"}}
        return format_value(given)
    if isinstance(value, tuple | list):
        return "[" + ", ".join(format_value(item) for item in value) + "]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {format_value(item)}" for key, item in value.items()) + "}"
    return str(value)


def find_nearest_keys(name: str) -> str:
    """Return the known key most similar to `name`, compared as a whole and by its last part;
    several keys if they are equally similar."""
    name = name[:MAX_NAME]

    def compute_likeness(key: str) -> float:
        whole_ratio = SequenceMatcher(None, name, key).ratio()
        last_ratio = SequenceMatcher(None, name.rpartition(".")[2], key.rpartition(".")[2]).ratio()
        return max(whole_ratio, 0.95 * last_ratio) + 0.01 * whole_ratio

    # A section that `name` already starts with is no help.
    likely = {
        key: compute_likeness(key) for key in _list_all_names() if not name.startswith(f"{key}.")
    }
    return join_or(key for key, ratio in likely.items() if ratio == max(likely.values()))


def suggest_keys(name: str) -> str:
    """Return how a message about the unknown key `name` ends: what other programs call so, or else
    the nearest keys."""
    return translate_setting(name[:MAX_NAME]) or f"did you mean {find_nearest_keys(name)}?"


def describe_unknown_options(arguments: Sequence[str], options: Iterable[str]) -> str:
    """Return the message about options of a command line that do not exist.

    Args:
        arguments: These options as they were typed, perhaps with a value; the value is not
            repeated.
        options: Those that exist.
    """
    existing = [*options]
    lines: list[str] = []
    for option in (text.partition("=")[0] for text in arguments):
        name = option.lstrip("-").replace("-", "_")
        close = get_close_matches(option.replace("_", "-"), existing, 1, 0.8)
        if name in get_config_keys():
            lines.append(f"{option}: write {name}=VALUE")
        else:
            lines.append(
                f"{option}: {f'did you mean {close[0]}?' if close else suggest_keys(name)}"
            )
    plural = "s" if len(lines) > 1 else ""
    return "\n  ".join(
        [f"unknown option{plural}; keys are given without dashes: section.key=value", *lines]
    )


def _list_all_names() -> list[str]:
    """Return all dotted names, including those of items in a list of sections."""
    return [*get_config_keys(), *(_drop_kind(item.name) for item in _list_all_item_keys())]


def _list_all_item_keys() -> list[ConfigKey]:
    return [item for key in get_config_keys().values() for item in list_item_keys(key)]


def _drop_kind(name: str) -> str:
    """Return the name of a key without the kind of part that has it."""
    return re.sub(r"\[.*?\]", "", name)


def explain(name: str) -> str:
    """Return what `--explain` prints for a key, or for each key of a section.

    If there is no such key, raises `UserError` with a suggestion.
    """
    key = get_config_keys().get(name)
    if key is None:
        items = [
            item
            for item in _list_all_item_keys()
            if f"{_drop_kind(item.name)}.".startswith(f"{name}.")
        ]
        if not items:
            raise UserError(f"{name} is not a config key; {suggest_keys(name)}")
        return "\n\n".join(map(_explain_key, items))
    if key.section:
        inner = [
            k for k in get_config_keys().values() if k.name.startswith(f"{name}.") and not k.section
        ]
        parts = [key.text] if key.text else []
        return "\n\n".join(["\n".join([name, *parts]), *(_explain_key(k) for k in inner)])
    return "\n\n".join(map(_explain_key, [key, *list_item_keys(key)]))


def _explain_key(key: ConfigKey) -> str:
    default = "Required." if key.field.is_required() else f"Default: {key.default}."
    lines = [key.text, f"Takes {key.allowed}.", default]
    wrapped = (textwrap.fill(line, WIDTH - 2, break_on_hyphens=False) for line in lines)
    return "\n".join([key.name, textwrap.indent("\n".join(wrapped), "  ")])


def describe_common_keys() -> str:
    """Return what `--help` prints about keys: those of `COMMON`, one line each."""
    chosen = [get_config_keys()[name] for name in COMMON]
    return "\n".join(
        head + textwrap.shorten(_take_first_sentence(key), WIDTH - len(head), placeholder=" ...")
        for head, key in zip(_align_heads(chosen), chosen, strict=True)
    )


def describe_all_keys() -> str:
    """Return what `--help all` prints about keys: all of them by section, each with its default,
    the first sentence of its documentation and the values that it takes."""
    blocks: dict[str, list[ConfigKey]] = {}
    for key in get_config_keys().values():
        blocks.setdefault(key.name.partition(".")[0], []).append(key)
    return "\n\n".join(_describe_section(*block) for block in blocks.values())


def _describe_section(section: ConfigKey, *inner: ConfigKey) -> str:
    """Return one section's part of the listing."""
    leaves = [key for key in inner if not key.section]
    lines = [f"{section.name}: {section.text}"]
    for head, key in zip(_align_heads(leaves), leaves, strict=True):
        text = f"{head}{_take_first_sentence(key)} Takes {key.allowed}."
        lines.append(textwrap.fill(text, WIDTH, subsequent_indent=" " * len(head)))
    return "\n".join(lines)


def _align_heads(leaves: Sequence[ConfigKey]) -> Iterator[str]:
    """Yield name and default of each key, in aligned columns."""
    name_width = max(len(key.name) for key in leaves) + 2
    default_width = max(len(key.default) for key in leaves) + 2
    for key in leaves:
        yield f"  {key.name:{name_width}}{key.default:{default_width}}"


def _take_first_sentence(key: ConfigKey) -> str:
    """Return the first sentence of a key's documentation."""
    return re.split(r"(?<=\.)\s", key.text, maxsplit=1)[0]
