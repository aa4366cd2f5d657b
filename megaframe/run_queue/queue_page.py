"""All runs of a queue as one table, in the terminal and on a page with links to their reports."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

import numpy as np

from megaframe.dashboard.find_runs import is_run_folder
from megaframe.dashboard.page import write_atomically
from megaframe.dashboard.report import (
    REPORT_FILES,
    PageLink,
    render_html,
    render_report,
    render_table,
)
from megaframe.dashboard.run_folder import RunFolder
from megaframe.dashboard.summary import SMOOTHED
from megaframe.run_queue.queue_file import RunOfQueue
from megaframe.run_queue.queue_state import ENDED, RunRecord

PAGE = "queue.html"
HEADS = ("run", "state", "priority", "ranks", "step", "done", "ETA", "loss", "MFU", "note")
_REFRESH_SECONDS = 10


@dataclass(frozen=True)
class RunProgress:
    """How far a run is, by its metrics.

    Attributes:
        step: The last one; 0 before the first.
        loss: Of that step.
        mfu: Mean of the last steps, as a share; None if it is not known.
        seconds: Of a step, the mean of the last ones.
    """

    step: int = 0
    loss: float | None = None
    mfu: float | None = None
    seconds: float | None = None


def measure_progress(run: RunFolder) -> RunProgress:
    """Return how far a run is."""

    def average(name: str) -> float | None:
        values = run.metrics.get_column(name)[-SMOOTHED:]
        values = values[np.isfinite(values)]
        return float(values.mean()) if values.size else None

    if not len(run.metrics):
        return RunProgress()
    loss = float(run.metrics.get_column("loss")[-1])
    step = int(run.metrics.get_column("step")[-1])
    return RunProgress(step, loss, average("mfu"), average("seconds"))


class QueuePage:
    """Writes the page, and the report of each run that has new metrics.

    Args:
        folder: Of the queue.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._runs: dict[Path, RunFolder] = {}
        self._progress: dict[Path, RunProgress] = {}

    def write(self, runs: Sequence[tuple[RunOfQueue, RunRecord]]) -> None:
        """Write the page anew."""
        rows = [self._make_row(run, record) for run, record in runs]
        counts = [record.state for _, record in runs]
        said = ", ".join(f"{counts.count(state)} {state}" for state in dict.fromkeys(counts))
        lines = [f"# {self._folder.name}", "", f"{len(runs)} runs: {said}"]
        lines += render_table(HEADS, rows)
        is_over = all(record.state in ENDED for _, record in runs)
        refresh = None if is_over else _REFRESH_SECONDS
        text = render_html("\n".join(lines), refresh=refresh)
        write_atomically(self._folder / PAGE, text, inside=self._folder)

    def list_rows(self, runs: Sequence[tuple[RunOfQueue, RunRecord]]) -> list[list[str]]:
        """Return the table as text, with its heads."""
        rows = [[str(cell) for cell in self._make_row(run, record)] for run, record in runs]
        return [list(HEADS), *rows]

    def estimate_seconds_left(self, run: RunOfQueue) -> float:
        """Return how long a run still takes as it is, by what the page says; 0 if nobody knows."""
        progress = self._progress.get(run.folder, RunProgress())
        return (run.steps - progress.step) * (progress.seconds or 0.0)

    def _make_row(self, run: RunOfQueue, record: RunRecord) -> list[str | PageLink]:
        progress = self._read_progress(run.folder)
        report = run.folder / REPORT_FILES[1]
        is_on_ranks = record.state in ("running", "leaving")
        name = (
            PageLink(run.name, f"{quote(run.name)}/{report.name}") if report.exists() else run.name
        )
        seconds_left = self.estimate_seconds_left(run)
        return [
            name,
            record.state,
            str(run.priority),
            str(record.ranks) if is_on_ranks else "",
            f"{progress.step:,} of {run.steps:,}",
            f"{min(1.0, progress.step / run.steps):.0%}",
            format_seconds(seconds_left) if record.state == "running" and seconds_left else "",
            "" if progress.loss is None else f"{progress.loss:.4f}",
            "" if progress.mfu is None else f"{progress.mfu:.1%}",
            "; ".join(_list_notes(record)),
        ]

    def _read_progress(self, folder: Path) -> RunProgress:
        """Return how far the run in a folder is, and write its report if it has come further."""
        if folder not in self._runs:
            if not is_run_folder(folder):
                return RunProgress()
            run = self._runs[folder] = RunFolder(folder)
        elif not (run := self._runs[folder]).read():
            return self._progress[folder]
        text = render_report(run)
        for name, content in zip(REPORT_FILES, (text, render_html(text)), strict=True):
            write_atomically(folder / name, content, inside=folder)
        self._progress[folder] = measure_progress(run)
        return self._progress[folder]


def _list_notes(record: RunRecord) -> list[str]:
    """Return what else is to know about a run."""
    notes = [f"{record.starts} starts"] if record.starts > 1 else []
    notes += [f"{record.failures} failures"] if record.failures > 1 else []
    return [*notes, *([record.error] if record.error else [])]


def format_seconds(seconds: float) -> str:
    """Return a duration such as 3:04:05."""
    minutes, rest = divmod(round(max(0.0, seconds)), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}"


def align_columns(rows: Sequence[Sequence[str]]) -> str:
    """Return rows of text as lines whose columns are aligned, to the right except the last."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    widths[-1] = 0
    return "\n".join(
        "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )
