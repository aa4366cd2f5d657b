"""How the settings of a program become keys: what each has become, and what is to be said of it.

A program's own module converts what needs arithmetic or more than one setting; everything else
goes by the table of names (`megaframe/config/settings_elsewhere.py`). Whatever is left has no key,
and is said with its reason.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from typing import Any

from pydantic import ValidationError

from megaframe.config.keys import describe_type_at, format_value, get_config_keys
from megaframe.config.megatron_settings import ALWAYS
from megaframe.config.schema import RunConfig
from megaframe.config.settings_elsewhere import SETTINGS_ELSEWHERE, SETTINGS_WITHOUT_KEY
from megaframe.layout import count_fewest_ranks
from megaframe.migration.shell_script import MARK
from megaframe.validate.run import find_mistakes

REFUSED = "Refused here, and left out"
DECIDE = "To decide"
DIFFERS = "Not quite the same here"
WITHOUT = "Without a key here"
ALWAYS_SO = "So here too, without a key"
NO_EFFECT = "Without effect"
UNKNOWN = "Not known as settings"
HEADINGS = (REFUSED, DECIDE, DIFFERS, WITHOUT, ALWAYS_SO, NO_EFFECT, UNKNOWN)
"""Kinds of notes, in the order in which they are shown."""
_MOST_VALUES = 10_000
_TEXT = re.compile(r"([a-z_]+(?:\.[a-z_0-9]+)+)(?:=([a-z_0-9]+))?(?:, the default)?")


@dataclass(frozen=True)
class Setting:
    """A setting of another program.

    Attributes:
        name: With underscores, and with its sections before dots.
        values: As texts; none for a switch.
        written: How its file has it.
        is_default: Whether it is the program's default, because its file has none.
    """

    name: str
    values: tuple[str, ...]
    written: str
    is_default: bool = False


@dataclass
class Conversion:
    """The settings of one file, the keys that they become, and notes.

    Attributes:
        program: As `SETTINGS_ELSEWHERE` has it.
        settings: By name, defaults of the program included.
        world: Number of ranks that the file's launcher starts; None if it is not known.
        keys: Values by key, each with the settings that it comes from, as they are written.
        notes: Texts by kind.
        used: The settings that have been read.
        said: Those that are the source of a key, or dropped.
    """

    program: str
    settings: Mapping[str, Setting]
    world: int | None = None
    keys: dict[str, tuple[Any, str]] = field(default_factory=dict)
    notes: dict[str, list[str]] = field(default_factory=lambda: {kind: [] for kind in HEADINGS})
    used: set[str] = field(default_factory=set)
    said: set[str] = field(default_factory=set)

    def has(self, name: str) -> bool:
        """Return whether the file has a setting."""
        return name in self.settings and not self.settings[name].is_default

    def read_values(self, name: str) -> tuple[str, ...] | None:
        """Return the values of a setting as texts, which is then used; None if there is none, or
        if they are unknown, which is noted."""
        setting = self.settings.get(name)
        if setting is None:
            return None
        self.used.add(name)
        if any(MARK in value for value in setting.values):
            self.note(DECIDE, f"{setting.written}: its value is not in the file{self._say(name)}")
            return None
        return setting.values

    def _say(self, name: str) -> str:
        """Return which key an unknown value is for."""
        text = SETTINGS_ELSEWHERE[self.program].get(name)
        return f"; {text}" if text else ""

    def read_text(self, name: str) -> str | None:
        """Return the value of a setting, as `read_values` does."""
        values = self.read_values(name)
        return " ".join(values).strip("'\"") if values else None

    def read_number(self, name: str) -> int | float | None:
        """Return the value of a setting if it is a finite number; another one is noted."""
        text = self.read_text(name)
        if text is None:
            return None
        number = parse_scalar(text)
        if isinstance(number, int | float) and not isinstance(number, bool):
            return number
        self.note(REFUSED, f"{self.settings[name].written}: not a number")
        return None

    def read_integer(self, name: str) -> int | None:
        """Return the value of a setting if it is a whole number above 0; another one is noted."""
        number = self.read_number(name)
        if number is None or (number == int(number) and number > 0):
            return None if number is None else int(number)
        self.note(REFUSED, f"{self.settings[name].written}: not a whole number above 0")
        return None

    def read_switch(self, name: str) -> bool:
        """Return whether a setting is on, which is then used."""
        values = self.read_values(name)
        if not values:
            return values is not None
        if len(values) > 1 or not isinstance(parse_scalar(values[0]), bool):
            self.note(REFUSED, f"{self.settings[name].written}: neither true nor false")
        return parse_scalar(values[0]) is True

    def drop(self, *names: str) -> None:
        """Give settings no effect, because others have turned them off, or nothing needs them."""
        for name in names:
            if self.has(name) and name not in self.said:
                self.note(NO_EFFECT, self.settings[name].written)
            self.used.add(name)
            self.said.add(name)

    def note(self, kind: str, text: str) -> None:
        """Add a note, once."""
        if text not in self.notes[kind]:
            self.notes[kind].append(text)

    def put(self, key: str, value: Any, *names: str, why: str = "") -> None:
        """Give a key a value.

        Args:
            key: The key.
            value: Its value. None puts nothing.
            names: The settings that it comes from. If all are defaults, what is our default too is
                left out.
            why: What to say besides.
        """
        if value is None:
            return
        sources = [self.settings[name] for name in names if name in self.settings]
        self.used |= {*names}
        self.said |= {*names}
        default = get_config_keys()[key].field.default
        if all(setting.is_default for setting in sources) and value == default and not why:
            return
        texts = [s.written + ", its default" * s.is_default for s in sources]
        self.keys[key] = (value, ", ".join([*texts, *([why] if why else [])]))

    def put_model(self, model: Mapping[str, Any], *names: str, why: str = "") -> None:
        """Give keys of `model` their values.

        Args:
            model: Values by name, and of sections within `model`.
            names: As of `put`.
            why: As of `put`.
        """
        for name, value in model.items():
            inside = value if isinstance(value, Mapping) else {"": value}
            for inner, inner_value in inside.items():
                self.put(f"model.{name}.{inner}".rstrip("."), inner_value, *names, why=why)

    def get_value(self, key: str) -> Any:
        """Return the value that a key has so far, None without one."""
        return self.keys.get(key, (None,))[0]

    def convert_rest(self) -> None:
        """Convert by the table of names what is not used yet, or was read only for the sake of
        other settings, and note what has no key. Nothing is left unsaid."""
        notes = "\n".join(text for texts in self.notes.values() for text in texts)
        for name, setting in self.settings.items():
            if name not in self.used or not (name in self.said or setting.written in notes):
                self._convert_by_name(setting)

    def _convert_by_name(self, setting: Setting) -> None:
        parts = setting.name.split(".")
        names = [".".join(parts[start:]) for start in range(len(parts))]
        keys, reasons = SETTINGS_ELSEWHERE[self.program], SETTINGS_WITHOUT_KEY.get(self.program, {})
        text = next((keys[name] for name in names if name in keys), "")
        match = _TEXT.fullmatch(text)
        is_off = len(setting.values) == 1 and parse_scalar(setting.values[0]) is False
        if match and match[2] and not is_off:
            value = parse_scalar(match[2])
            if value == get_config_keys()[match[1]].field.default and not setting.is_default:
                self.note(ALWAYS_SO, setting.written)
            elif self.read_switch(setting.name):
                self.put(match[1], value, setting.name)
        elif (match and match[1] in self.keys) or (is_off and not _is_truth(match and match[1])):
            self.drop(setting.name)
        elif match:
            values = self.read_values(setting.name)
            if values is not None:
                scalars = [parse_scalar(value) for value in values[:_MOST_VALUES]] or [True]
                self.put(match[1], scalars[0] if len(scalars) == 1 else scalars, setting.name)
        elif setting.is_default:
            return
        elif text == ALWAYS:
            self.note(ALWAYS_SO, setting.written)
        elif text:
            self.note(DECIDE, f"{setting.written}: here {text}")
        elif reason := next((reasons[name] for name in names if name in reasons), ""):
            self.note(WITHOUT, f"{setting.written}: {reason}")
        else:
            near = get_close_matches(names[-1], [*keys, *reasons], 1, 0.85)
            self.note(UNKNOWN, setting.written + (f"; did you mean {near[0]}?" if near else ""))

    def validate(self) -> RunConfig:
        """Return the config that the keys make; keys with values that it refuses are taken out and
        noted with their settings, and so is what no section can check alone."""
        while True:
            try:
                config = RunConfig.model_validate(nest({k: v for k, (v, _) in self.keys.items()}))
                break
            except ValidationError as errors:
                wrong = [key for e in errors.errors() for key in self._find_keys(e["loc"])]
                for key in dict.fromkeys(wrong):
                    self._refuse(key)
        world = self.world or count_fewest_ranks(config.parallel)
        for mistake in find_mistakes(config, world, data=False):
            named = re.findall(r"[a-z]+\.[a-z_.0-9]*[a-z0-9]", mistake)
            origins = dict.fromkeys(self.keys[key][1] for key in named if key in self.keys)
            self.note(DECIDE, f"{mistake} (from {', '.join(origins)})" if origins else mistake)
        return config

    def _find_keys(self, location: Sequence[int | str]) -> list[str]:
        """Return the key that is meant by the location of an error, or those beneath it: of a
        section in which one is missing, all."""
        where = ".".join(map(str, location))
        keys = [key for key in self.keys if f"{where}.".startswith(f"{key}.")]
        section = where
        while not keys and section:
            keys = [key for key in self.keys if key.startswith(f"{section}.")]
            section = section.rpartition(".")[0]
        return keys

    def _refuse(self, key: str) -> None:
        value, origin = self.keys.pop(key)
        takes = describe_type_at(get_config_keys()[key], ())
        self.note(REFUSED, f"{origin or key}: {key}={format_value(value)[:60]}: takes {takes}")


def _is_truth(key: str | None) -> bool:
    """Return whether a key takes true and false."""
    return key is not None and get_config_keys()[key].allowed.startswith("true or false")


def parse_scalar(text: str) -> bool | int | float | str:
    """Return what a text means: a truth value, a number, or the text."""
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    plain = text.replace("_", "") if re.fullmatch(r"-?\d[\d_]*", text) else text
    if re.fullmatch(r"[-+]?\d{1,19}", plain):
        return int(plain)
    if re.fullmatch(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d{1,4})?", plain[:64]):
        number = float(plain[:64])
        return number if math.isfinite(number) else text
    return text


def nest(keys: Mapping[str, Any]) -> dict[str, Any]:
    """Return dotted keys as sections within each other, in the order of the schema."""
    order = {key: number for number, key in enumerate(get_config_keys())}
    nested: dict[str, Any] = {}
    for key in sorted(keys, key=lambda key: order[key]):
        *sections, last = key.split(".")
        inner = nested
        for section in sections:
            inner = inner.setdefault(section, {})
        inner[last] = keys[key]
    return nested


def add_defaults(
    settings: Iterable[Setting], defaults: Mapping[str, Setting]
) -> dict[str, Setting]:
    """Return settings by name, with the program's defaults for those that are not given. Of several
    with one name the last one counts."""
    given = {setting.name: setting for setting in settings}
    return {**{name: value for name, value in defaults.items() if name not in given}, **given}


def list_settings(table: Mapping[str, Any], prefix: str = "") -> Iterator[Setting]:
    """Yield the settings in a table of values and of tables. Null is no setting."""
    for name, value in table.items():
        full = f"{prefix}{name}".replace("-", "_")
        if isinstance(value, Mapping):
            yield from list_settings(value, f"{full}.")
        elif value is not None:
            items = value if isinstance(value, list | tuple) else [value]
            values = tuple(map(_to_text, items))
            yield Setting(full, values, f"{full} = {' '.join(values)}")


def _to_text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def make_defaults(values: Mapping[str, Any]) -> dict[str, Setting]:
    """Return a program's defaults as settings by name."""
    return {s.name: replace(s, is_default=True) for s in list_settings(values)}
