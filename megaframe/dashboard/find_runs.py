"""Which folders are runs, and what they are called beside each other."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from megaframe.io.run_files import CONFIG_FILE, METRICS_FILE
from megaframe.io.untrusted import sanitize_text


def find_runs(folder: Path) -> list[Path]:
    """Return the folder if it is a run's, or else the folders in it that are, in the order of their
    names. Links inside it are not followed, because somebody else may have placed them."""
    if is_run_folder(folder):
        return [folder]
    try:
        inside = [entry for entry in os.scandir(folder) if entry.is_dir(follow_symlinks=False)]
    except OSError:
        return []
    names = sorted((entry.name for entry in inside), key=_make_sort_key)
    return [folder / name for name in names if is_run_folder(folder / name)]


def is_run_folder(folder: Path) -> bool:
    """Return whether a run has written into this folder."""
    return any(os.path.exists(folder / name) for name in (METRICS_FILE, CONFIG_FILE))


def _make_sort_key(name: str) -> list[tuple[float, str]]:
    """Return a key that sorts numbers in names by their value: `lr=3e-4` before `lr=1e-3`."""
    parts = re.split(r"([0-9]{1,15}(?:\.[0-9]{1,15})?(?:e-?[0-9]{1,2})?)", name)
    return [(float(part), "") if number % 2 else (0.0, part) for number, part in enumerate(parts)]


def name_runs(folders: Sequence[Path]) -> list[str]:
    """Return for each folder the shortest end of its path that no other folder has, fit to be
    shown; what can only be told apart by what cannot be shown is numbered. Of names that list
    values, such as `beta2=0.95,lr=3e-4`, the values that all runs have are left out."""
    parts = [folder.resolve().parts for folder in folders]
    depths = [1] * len(parts)
    for _ in range(max(map(len, parts), default=0)):
        ends = [path[-depth:] for path, depth in zip(parts, depths, strict=True)]
        counts = Counter(end for _, end in set(zip(parts, ends, strict=True)))
        repeated = {end for end, count in counts.items() if count > 1}
        depths = [depth + (end in repeated) for depth, end in zip(depths, ends, strict=True)]
    names = [sanitize_text("/".join(end)) for end in ends] if parts else []
    return [*_number_repeated(_keep_differences(names))]


def _keep_differences(names: Sequence[str]) -> Sequence[str]:
    values = [name.split(",") for name in names]
    if not all("=" in value for listed in values for value in listed):
        return names
    same = set.intersection(*map(set, values)) if values else set()
    shorter = [",".join(v for v in listed if v not in same) for listed in values]
    return shorter if all(shorter) and len(set(shorter)) == len(set(names)) else names


def _number_repeated(names: Iterable[str]) -> Iterator[str]:
    counts: dict[str, int] = {}
    for name in names:
        counts[name] = counts.get(name, 0) + 1
        yield name if counts[name] == 1 else f"{name} ({counts[name]})"
