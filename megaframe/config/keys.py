"""The keys of the schema: their types, ranges and defaults in words, and the nearest key to a name.

Error messages, `--explain` and `--help` all use this one walk over the pydantic models, so that
what a key takes is written down once, in the schema.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from functools import lru_cache
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import Tag
from pydantic.fields import FieldInfo

from megaframe.config.migration import translate_setting
from megaframe.config.parts import Part
from megaframe.config.registry import Extensible, is_part
from megaframe.config.schema import RunConfig, Section
from megaframe.config.section import MOST
from megaframe.errors import join_or

MAX_NAME = 100
"""Number of characters of an unknown key that are compared with the known ones."""


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
    for kind, part in _map_kinds_to_sections(key.field.annotation, key.field.metadata).items():
        keys += _collect_keys(part, f"{key.name}[{kind}].")
    if keys:
        return keys
    for annotation in (key.field.annotation, *_list_union_members(key.field.annotation)):
        if get_origin(annotation) is tuple and (
            section := _find_section_class(get_args(annotation)[0])
        ):
            return _collect_kinds(section, f"{key.name}.")
        if get_origin(annotation) is tuple:
            for kind, part in _map_kinds_to_sections(get_args(annotation)[0]).items():
                keys += _collect_keys(part, f"{key.name}[{kind}].")
    return keys


def _collect_kinds(section: type[Section], prefix: str) -> list[ConfigKey]:
    keys = []
    for name, field in section.model_fields.items():
        kinds = _map_kinds_to_sections(field.annotation, field.metadata)
        keys.append(ConfigKey(prefix + name, field, _find_section_class(field.annotation)))
        for kind, kind_section in kinds.items():
            keys += _collect_keys(kind_section, f"{prefix}{name}[{kind}].")
    return keys


def _map_kinds_to_sections(
    annotation: Any, metadata: Iterable[Any] = ()
) -> dict[str, type[Section]]:
    """Return the sections of a union in which `kind` says which one is meant; empty for others.

    Args:
        annotation: The type.
        metadata: What pydantic has taken off it.
    """
    if get_origin(annotation) is Annotated:
        metadata = (*metadata, *get_args(annotation)[1:])
        annotation = get_args(annotation)[0]
    kinds: dict[str, type[Section]] = {}
    for member in _list_union_members(annotation):
        tags = get_args(member)[1:] if get_origin(member) is Annotated else ()
        for tag in tags:
            if isinstance(tag, Tag):
                kinds[str(tag.tag)] = get_args(member)[0]
        if tags and not any(isinstance(tag, Tag) for tag in tags):
            kinds |= _map_kinds_to_sections(member)  # a union of our own sections, beside parts
    return kinds | _list_part_kinds(metadata)


def _list_part_kinds(metadata: Iterable[Any]) -> dict[str, type[Section]]:
    """Return the sections of the parts of extensions that a field takes."""
    kinds: dict[str, type[Section]] = {}
    for extensible in metadata:
        if isinstance(extensible, Extensible):
            kinds |= extensible.kinds
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
        null = " or null" * (type(None) in args)
        return _describe_extensible(annotation, _list_part_kinds(bounds)) + null
    if kinds := _map_kinds_to_sections(annotation):
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
    if section := _find_section_class(annotation):
        fields = (
            f"{key.name}: {key.allowed} (default {key.default})"
            if not key.field.is_required()
            else f"{key.name}: {key.allowed}"
            for key in _collect_keys(annotation, "")
            if "." not in key.name  # the section that has it describes it
        )
        alone = f", or only its {section.main_key}" if section.main_key else ""
        return "{" + ", ".join(fields) + "}" + alone
    return _describe_scalar(annotation, bounds)


def _describe_extensible(annotation: Any, part_kinds: Iterable[str]) -> str:
    """Describe the values of a field that also takes parts of these kinds."""
    own_kinds = _map_kinds_to_sections(annotation)
    if own_kinds:
        return f"keys of a part, of kind {join_or([*own_kinds, *part_kinds])}, or only its kind"
    own = [describe_type(kind) for kind in _list_non_null_members(annotation)]
    if parts := [*part_kinds]:
        own += [join_or(parts), f"or keys of a part, of kind {join_or(parts)}"]
    return ", ".join(own) or "a part of an extension"


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
        kinds = _map_kinds_to_sections(annotation, bounds)
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


_MOST_ITEMS = 256
"""Items of a list that are shown; more are a mistake, or for no reader."""


def format_value(value: Any) -> str:
    """Return a value as it is written in a config; of a very long list, its beginning."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, Section):
        if isinstance(value, Part) and value.model_fields_set <= {"kind"}:
            return value.name
        keys_set = value.model_fields_set | {"kind"}
        # In the order of the schema; a set of names has none.
        shown = {key: getattr(value, key) for key in type(value).model_fields if key in keys_set}
        return format_value(shown)
    if isinstance(value, tuple | list):
        if len(value) > _MOST_ITEMS:
            return format_value(value[:8])[:-1] + f", ... {len(value):,} values in all]"
        return "[" + ", ".join(format_value(item) for item in value) + "]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {format_value(item)}" for key, item in value.items()) + "}"
    return str(value)


