"""How far a run is in its data: a few integers, and their form in a checkpoint.

Counts are kept by the source's path, also for sources that a later blend leaves out, so that a
source never repeats a sample within an epoch however the blend changes from one resume to the next.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megaframe.data.blend import Blend
from megaframe.errors import UserError

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Roster:
    """The sources of a run: path, weight and number of samples in an epoch, one entry each."""

    paths: tuple[str, ...]
    weights: tuple[float, ...]
    sizes: tuple[int, ...]

    def by_path(self, values: Sequence[Any]) -> dict[str, Any]:
        return dict(zip(self.paths, values, strict=True))


@dataclass(frozen=True)
class Progress:
    """Samples seen in all, where the blend stands, and counts of sources that it has left."""

    roster: Roster
    blend: Blend
    samples: int
    left: Mapping[str, int]

    @staticmethod
    def start(roster: Roster) -> Progress:
        return Progress(roster, Blend.start(roster.weights), 0, {})

    def take(self, size: int) -> tuple[NDArray[np.int64], NDArray[np.int64], Progress]:
        """Source and number of each of the next `size` samples, and the progress after them."""
        sources, numbers, blend = self.blend.take(size)
        return sources, numbers, replace(self, blend=blend, samples=self.samples + size)

    def state(self) -> dict[str, Any]:
        """This progress as JSON holds it: `samples`, and by path what `restore` needs."""
        by_path = self.roster.by_path
        return {
            "samples": self.samples,
            "consumed": {**self.left, **by_path(self.blend.consumed)},
            "base": by_path(self.blend.base),
            "weights": by_path(self.roster.weights),
            "sizes": by_path(self.roster.sizes),
        }


def restore(state: Mapping[str, Any], roster: Roster) -> Progress:
    """The progress that `state` holds, for the sources of `roster`.

    With the same sources and weights the sequence continues as if never stopped. Otherwise the
    weights begin to count now, each known source continues after the samples that it has given, a
    new one starts at its first, and one log line says so. Raises `UserError` for a malformed state.
    """
    _check(state)
    consumed = {path: count for path, count in state["consumed"].items()}
    counts = tuple(consumed.get(path, 0) for path in roster.paths)
    left = {path: count for path, count in consumed.items() if path not in set(roster.paths)}
    blend = Blend.start(roster.weights, counts)
    if state["weights"] == roster.by_path(roster.weights):
        blend = replace(blend, base=tuple(state["base"][path] for path in roster.paths))
    else:
        _log_change(state["weights"], roster, state["samples"])
    _log_sizes(state["sizes"], roster)
    return Progress(roster, blend, state["samples"], left)


def _check(state: Mapping[str, Any]) -> None:
    """Refuse what `Progress.state` cannot have written."""
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
            "are whole numbers >= 0, with base <= consumed; resume from another checkpoint"
        )


def _is_count(value: object) -> bool:
    return type(value) is int and value >= 0


def _log_change(before: Mapping[str, float], roster: Roster, samples: int) -> None:
    now = roster.by_path(roster.weights)
    parts = {
        "added": [path for path in now if path not in before],
        "removed": [path for path in before if path not in now],
        "other weight": [path for path in now if path in before and now[path] != before[path]],
    }
    logger.warning(
        "data.sources changed after sample %d: %s; each source continues after what it has given",
        samples,
        "; ".join(f"{what} {', '.join(paths)}" for what, paths in parts.items() if paths),
    )


def _log_sizes(before: Mapping[str, int], roster: Roster) -> None:
    now = roster.by_path(roster.sizes)
    other = [path for path in now if path in before and now[path] != before[path]]
    if other:
        logger.warning(
            "%d sources are cut into another number of samples than before (%s: %d, before %d), by "
            "their files, train.seq or data.split; their order is a new one and may repeat samples",
            len(other),
            other[0],
            now[other[0]],
            before[other[0]],
        )
