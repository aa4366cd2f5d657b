"""Conditions on the fields of a row: which rows of a corpus are read.

A condition is a text such as `lang=en`, `score>=0.5` or `meta.source!=web`. Its field is a key of a
JSON object, or a key within one after a dot, or a column. Numbers compare as numbers; everything
else is equal or not. A row without the field cannot be judged, so it is one that cannot be used.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from megaframe.data.preprocessing.corpus_files import InputError

_ORDERS: Mapping[str, Callable[[float, float], bool]] = {
    ">=": operator.ge,
    "<=": operator.le,
    ">": operator.gt,
    "<": operator.lt,
}
_CONDITION = re.compile(r"([^=<>!]+?)\s*(>=|<=|!=|=|>|<)\s*([^=<>!].*|)", re.DOTALL)


class UnjudgedRow(ValueError):
    """A row that a condition cannot judge; its text says why."""


@dataclass(frozen=True)
class RowFilter:
    """A condition on a field.

    Attributes:
        field: Name of the field.
        comparison: `=`, `!=`, `>=`, `<=`, `>` or `<`.
        value: What it is compared with.
    """

    field: str
    comparison: str
    value: str

    def accepts(self, row: Mapping[str, object]) -> bool:
        """Return whether the condition holds for a row, by names of fields.

        Raises:
            UnjudgedRow: The row has no such field, or no number where one is needed.
        """
        found = self._find(row)
        if self.comparison in _ORDERS:
            number = _read_number(found)
            if number is None:
                raise UnjudgedRow(f"field {self.field!r} holds no number, as {self} needs")
            return _ORDERS[self.comparison](number, float(self.value))
        return _is_equal(found, self.value) == (self.comparison == "=")

    def __str__(self) -> str:
        return f"{self.field}{self.comparison}{self.value}"

    def _find(self, row: Mapping[str, object]) -> object:
        if self.field in row:
            return row[self.field]
        found: object = row
        for name in self.field.split("."):
            if not isinstance(found, Mapping) or name not in found:
                raise UnjudgedRow(f"no field {self.field!r}, which {self} needs")
            found = found[name]
        return found


def parse_filters(conditions: Sequence[str]) -> tuple[RowFilter, ...]:
    """Return the conditions that texts state. Raises `InputError` for a text that states none."""
    filters = []
    for text in conditions:
        match = _CONDITION.fullmatch(text.strip())
        if not match:
            raise InputError(
                f"{text!r} is no condition; write a field, one of = != >= <= > < and a value, such "
                "as lang=en or score>=0.5"
            )
        found = RowFilter(match[1].strip(), match[2], match[3])
        if found.comparison in _ORDERS and _read_number(found.value) is None:
            raise InputError(
                f"{text!r} compares with {found.value!r}, which is no number; other values can be "
                "equal (=) or not (!=)"
            )
        filters.append(found)
    return tuple(filters)


def _is_equal(found: object, value: str) -> bool:
    if found is None or isinstance(found, bool):
        return value == {None: "null", True: "true", False: "false"}[found]
    if isinstance(found, int | float):
        return _read_number(value) == found
    return str(found) == value


def _read_number(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        return float(value)
    except (ValueError, OverflowError):
        return None
