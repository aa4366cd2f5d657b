"""What `gpu_check.py` knows, and the files that it is in: one small file per step, or one in all.

Files are written after every number, so nothing is lost if a call ends early. Those of earlier
calls are read back if they are about the same device, driver, commit and libraries; a file about
anything else is kept under a name of its own.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gpu_goals import compare_chosen_with_best, evaluate_goals, order_of
from gpu_steps import Step
from time_limit import ROOT, write_json

RESULTS = ROOT / "benchmarks" / "results"
_LEAST_FREE = 64 << 20
"""Bytes of a disk below which nothing is begun: a trace takes up to 10 MB."""
_MOST_BYTES = 64 << 20
"""No result is larger."""
_SECTIONS: dict[str, Any] = {
    "smoke": {},
    "ceilings": None,
    "active": {},
    "measurements": [],
    "left_out_for_time": [],
    "tests": {},
    "training": [],
    "constants": None,
    "steps": {},
}
_KEYS = {"measurements": ("kernel", "case", "implementation"), "training": ("row",)}
"""What tells the entries of a list apart."""
DEVICE = ("chip", "device", "driver")
COMPARED = (*DEVICE, "commit", "versions", "dry")
"""What two files must agree in to be parts of one result."""


def read_commit() -> str:
    """Return the commit of this checkout, with a + if anything but results differs from it."""
    if from_environment := os.environ.get("MEGAFRAME_COMMIT"):
        return from_environment

    def run_git(*arguments: str) -> str:
        completed = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True)
        return completed.stdout.strip()

    try:
        description = run_git("describe", "--always", "--abbrev=12")
        changed = run_git("status", "--porcelain", "-uno", "--", ".", ":!benchmarks/results")
    except OSError:
        return "unknown"
    return f"{description}{'+' if changed else ''}" or "unknown"


def read_driver() -> str | None:
    """Return the version of the loaded NVIDIA driver, or None."""
    from megaframe.distributed.device import read_driver_version

    return read_driver_version(Path("/"))


def describe_here(dry: bool) -> dict[str, Any]:
    """Return what a result of this call is about."""
    import torch
    from megaframe_kernels.installed import read_versions
    from megaframe_kernels.selection import read_chip_name

    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    about = {"chip": read_chip_name(), "device": device, "driver": read_driver()}
    return {**about, "commit": read_commit(), "versions": read_versions(), "dry": dry}


@dataclass
class Results:
    """What is known so far; written whenever something is added.

    Attributes:
        about: What all of it is about (`COMPARED`).
        target: A file for everything, a folder for one file per step, or None for neither.
        sections: What is known, of all steps.
        step: The step that runs.
        trouble: Why the last write failed; what could not be written stays here.
    """

    about: Mapping[str, Any] = field(default_factory=dict)
    target: Path | None = None
    sections: dict[str, Any] = field(default_factory=lambda: merge({}, {}))
    step: Step | None = None
    trouble: str | None = None

    def add(self, **parts: Any) -> None:
        """Add parts: entries of lists replace those of the same name, entries of mappings too."""
        self.sections = merge(self.sections, parts)
        self.write()

    def leave_out(self, names: Sequence[str]) -> None:
        """Record what there is no time for."""
        self.add(left_out_for_time=list(names))

    def list_files(self) -> Iterator[tuple[Path, dict[str, Any]]]:
        """Yield the file that is written now, with its content."""
        if self.target is None:
            return
        path, part = self.target, self.sections
        if path.suffix != ".json":
            if self.step is None:
                return
            path, part = path / f"{self.step.name}.json", select_part(part, self.step)
        yield path, {**self.about, **part, **derive({**self.about, **part})}

    def write(self) -> None:
        """Write the file of this step. A disk that is full loses nothing that was there before."""
        try:
            for path, content in self.list_files():
                write_json(path, content)
            self.trouble = None
        except OSError as error:
            if self.trouble is None:
                print(f"cannot write {error.filename}: {error.strerror}; going on", flush=True)
            self.trouble = str(error)


def derive(sections: dict[str, Any]) -> dict[str, Any]:
    """Return what follows from measurements: the order of implementations, how far what a run uses
    is from the fastest, and the goals that something was measured of."""
    measured = sections["measurements"]
    kernels = dict.fromkeys(m["kernel"] for m in measured)
    order = {
        kernel: order_of(
            [m for m in measured if m["kernel"] == kernel], sections["active"].get(kernel, ())
        )
        for kernel in kernels
    }
    compared = compare_chosen_with_best(sections)
    goals = evaluate_goals({**sections, "chosen_over_best": compared})
    measured_goals = [goal for goal in goals if goal["measured"] is not None]
    return {"order": order, "chosen_over_best": compared, "goals": measured_goals}


def select_part(sections: Mapping[str, Any], step: Step) -> dict[str, Any]:
    """Return what one step is about."""
    return {
        "smoke": sections["smoke"] if step.smoke else {},
        "ceilings": sections["ceilings"] if step.kernels else None,
        "active": {k: order for k, order in sections["active"].items() if k in step.kernels},
        "measurements": [m for m in sections["measurements"] if m["kernel"] in step.kernels],
        "left_out_for_time": [
            name for name in sections["left_out_for_time"] if name.split(":")[0] in step.parts
        ],
        "tests": {name: each for name, each in sections["tests"].items() if name in step.tests},
        "training": [row for row in sections["training"] if row["row"] in step.rows],
        "constants": sections["constants"] if step.constants else None,
        "steps": {name: each for name, each in sections["steps"].items() if name == step.name},
    }


def merge(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    """Return both results together; what the second has replaces what the first has."""
    merged: dict[str, Any] = {}
    for name, empty in _SECTIONS.items():
        old, new = first.get(name, empty), second.get(name, empty)
        if isinstance(empty, dict):
            merged[name] = {**old, **new}
        elif isinstance(empty, list):
            keys = _KEYS.get(name)
            entries = {
                tuple(entry[key] for key in keys) if keys else entry: entry
                for entry in (*old, *new)
            }
            merged[name] = list(entries.values())
        else:
            merged[name] = old if new is None else new
    return merged


def read_result(path: Path) -> dict[str, Any] | None:
    """Return the content of a result, or None if the file is none."""
    try:
        if path.stat().st_size > _MOST_BYTES:
            return None
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    if not isinstance(content, dict) or any(key not in content for key in ("chip", "commit")):
        return None
    kinds = {name: type(empty) for name, empty in _SECTIONS.items() if empty is not None}
    whole = all(isinstance(content.get(name, kind()), kind) for name, kind in kinds.items())
    return content if whole else None


def list_results(places: Iterable[Path]) -> Iterator[tuple[Path, dict[str, Any]]]:
    """Yield the results in files and folders, with their content."""
    for place in places:
        for path in sorted(place.glob("*.json")) if place.is_dir() else [place]:
            if (content := read_result(path)) is not None:
                yield path, content


def find_differences(content: Mapping[str, Any], about: Mapping[str, Any]) -> list[str]:
    """Return in what a result differs from another one: `commit a, not b`."""
    return [
        f"{key} {content.get(key)}, not {about[key]}"
        for key in COMPARED
        if content.get(key) != about[key]
    ]


def read_earlier(about: Mapping[str, Any], places: Iterable[Path]) -> tuple[dict[str, Any], str]:
    """Return what earlier calls found about the same, and a line about what was found otherwise,
    which counts for nothing."""
    sections, others = merge({}, {}), []
    for path, content in list_results(places):
        if differences := find_differences(content, about):
            others.append(f"{path.name} ({'; '.join(differences)})")
        else:
            sections = merge(sections, content)
    line = f"not counted, because it is of something else: {', '.join(others)}" if others else ""
    return sections, line if len(line) < 500 else f"{line[:480]} ... ({len(others)} files)"


def keep_aside(path: Path, about: Mapping[str, Any]) -> str | None:
    """Give a file at `path` that is about something else a name of its own, so that nothing
    overwrites it. Return a line that says so."""
    if not path.is_file():
        return None
    content = read_result(path)
    if content is not None and not find_differences(content, about):
        return None
    mark = "unreadable" if content is None else content["commit"]
    stem = f"{path.stem}.{re.sub(r'[^0-9A-Za-z.+-]', '_', str(mark))[:60]}"
    numbers = (f".{number}" if number else "" for number in range(1_000_000))
    free = (path.with_name(f"{stem}{number}.json") for number in numbers)
    kept = next(candidate for candidate in free if not candidate.exists())
    path.rename(kept)
    why = "is no result" if content is None else "; ".join(find_differences(content, about))
    return f"{path.name} {why}: kept as {kept.name}"


def check_disk(folder: Path) -> str | None:
    """Return why results cannot be written to a folder, or None."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / ".probe.json", {})
        (folder / ".probe.json").unlink()
        free = shutil.disk_usage(folder).free
    except OSError as error:
        return f"{folder} cannot be written: {error.strerror}"
    if free < _LEAST_FREE:
        return f"{folder} has {free >> 20} MiB free; results need up to {_LEAST_FREE >> 20} MiB"
    return None