_TYPO = 0.75
"""Likeness of two names from which one may be a typo of the other. Names of other things that share
some letters reach 0.7."""
_MORE_WORDS = 0.9
"""Likeness of two names of which one is the other with another word."""


def _may_be_like(name: str, other: str, least: float) -> bool:
    """Return whether the likeness of two names may be `least` or more, by their letters alone. Most
    names have others, and to compare the order takes long."""
    shared = sum(min(name.count(letter), other.count(letter)) for letter in {*name})
    length = len(name) + len(other)
    return length == 0 or 2 * shared / length >= least


def find_nearest_keys(name: str) -> str:
    """Return the known key of which `name` may be a typo, compared as a whole and by its last part;
    several keys if they are equally similar, and nothing if none is similar enough."""
    name = name[:MAX_NAME]
    section, _, last = name.rpartition(".")

    def compute_likeness(key: str) -> tuple[float, float]:
        key_section, _, key_last = key.rpartition(".")
        # More words than ours: `warmup_steps`, in the same section, or `mixed_precision`.
        has_more_words = key_section and (
            last.endswith(f"_{key_last}")
            or (last.startswith(f"{key_last}_") and section == key_section)
        )
        # What two names with sections share may be only the section.
        least = _MORE_WORDS if section else _TYPO
        if not (
            has_more_words or _may_be_like(last, key_last, _TYPO) or _may_be_like(name, key, least)
        ):
            return 0.0, 0.0
        whole_ratio = SequenceMatcher(None, name, key).ratio()
        last_ratio = SequenceMatcher(None, last, key_last).ratio()
        if has_more_words:
            last_ratio = max(last_ratio, _MORE_WORDS)
        shares_more = whole_ratio >= least
        own_ratio = max(last_ratio, whole_ratio) if shares_more else last_ratio
        return own_ratio, max(whole_ratio, 0.95 * last_ratio) + 0.01 * whole_ratio

    # A section that `name` already starts with is no help.
    ratios = {
        key: compute_likeness(key) for key in _list_all_names() if not name.startswith(f"{key}.")
    }
    likely = {key: ratio for key, (own_ratio, ratio) in ratios.items() if own_ratio >= _TYPO}
    best = max(likely.values(), default=0.0)
    return join_or(key for key, ratio in likely.items() if ratio == best) if likely else ""


def suggest_keys(name: str) -> str:
    """Return how a message about the unknown key `name` ends: what other programs call so, or else
    the keys of which it may be a typo."""
    nearest = find_nearest_keys(name)
    guess = f"did you mean {nearest}?" if nearest else "pretrain_gpt.py --help all lists all keys"
    return translate_setting(name[:MAX_NAME]) or guess


def _list_all_names() -> list[str]:
    """Return all dotted names, including those of items in a list of sections."""
    return [*get_config_keys(), *(drop_kind(item.name) for item in list_all_item_keys())]


def list_all_item_keys() -> list[ConfigKey]:
    """Return the keys of the items of all lists of sections."""
    return [item for key in get_config_keys().values() for item in list_item_keys(key)]


def drop_kind(name: str) -> str:
    """Return the name of a key without the kind of part that has it."""
    return re.sub(r"\[.*?\]", "", name)
