"""The metrics file of a run as columns. The file may still be being written, or be cut off, or
contain lines that are not metrics.

Nothing in it is trusted. A line that is not the line of a step is left out and counted, and
everything unusual becomes a note that is shown next to the data.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

from megaframe.io.untrusted import open_file, sanitize_text

_LONGEST_LINE = 1 << 24
_MOST_COLUMNS = 5_000
_MOST_BAD = 10_000
"""Lines that are not metrics, after which a file is taken for something else."""
_ROWS = ("ranks", "stages", "experts", "sources")
"""Keys whose lists are kept whole, as rows of numbers."""

Rows = dict[str, tuple[list[int], list["array[float]"]]]
"""By name: the steps that have such a row, and their rows."""


class MetricsFile:
    """Columns of one metrics file; `read` adds the lines written since the last call."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.version = 0
        """Increases whenever something is read."""
        self._identity: tuple[int, int] | None = None
        self._forget()

    def _forget(self) -> None:
        self.rows: Rows = {}
        self._columns: dict[str, array[float]] = {"step": array("d")}
        self._offset = 0
        self._bad: list[int] = []
        self._lines = 0
        self._rewinds: list[str] = []
        self._torn = self._many = self._given_up = False

    def __len__(self) -> int:
        return len(self._columns["step"])

    def read(self) -> bool:
        """Read the complete lines added since the last call; return whether there were any. A file
        that was replaced, for example by a resumed run, is read from its start."""
        try:
            status = self.path.stat()
            identity = status.st_dev, status.st_ino
            if identity != self._identity or status.st_size < self._offset:
                self._forget()
                self._identity, self.version = identity, self.version + 1
            with open_file(self.path) as file:
                file.seek(self._offset)
                return self._take(file)
        except OSError:
            return False

    def _take(self, file: Any) -> bool:
        before = self._offset
        self._torn = False
        while not self._given_up and (line := file.readline(_LONGEST_LINE)):
            is_complete = line.endswith(b"\n")
            if not is_complete and len(line) < _LONGEST_LINE:
                self._torn = True
                break
            self._offset += len(line)
            self._lines += 1
            self._add(line)
            self._given_up = not is_complete or len(self._bad) >= _MOST_BAD
        self.version += self._offset != before
        return self._offset != before

    def list_notes(self) -> Iterator[str]:
        """Yield what a reader of the page should know about the file."""
        if not self._lines and not self._torn:
            yield "no metrics yet" if self.path.exists() else f"there is no {self.path.name}"
        if self._bad:
            where = ", ".join(map(str, self._bad[:3])) + (" ..." if len(self._bad) > 3 else "")
            yield f"{len(self._bad)} lines are not metrics and are ignored (line {where})"
        if self._given_up:
            yield f"nothing after line {self._lines} is read: this is no file of metrics"
        if self._torn:
            yield "the last line is incomplete: it is being written, or was cut off"
        yield from self._rewinds[:3]
        if self._many:
            yield f"only the first {_MOST_COLUMNS} names of metrics are read"
        yield from self._describe_uneven()

    def _describe_uneven(self) -> Iterator[str]:
        """Yield a note for each group of rows that do not have the same number of places."""
        for group, base in (("ranks", "ranks/memory_bytes"), ("stages", "stages/work")):
            inside = {n: len(r[1][-1]) for n, r in self.rows.items() if n.startswith(f"{group}/")}
            if len(set(inside.values())) > 1:
                yield (
                    f"rows of {group} have {min(inside.values())} to {max(inside.values())} "
                    "places: shorter ones are left out"
                )
            if inside and base not in inside:
                yield f"there are rows of {group}, but none of {base}"

    def get_column(self, name: str) -> NDArray[np.float64]:
        """Return the values of a metric by line, NaN in lines without it."""
        column = np.full(len(self), np.nan)
        values = self._columns.get(name)
        if values is not None:
            column[: len(values)] = values
        return column

    def list_names(self) -> list[str]:
        """Return the names of all columns, in the order in which they were first seen."""
        return list(self._columns)

    def _add(self, line: bytes) -> None:
        try:
            record = orjson.loads(line)
        except orjson.JSONDecodeError:
            record = None
        step = record.get("step") if isinstance(record, dict) else None
        if not isinstance(step, int) or isinstance(step, bool) or not 0 <= step < 2**53:
            self._bad.append(self._lines)
            return
        steps = self._columns["step"]
        if steps and step <= steps[-1]:
            self._rewinds.append(
                f"after step {steps[-1]:.0f} comes step {step} (line {self._lines}): what it "
                "repeats is left out; two runs in one file, or one that was resumed"
            )
            self._cut(step)
        count = len(steps)
        for name, value in _flatten_numbers(record):
            self._put(name, count, value)
        for key in _ROWS:
            if key in record:
                for name, row in _find_rows(record[key], key):
                    history = self.rows.setdefault(name, ([], []))
                    history[0].append(step)
                    history[1].append(array("f", row))

    def _put(self, name: str, count: int, value: float) -> None:
        column = self._columns.get(name)
        if column is None:
            if len(self._columns) >= _MOST_COLUMNS:
                self._many = True
                return
            column = self._columns[name] = array("d")
        if len(column) < count:
            column.extend([math.nan] * (count - len(column)))
        # `a/b` and `b` inside of `a` are one name, which a line may have twice.
        column[count:] = array("d", [value])

    def _cut(self, step: int) -> None:
        keep = int(np.searchsorted(np.asarray(self._columns["step"]), step))
        for column in self._columns.values():
            del column[keep:]
        for steps, rows in self.rows.values():
            while steps and steps[-1] >= step:
                steps.pop()
                rows.pop()
        self.rows = {name: history for name, history in self.rows.items() if history[0]}


def _flatten_numbers(line: Mapping[str, Any], prefix: str = "", depth: int = 0) -> Iterator[Any]:
    """Yield names and numbers of a line except `ranks`; nested names are joined by slashes."""
    for name, value in line.items():
        if isinstance(value, bool) or value is None:
            continue
        name = sanitize_text(name)
        if isinstance(value, (int, float)):
            yield prefix + name, float(value)
        elif isinstance(value, dict) and depth < 4 and (prefix or name != "ranks"):
            yield from _flatten_numbers(value, f"{prefix}{name}/", depth + 1)


def _find_rows(value: Any, name: str, depth: int = 0) -> Iterator[tuple[str, list[float]]]:
    if isinstance(value, list) and value:
        if all(isinstance(number, (int, float)) for number in value):
            yield name, value
    elif isinstance(value, dict) and depth < 4:
        for key, inner in value.items():
            yield from _find_rows(inner, f"{name}/{sanitize_text(key)}", depth + 1)
