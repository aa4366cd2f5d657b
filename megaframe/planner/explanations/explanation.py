"""One explanation: a title, sentences, and a table."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

Cell = str | float | int | None


@dataclass(frozen=True)
class Explanation:
    """What the theory says of one aspect of a plan.

    Attributes:
        lines: Sentences, with their formulas.
        head: Names of the columns, with their units.
        rows: Of the table; None where a cell does not apply.
    """

    title: str
    lines: tuple[str, ...]
    head: tuple[str, ...] = ()
    rows: tuple[tuple[Cell, ...], ...] = ()

    def to_record(self) -> dict[str, object]:
        """Return it for JSON, with a dict for each row."""
        table = [dict(zip(self.head, row, strict=True)) for row in self.rows]
        return {"title": self.title, "lines": list(self.lines), "table": table}

    def format_rows(self) -> Iterator[tuple[str, ...]]:
        """Yield the rows as texts."""
        for row in self.rows:
            yield tuple(_format_cell(cell) for cell in row)

    def format_table(self) -> Iterator[str]:
        """Yield the lines of the table, its head first; none if it has no rows."""
        lines = [self.head, *self.format_rows()] if self.rows else []
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        for line in lines:
            cells = (cell.ljust(width) for cell, width in zip(line, widths, strict=True))
            yield "  ".join(cells).rstrip()


def _format_cell(cell: Cell) -> str:
    if cell is None:
        return "-"
    if isinstance(cell, float):
        return f"{cell:.4g}"
    return f"{cell:,}" if isinstance(cell, int) else cell


def format_bytes(size: float) -> str:
    """Return a size with its unit: `1.5 MiB`."""
    units: Sequence[str] = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
    power = next((n for n in range(len(units)) if size < 1024.0 ** (n + 1)), len(units) - 1)
    return f"{size / 1024.0**power:.3g} {units[power]}"
