"""The runs of a page: folders of runs, and those in folders that hold several, such as a sweep."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from megaframe.dashboard.find_runs import find_runs, name_runs
from megaframe.dashboard.run_folder import RunFolder
from megaframe.io.run_files import METRICS_FILE

MOST_RUNS = 100
"""Runs that a page shows; of more, those are left out that were written to least recently."""


class RunSet:
    """Runs in the order of their folders, as they were when last read.

    Args:
        folders: Folders of runs, or of several runs each.

    Raises:
        UserError: One of them is neither.
    """

    def __init__(self, folders: Sequence[Path]) -> None:
        self._folders = folders
        self._runs: dict[Path, RunFolder] = {}
        self.notes: list[str] = []
        """What a reader should know about the choice of runs."""
        for folder in folders:
            if not find_runs(folder):
                RunFolder(folder)  # says why not
        self._find()

    @property
    def runs(self) -> list[RunFolder]:
        """The runs."""
        return list(self._runs.values())

    @property
    def version(self) -> str:
        """Changes whenever something was read."""
        return "-".join(f"{len(self._runs)}:{run.version}" for run in self._runs.values())

    def read(self) -> None:
        """Read all runs again, and find those that were added to the folders."""
        for run in self._runs.values():
            run.read()
        self._find()

    def list_notes(self) -> Iterator[str]:
        """Yield what a reader should know about the choice of runs, and about each of them."""
        yield from self.notes
        names = name_runs([run.folder for run in self.runs])
        for name, run in zip(names, self.runs, strict=True):
            yield from (f"{name}: {note}" for note in run.notes)

    def _find(self) -> None:
        paths = {path.resolve(): path for folder in self._folders for path in find_runs(folder)}
        self.notes = []
        if len(paths) > MOST_RUNS:
            self.notes = [f"{MOST_RUNS} of {len(paths):,} runs are shown, those written to last"]
            newest = set(sorted(paths, key=_find_last_write)[-MOST_RUNS:])
            paths = {path: shown for path, shown in paths.items() if path in newest}
        self._runs = {path: self._runs.get(path) or RunFolder(paths[path]) for path in paths}


def _find_last_write(folder: Path) -> float:
    try:
        return (folder / METRICS_FILE).stat().st_mtime
    except OSError:
        return 0.0
