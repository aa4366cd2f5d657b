"""The metrics file of a run as columns. The file may still be being written, or be cut off, or
contain lines that are not metrics.

Nothing in it is trusted. A line that is not the line of a step is left out and counted, and
everything unusual becomes a note that is shown next to the data. A column holds the numbers that
the file has of it and no others, so that memory follows the file, whatever is in its lines.
"""

from __future__ import annotations

import os
from array import array
from bisect import bisect_left
from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import orjson
from numpy.typing import NDArray

from megaframe.io.untrusted import open_file, sanitize_text

_LONGEST_LINE = 1 << 24
_LONGEST_NAME = 200
_MOST_COLUMNS = 5_000
_MOST_LINES = 32
"""Metrics with the same prefix that `select_names` returns."""
_MOST_REWINDS = 1_000
"""Steps that do not come after the step before, after which a file is taken for something else."""
_MOST_BAD = 10_000
"""Lines that are not metrics, after which a file is taken for something else."""
_ROWS = ("ranks", "stages", "experts", "sources")
"""Keys whose lists are kept whole, as rows of numbers."""


class MetricColumn:
    """The numbers of one metric, with the lines that have them."""

    __slots__ = ("lines", "values")

    def __init__(self) -> None:
        self.lines, self.values = array("I"), array("d")

    def put(self, line: int, value: float) -> None:
        """Set the value of a line, which no later line has one before."""
        if self.lines and self.lines[-1] == line:
            # `a/b` and `b` inside of `a` are one name, which a line may have twice.
            self.values[-1] = value
        else:
            self.lines.append(line)
            self.values.append(value)

    def cut(self, line: int) -> None:
        """Forget this line and those after it."""
        if self.lines and self.lines[-1] >= line:
            keep = bisect_left(self.lines, line)
            del self.lines[keep:], self.values[keep:]


class RowHistory:
    """The rows of one name, one after the other, with their steps."""

    __slots__ = ("_ends", "_numbers", "steps")

    def __init__(self) -> None:
        self.steps, self._ends, self._numbers = array("q"), array("q", [0]), array("f")

    def append(self, step: int, row: list[float]) -> None:
        """Add the row of a step."""
        self.steps.append(step)
        self._numbers.extend(row)
        self._ends.append(len(self._numbers))

    def cut(self, step: int) -> None:
        """Forget the rows of this step and of those after it."""
        keep = bisect_left(self.steps, step)
        del self.steps[keep:], self._ends[keep + 1 :], self._numbers[self._ends[keep] :]

    @property
    def last(self) -> NDArray[np.float64]:
        """The last row."""
        return np.array(self._numbers[self._ends[-2] :], dtype=np.float64)

    def make_table(self) -> tuple[list[int], NDArray[np.float32]]:
        """Return the rows that are as long as the last one, and their steps; rows of another layout
        have another length."""
        ends = np.array(self._ends)
        lengths = np.diff(ends)
        good = np.flatnonzero(lengths == lengths[-1])
        places = ends[good][:, None] + np.arange(lengths[-1])
        return [self.steps[i] for i in good], np.array(self._numbers, dtype=np.float32)[places]


Kept = TypeVar("Kept", MetricColumn, RowHistory)


