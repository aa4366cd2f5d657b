"""A sink of metrics from outside: a table of comma-separated values in the run folder.

python pretrain_gpt.py --config configs/demo.yaml "run.extensions=[examples/sink.py]" \
    "metrics.sinks=[{kind: csv, columns: [step, loss, tokens_per_second]}]"
"""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Literal

from megaframe.config import RunConfig
from megaframe.extensions import Registry, Sink, SinkPart
from megaframe.extensions.sink import Line


class CsvConfig(SinkPart):
    kind: Literal["csv"] = "csv"
    """metrics.csv in the run folder."""
    columns: tuple[str, ...] = ("step", "loss", "lr", "tokens_per_second")
    """Names in a line of metrics.jsonl. A line that lacks one has an empty cell."""

    def make_sink(self, config: RunConfig, folder: Path, start_step: int) -> CsvSink:
        """Return the sink of a run."""
        return CsvSink(folder / "metrics.csv", self.columns, start_step)


class CsvSink(Sink):
    """Appends a row for each step.

    Args:
        path: The file.
        columns: Names of the columns; one of them is `step`.
        start_step: The last step of which rows are kept.
    """

    def __init__(self, path: Path, columns: tuple[str, ...], start_step: int) -> None:
        self.path, self.columns = path, columns
        self.rewind(start_step)

    def write(self, line: Line) -> None:
        """Append a step, and hand it to the operating system at once."""
        with self.path.open("a", newline="", encoding="utf-8") as file:
            csv.writer(file).writerow(line.get(name) for name in self.columns)

    def rewind(self, step: int) -> None:
        """Drop the rows of later steps."""
        rows: list[list[str]] = []
        if self.path.exists():
            with self.path.open(newline="", encoding="utf-8") as file:
                rows = [*csv.reader(file)][1:]
        place = self.columns.index("step")
        with self.path.open("w", newline="", encoding="utf-8") as file:
            kept = [row for row in rows if int(row[place]) <= step]
            csv.writer(file).writerows([self.columns, *kept])


def register(registry: Registry) -> None:
    """Called when the extension is loaded."""
    registry.register(CsvConfig)
