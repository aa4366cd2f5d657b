"""How far a run has come in its data: a few integers, and their form in a checkpoint.

Counts are kept by the source's path, also for sources that a later blend drops, so that a source
never repeats a sample within an epoch however the blend changes between resumes. A source whose
files have moved is recognised by its file name, which also determines its order, and its number of
samples.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megaframe.data.blend import Blend
from megaframe.errors import UserError


@dataclass(frozen=True)
class Roster:
    """The sources of a run: paths, weights, and samples per epoch (sizes), one entry per source."""

    paths: tuple[str, ...]
    weights: tuple[float, ...]
    sizes: tuple[int, ...]

    def by_path(self, values: Sequence[Any]) -> dict[str, Any]:
        return dict(zip(self.paths, values, strict=True))


@dataclass(frozen=True)
class Progress:
    """A position in the data.

    blend: how many samples each source has given. samples: samples seen in total. left: by path,
    samples given by sources that are no longer in the blend.
    """

    roster: Roster
    blend: Blend
    samples: int
    left: Mapping[str, int]

    @staticmethod
    def start(roster: Roster) -> Progress:
        return Progress(roster, Blend.start(roster.weights), 0, {})

    def take(self, size: int) -> tuple[NDArray[np.int64], NDArray[np.int64], Progress]:
        """Return the source and the number of each of the next `size` samples, and the progress
        after them."""
        sources, numbers, blend = self.blend.take(size)
        return sources, numbers, replace(self, blend=blend, samples=self.samples + size)

    def state(self) -> dict[str, Any]:
        """Return the progress as JSON values: `samples`, and by path what `restore` needs."""
        by_path = self.roster.by_path
        return {
            "samples": self.samples,
            "consumed": {**self.left, **by_path(self.blend.consumed)},
            "base": by_path(self.blend.base),
            "weights": by_path(self.roster.weights),
            "sizes": by_path(self.roster.sizes),
        }


def restore(state: Mapping[str, Any], roster: Roster) -> tuple[Progress, list[str]]:
    """Restore the progress in `state` for the sources of `roster`. Returns it with lines for the
    run log.

    With the same sources and weights the sequence continues as if it had not been interrupted.
    Otherwise the weights count from now on, each known source continues after the samples that it
    has given, a new one starts at its first, and a line says so. Raises `UserError` for a malformed
    state.
    """
    _check(state)
    moved = _moved(state["sizes"], roster)
    consumed, base, weights, sizes = (
        {moved.get(path, path): value for path, value in state[key].items()}
        for key in ("consumed", "base", "weights", "sizes")
    )
    counts = tuple(consumed.get(path, 0) for path in roster.paths)
    left = {path: count for path, count in consumed.items() if path not in set(roster.paths)}
    blend = Blend.start(roster.weights, counts)
    notes = []
    if moved:
        pairs = ", ".join(f"{old} is now {new}" for old, new in moved.items())
        notes.append(f"files of data.sources have moved, and are continued: {pairs}")
    if weights == roster.by_path(roster.weights):
        blend = replace(blend, base=tuple(base[path] for path in roster.paths))
    else:
        notes.append(_change(weights, roster, state["samples"]))
    notes += _other_sizes(sizes, roster)
    return Progress(roster, blend, state["samples"], left), notes


def _moved(before: Mapping[str, int], roster: Roster) -> dict[str, str]:
    """Find sources that have moved. Returns the new path by the old one.

    A source has moved if a new path has the same file name and number of samples. If several old
    sources match, the one whose path shares the longest end is chosen.
    """
    gone = [path for path in before if path not in set(roster.paths)]
    found: dict[str, str] = {}
    for path, size in zip(roster.paths, roster.sizes, strict=True):
        same = [old for old in gone if Path(old).name == Path(path).name and before[old] == size]
        if path not in before and same:
            old = max(same, key=lambda old: _alike(old, path))
            gone.remove(old)
            found[old] = path
    return found


def _alike(one: str, other: str) -> int:
    """Return the number of trailing components that two paths share."""
    pairs = zip(reversed(Path(one).parts), reversed(Path(other).parts), strict=False)
    return sum(takewhile(bool, (here == there for here, there in pairs)))


def _check(state: Mapping[str, Any]) -> None:
    """Raise `UserError` for a state that `Progress.state` cannot have written."""
    wanted = ("samples", "consumed", "base", "weights", "sizes")
    missing = [key for key in wanted if key not in state]
    if missing:
        raise UserError(
            f"the data state of the checkpoint lacks {', '.join(missing)} (it has "
            f"{', '.join(map(str, state)) or 'nothing'}); resume from a checkpoint of this program"
        )
    tables = [state[key] for key in wanted[1:]]
    valid = (
        _is_count(state["samples"])
        and all(isinstance(table, Mapping) for table in tables)
        and all(_is_count(n) for key in ("consumed", "base", "sizes") for n in state[key].values())
        and set(state["weights"]) == set(state["base"]) == set(state["sizes"])
        and all(state["base"][path] <= state["consumed"].get(path, -1) for path in state["base"])
    )
    if not valid:
        raise UserError(
            "the data state of the checkpoint is damaged: samples and the counts of each source "
            "are whole numbers below 2^53, with base <= consumed; resume from another checkpoint"
        )


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value < 1 << 53


def _change(before: Mapping[str, float], roster: Roster, samples: int) -> str:
    now = roster.by_path(roster.weights)
    parts = {
        "added": [path for path in now if path not in before],
        "removed": [path for path in before if path not in now],
        "other weight": [path for path in now if path in before and now[path] != before[path]],
    }
    what = "; ".join(f"{what} {', '.join(paths)}" for what, paths in parts.items() if paths)
    return (
        f"data.sources changed after sample {samples}: {what}; each source continues where it "
        "stopped"
    )


def _other_sizes(before: Mapping[str, int], roster: Roster) -> Iterator[str]:
    now = roster.by_path(roster.sizes)
    other = [path for path in now if path in before and now[path] != before[path]]
    if other:
        yield (
            f"{len(other)} sources have a different number of samples than before ({other[0]}: "
            f"{now[other[0]]}, before {before[other[0]]}), because of their files, train.seq or "
            "data.split; their order is new and may repeat samples"
        )