class MetricsFile:
    """Columns of one metrics file; `read` adds the lines written since the last call."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.version = 0
        """Increases whenever something is read."""
        self._identity: tuple[int, int] | None = None
        self._forget()

    def _forget(self) -> None:
        self.rows: dict[str, RowHistory] = {}
        self._steps = array("d")
        self._columns: dict[str, MetricColumn] = {}
        self._offset = 0
        self._bad: list[int] = []
        self._lines = 0
        self._rewinds: list[str] = []
        self._rewind_count = 0
        self._torn = self._many = self._given_up = False

    def __len__(self) -> int:
        return len(self._steps)

    def read(self) -> bool:
        """Read the complete lines added since the last call; return whether there were any. A file
        that was replaced, for example by a resumed run, is read from its start."""
        try:
            with open_file(self.path, inside=self.path.parent) as file:
                status = os.fstat(file.fileno())
                identity = status.st_dev, status.st_ino
                if identity != self._identity or status.st_size < self._offset:
                    self._forget()
                    self._identity, self.version = identity, self.version + 1
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
            self._given_up = (
                not is_complete
                or len(self._bad) >= _MOST_BAD
                or self._rewind_count >= _MOST_REWINDS
            )
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
        yield from self._rewinds
        if self._many:
            yield f"only the first {_MOST_COLUMNS:,} names of metrics are read"
        yield from self._describe_uneven()

    def _describe_uneven(self) -> Iterator[str]:
        """Yield a note for each group of rows that do not have the same number of places."""
        for group, base in (("ranks", "ranks/memory_bytes"), ("stages", "stages/work")):
            inside = {n: len(r.last) for n, r in self.rows.items() if n.startswith(f"{group}/")}
            if len(set(inside.values())) > 1:
                yield (
                    f"rows of {group} have {min(inside.values())} to {max(inside.values())} "
                    "places: shorter ones are left out"
                )
            if inside and base not in inside:
                yield f"there are rows of {group}, but none of {base}"

    def get_column(self, name: str) -> NDArray[np.float64]:
        """Return the values of a metric by line, NaN in lines without it."""
        if name == "step":
            return np.array(self._steps)
        values = np.full(len(self), np.nan)
        column = self._columns.get(name)
        if column is not None:
            values[np.array(column.lines)] = column.values
        return values

    def list_names(self) -> list[str]:
        """Return the names of all columns, in the order in which they were first seen."""
        return ["step", *self._columns]

    def select_names(self, key: str) -> tuple[list[str], int]:
        """Return the first names of columns that a key stands for, and how many there are. A key
        that ends with a slash stands for all names with this prefix."""
        if not key.endswith("/"):
            names = [key] if key in self._columns else []
        else:
            names = [name for name in self._columns if name.startswith(key)]
        return names[:_MOST_LINES], len(names)

    def _add(self, line: bytes) -> None:
        try:
            record = orjson.loads(line)
        except orjson.JSONDecodeError:
            record = None
        step = record.get("step") if isinstance(record, dict) else None
        if not isinstance(step, int) or isinstance(step, bool) or not 0 <= step < 2**53:
            self._bad.append(self._lines)
            return
        if self._steps and step <= self._steps[-1]:
            self._rewind_count += 1
            if len(self._rewinds) < 3:
                self._rewinds.append(
                    f"after step {self._steps[-1]:.0f} comes step {step} (line {self._lines}): "
                    "what it repeats is left out; two runs in one file, or one that was resumed"
                )
            self._cut(step)
        for name, value in _flatten_numbers(record):
            if column := self._find(self._columns, name, MetricColumn):
                column.put(len(self._steps), value)
        for key in _ROWS:
            for name, row in _find_rows(record.get(key), key):
                if history := self._find(self.rows, name, RowHistory):
                    history.append(step, row)
        self._steps.append(step)

    def _find(self, named: dict[str, Kept], name: str, make: type[Kept]) -> Kept | None:
        """Return what is kept under a name, made if there is room for another one."""
        kept = named.get(name)
        if kept is None:
            if len(named) >= _MOST_COLUMNS:
                self._many = True
                return None
            kept = named[name] = make()
        return kept

    def _cut(self, step: int) -> None:
        """Forget this step and those after it."""
        keep = bisect_left(self._steps, step)
        del self._steps[keep:]
        for column in self._columns.values():
            column.cut(keep)
        for history in self.rows.values():
            history.cut(step)
        self.rows = {name: history for name, history in self.rows.items() if history.steps}


@lru_cache(maxsize=8192)
def _show_name(name: str) -> str:
    """Return a name as it can be shown. Every line has the same ones, and to look for secrets in
    them took most of the time of reading a file."""
    return sanitize_text(name)


def _flatten_numbers(line: Mapping[str, Any], prefix: str = "", depth: int = 0) -> Iterator[Any]:
    """Yield names and numbers of a line except `ranks`; nested names are joined by slashes."""
    for name, value in line.items():
        if isinstance(value, bool) or value is None:
            continue
        name = _show_name(name[:_LONGEST_NAME])
        if isinstance(value, (int, float)):
            if prefix + name != "step":
                yield prefix + name, float(value)
        elif isinstance(value, dict) and depth < 4 and (prefix or name != "ranks"):
            yield from _flatten_numbers(value, f"{prefix}{name}/", depth + 1)


def _find_rows(value: Any, name: str, depth: int = 0) -> Iterator[tuple[str, list[float]]]:
    if isinstance(value, list) and value:
        if all(isinstance(number, (int, float)) for number in value):
            yield name, value
    elif isinstance(value, dict) and depth < 4:
        for key, inner in value.items():
            yield from _find_rows(inner, f"{name}/{_show_name(key[:_LONGEST_NAME])}", depth + 1)
