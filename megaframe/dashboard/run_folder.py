"""The folder of one run: its metrics, config, environment and events."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np

from megaframe.config.migration import upgrade_name
from megaframe.dashboard.find_runs import find_runs, is_run_folder
from megaframe.dashboard.metrics_file import MetricsFile
from megaframe.dashboard.run_texts import measure_texts
from megaframe.errors import UserError
from megaframe.io.run_files import CONFIG_FILE, ENVIRONMENT_FILE, METRICS_FILE
from megaframe.io.untrusted import parse_json, parse_yaml, read_file, sanitize_text

_LARGEST = 1 << 20
_LONGEST_VALUE = 500
_MOST_EVENTS = 10_000


@dataclass(frozen=True)
class RunEvent:
    """Something that happened at the end of a step.

    Attributes:
        kind: Restart, skip or checkpoint.
    """

    step: int
    kind: str
    text: str


class RunFolder:
    """A run folder, as it was when last read.

    Raises:
        UserError: If it is not a run folder.
    """

    def __init__(self, folder: Path) -> None:
        if not os.path.isdir(folder):
            raise UserError(f"{folder} is not a run folder")
        if not is_run_folder(folder):
            names = [path.name for path in find_runs(folder)]
            inside = f"; runs in it: {', '.join(names[:3])}" + (" ..." if names[3:] else "")
            raise UserError(
                f"{folder} has neither {METRICS_FILE} nor {CONFIG_FILE}: it is not a run folder"
                f"{inside if names else ''}"
            )
        self.folder, self.name = folder, sanitize_text(folder.resolve().name)
        self.metrics = MetricsFile(folder / METRICS_FILE)
        self.config: dict[str, Any] = {}
        self.environment: dict[str, Any] = {}
        self._notes: list[str] = []
        self.read()

    def read(self) -> bool:
        """Read the folder again; return whether it has new metrics."""
        new = self.metrics.read()
        if new or not self.config:
            self._notes = []
            config = self._read_description(CONFIG_FILE)
            self.config = {upgrade_name(name): value for name, value in config.items()}
            self.environment = self._read_description(ENVIRONMENT_FILE)
        return new

    @property
    def version(self) -> str:
        """Changes when the folder has something new to show."""
        return f"{self.metrics.version}.{measure_texts(self.folder)}"

    @property
    def notes(self) -> list[str]:
        """What a reader should know about the run."""
        notes = [*self.metrics.list_notes(), *self._notes]
        if len(self.metrics) and not np.isfinite(self.metrics.get_column("mfu")).any():
            notes.append("MFU n/a: the peak of this device is not known; set metrics.peak_tflops")
        if missing := self._describe_missing_ranks():
            notes.append(missing)
        return notes

    @property
    def world(self) -> int | None:
        """Number of ranks, if it is known."""
        ranks = self.environment.get("ranks")
        return ranks if isinstance(ranks, int) and 0 < ranks < 1 << 24 else None

    def list_events(self) -> Iterator[RunEvent]:
        """Yield events in the order of their steps; of each kind the first `_MOST_EVENTS`."""
        metrics, events = self.metrics, []
        steps, after = metrics.get_column("step"), metrics.get_column("resumed_after")
        for place in np.flatnonzero(np.isfinite(after))[:_MOST_EVENTS]:
            text = f"resumed after step {after[place]:.0f}"
            events.append(RunEvent(int(steps[place]), "restart", text))
        for step in steps[metrics.get_column("skipped") > 0][:_MOST_EVENTS]:
            events.append(RunEvent(int(step), "skip", f"step {step:.0f}: update skipped"))
        # A checkpoint is saved after its step has ended, so its time is in the next step's line.
        for step in steps[metrics.get_column("time/checkpoint") > 0][:_MOST_EVENTS]:
            events.append(
                RunEvent(int(step) - 1, "checkpoint", f"checkpoint of step {step - 1:.0f}")
            )
        yield from sorted(events, key=lambda event: event.step)

    def _describe_missing_ranks(self) -> str | None:
        history = self.metrics.rows.get("ranks/work")
        if history is None or self.world is None or len(history.last) == self.world:
            return None
        return f"rows have {len(history.last)} ranks and the run {self.world}: some are missing"

    def _read_description(self, name: str) -> dict[str, Any]:
        """Return a YAML or JSON mapping, in which all text can be shown; empty if the file is
        missing or cannot be read. Values of YAML are text."""
        parsed = parse_json if name.endswith(".json") else parse_yaml
        try:
            description = make_showable(
                parsed(read_file(self.folder / name, _LARGEST, inside=self.folder))
            )
        except FileNotFoundError:
            self._notes.append(f"there is no {name}")
            return {}
        except (OSError, ValueError):
            description = None
        if not isinstance(description, dict):
            self._notes.append(f"{name} cannot be read and is ignored")
            return {}
        return description


def make_showable(value: Any) -> Any:
    """Return a description whose keys and texts can be shown, without secrets."""
    if isinstance(value, dict):
        return {make_showable(str(key)): make_showable(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [make_showable(inner) for inner in value]
    return sanitize_text(value) if isinstance(value, str) else value


def flatten_config(
    config: Mapping[str, Any], prefix: str = "", depth: int = 0
) -> Iterator[tuple[str, str]]:
    """Yield the keys and values of a nested mapping as text.

    Args:
        config: The mapping.
        prefix: What all keys begin with.
        depth: How many mappings contain this one.
    """
    for key, value in config.items():
        if isinstance(value, Mapping) and value and depth < 6:
            yield from flatten_config(value, f"{prefix}{key}.", depth + 1)
        else:
            yield f"{prefix}{key}", "" if value is None else _shorten(str(value))


def get_config_value(config: Mapping[str, Any], key: str) -> Any:
    """Return the value of key `section.name` in a config of unknown shape; None if it has none."""
    section, _, name = key.partition(".")
    inner = config.get(section)
    return inner.get(name) if isinstance(inner, Mapping) else None


def _shorten(text: str) -> str:
    """Return a text that is not long; two that differ stay different."""
    if len(text) <= _LONGEST_VALUE:
        return text
    digest = blake2b(text.encode(errors="replace"), digest_size=4).hexdigest()
    return f"{text[:_LONGEST_VALUE]} ... ({len(text):,} characters, digest {digest})"
