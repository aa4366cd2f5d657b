"""Sampler: which sample of which source comes next, and how far a run has come in its data.

`SamplerState` keeps these counts by the source's path, also for sources that a later blend drops,
so that a source never repeats a sample within an epoch however the blend changes between resumes.
A source whose files have moved is recognised by its file name, which also determines its order, its
number of samples and a digest of its tokens. The order has nothing to do with the place in the list
of sources. In earlier versions it had, for sources with the same file name: `numbers` keeps the
numbers that they got there, so that a run of such a version continues with the same samples.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from itertools import takewhile
from operator import itemgetter
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from megaframe.data.blend import Blend, Cap, Limits
from megaframe.data.streaming.streamed_dataset import START, Cursor
from megaframe.errors import UserError

T = TypeVar("T")
_SAME = Fraction(1)


@dataclass(frozen=True)
class BlendSources:
    """The sources of a run, one entry per source.

    Attributes:
        paths: Paths without suffix.
        weights: Relative shares of the samples.
        sizes: Samples per epoch.
        digests: See `IndexedDataset.compute_digest`.
        caps: The `epochs` and `max_tokens` of each, where one of them is set.
    """

    paths: tuple[str, ...]
    weights: tuple[float, ...]
    sizes: tuple[int, ...]
    digests: tuple[str, ...]
    caps: Mapping[str, Cap] = field(default_factory=dict)

    def map_by_path(self, values: Sequence[Any]) -> dict[str, Any]:
        """Return the values, one per source, by the path of the source."""
        return dict(zip(self.paths, values, strict=True))


@dataclass(frozen=True)
class SamplerState:
    """A position in the data of a run.

    Attributes:
        sources: The sources of the run.
        blend: How many samples each source has given.
        samples: Samples seen in total.
        removed: By path, samples given by sources that are no longer in the blend.
        numbers: By path, the numbers other than 0 of sources in a run that an earlier version
            began; see `number_same_names`.
        cursors: By path, the places in sources that are read as streams.
    """

    sources: BlendSources
    blend: Blend
    samples: int
    removed: Mapping[str, int]
    numbers: Mapping[str, int] = field(default_factory=dict)
    cursors: Mapping[str, Cursor] = field(default_factory=dict)

    @staticmethod
    def start(sources: BlendSources) -> SamplerState:
        """Return the state before the first sample."""
        return SamplerState(sources, Blend.start(sources.weights), 0, {})

    def take(
        self, size: int, limits: Limits = ()
    ) -> tuple[NDArray[np.int64], NDArray[np.int64], SamplerState]:
        """Return the source and the number of each of the next `size` samples, and the state
        after them. limits: see `Blend.take`."""
        sources, numbers, blend = self.blend.take(size, limits)
        return sources, numbers, replace(self, blend=blend, samples=self.samples + size)

    def state(self) -> dict[str, Any]:
        """Return the state as JSON values: `samples`, and by path what `restore_sampler`
        needs."""
        map_by_path = self.sources.map_by_path
        return {
            "samples": self.samples,
            "consumed": {**self.removed, **map_by_path(self.blend.consumed)},
            "base": map_by_path(self.blend.base),
            "weights": map_by_path(self.sources.weights),
            "sizes": map_by_path(self.sources.sizes),
            "digests": map_by_path(self.sources.digests),
            "numbers": dict(self.numbers),
            **({"streams": _list_cursors(self.cursors)} if self.cursors else {}),
            **({"caps": dict(self.sources.caps)} if self.sources.caps else {}),
        }


def _list_cursors(cursors: Mapping[str, Cursor]) -> dict[str, list[int]]:
    return {path: list(cursor) for path, cursor in cursors.items()}


def number_same_names(paths: Iterable[str]) -> dict[str, int]:
    """Return, by path, the numbers that earlier versions gave to sources with the same file name.
    Together with the name they determined the order of a source."""
    counts: Counter[str] = Counter()
    numbers: dict[str, int] = {}
    for path in paths:
        numbers[path] = counts[Path(path).name]
        counts[Path(path).name] += 1
    return numbers


def restore_sampler(
    state: Mapping[str, Any],
    sources: BlendSources,
    validation_paths: Iterable[str] = (),
    scale: Fraction = _SAME,
) -> tuple[SamplerState, list[str]]:
    """Restore the state of a sampler for `sources`.

    With the same sources and weights the sequence continues as if it had not been interrupted.
    Otherwise the weights count from now on, each known source continues after the samples that it
    has given, a new one starts at its first, and a line says so.

    Args:
        state: `SamplerState.state` of this version or an earlier one.
        sources: The sources of the training split.
        validation_paths: The paths of those of the validation split.
        scale: Tokens of a sample then, as a multiple of those of one now. If it is another length,
            each source continues after as many tokens as it has given, in a new order.

    Returns:
        The state, and lines for the run log.

    Raises:
        UserError: For a malformed state.
    """
    _check(state)
    new_paths = _find_moved_sources(state, sources)
    consumed, base, weights, sizes, digests, streams, caps, numbers = (
        {new_paths.get(path, path): value for path, value in table.items()}
        for table in (
            *(state[key] for key in ("consumed", "base", "weights", "sizes")),
            state.get("digests", {}),
            state.get("streams", {}),
            state.get("caps", {}),
            state["numbers"] if "numbers" in state else number_same_names(state["sizes"]),
        )
    )
    if "numbers" not in state:  # of an earlier version, which numbered each split on its own
        numbers = {**number_same_names(validation_paths), **numbers}
        numbers = {path: number for path, number in numbers.items() if number}
    # Rounded up: no sample that has been given in part is given again before all others.
    consumed = {path: math.ceil(count * scale) for path, count in consumed.items()}
    counts = tuple(consumed.get(path, 0) for path in sources.paths)
    removed = {path: count for path, count in consumed.items() if path not in set(sources.paths)}
    blend = Blend.start(sources.weights, counts)
    notes = []
    if new_paths:
        pairs = ", ".join(f"{old} is now {new}" for old, new in new_paths.items())
        notes.append(f"files of data.sources have moved, and are continued: {pairs}")
    if scale != _SAME:
        notes.append(
            "the samples of all sources are cut anew for another train.seq: each source continues "
            "after as many tokens as it has given, in a new order that may repeat some of them"
        )
    elif weights == sources.map_by_path(sources.weights) and caps == sources.caps:
        blend = replace(blend, base=tuple(base[path] for path in sources.paths))
    else:
        notes.append(_describe_change(weights, caps, sources, state["samples"]))
    notes += _describe_files(sizes if scale == _SAME else {}, digests, sources)
    cursors = {path: Cursor(*place).scale(scale) for path, place in streams.items()}
    return SamplerState(sources, blend, state["samples"], removed, numbers, cursors), notes


def _find_moved_sources(state: Mapping[str, Any], sources: BlendSources) -> dict[str, str]:
    """Find sources that have moved. Returns the new path by the old one.

    A source has moved if a new path has the same file name, number of samples and digest, which
    earlier versions did not save. If several pairs match, those whose paths share the longest ends
    are chosen first.
    """
    before, digests, present = state["sizes"], state.get("digests", {}), set(sources.paths)
    matching: dict[tuple[str, int], list[str]] = {}
    for path, size in before.items():
        if path not in present:
            matching.setdefault((Path(path).name, size), []).append(path)
    pairs = [
        (-_find_shared_components(old, path), old, path)
        for path, size, digest in zip(sources.paths, sources.sizes, sources.digests, strict=True)
        if path not in before
        for old in matching.get((Path(path).name, size), ())
        if digests.get(old, digest) == digest
    ]
    new_path: dict[str, str] = {}
    taken: set[str] = set()
    for _, old, path in sorted(pairs, key=itemgetter(0)):
        if old not in new_path and path not in taken:
            new_path[old] = path
            taken.add(path)
    return new_path


def _find_shared_components(path: str, other: str) -> int:
    """Return the number of trailing components that two paths share."""
    pairs = zip(reversed(Path(path).parts), reversed(Path(other).parts), strict=False)
    return sum(
        takewhile(bool, (component == other_component for component, other_component in pairs))
    )


def _check(state: Mapping[str, Any]) -> None:
    """Raise `UserError` for a state that `SamplerState.state` cannot have written."""
    required = ("samples", "consumed", "base", "weights", "sizes")
    missing = [key for key in required if key not in state]
    if missing:
        raise UserError(
            f"the data state of the checkpoint lacks {', '.join(missing)} (it has "
            f"{', '.join(map(str, state)) or 'nothing'}); resume from a checkpoint of this program"
        )
    tables = [state[key] for key in required[1:]]
    numbers, digests = state.get("numbers", {}), state.get("digests", {})
    valid = (
        _is_count(state["samples"])
        and isinstance(numbers, Mapping)
        and all(map(_is_count, numbers.values()))
        and isinstance(digests, Mapping)
        and _are_cursors(state.get("streams", {}))
        and all(isinstance(table, Mapping) for table in (*tables, state.get("caps", {})))
        and all(_is_count(n) for key in ("consumed", "base", "sizes") for n in state[key].values())
        and set(state["weights"]) == set(state["base"]) == set(state["sizes"])
        and all(state["base"][path] <= state["consumed"].get(path, -1) for path in state["base"])
    )
    if not valid:
        raise UserError(
            "the data state of the checkpoint is damaged: samples and the counts of each source "
            "are whole numbers below 2^53, with base <= consumed; resume from another checkpoint"
        )


def _are_cursors(streams: object) -> bool:
    return isinstance(streams, Mapping) and all(
        isinstance(each, list) and len(each) == len(START) and all(map(_is_count, each))
        for each in streams.values()
    )


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value < 1 << 53


def _describe_change(
    before: Mapping[str, float], caps: Mapping[str, Cap], sources: BlendSources, samples: int
) -> str:
    now = sources.map_by_path(sources.weights)
    parts = {
        "added": [path for path in now if path not in before],
        "removed": [path for path in before if path not in now],
        "other weight": [path for path in now if path in before and now[path] != before[path]],
        "other epochs or max_tokens": [
            path for path in now if path in before and sources.caps.get(path) != caps.get(path)
        ],
    }
    change = "; ".join(f"{change} {', '.join(paths)}" for change, paths in parts.items() if paths)
    return (
        f"data.sources changed after sample {samples}: {change}; each source continues where it "
        "stopped"
    )


def _describe_files(
    sizes: Mapping[str, int], digests: Mapping[str, str], sources: BlendSources
) -> Iterator[str]:
    """Yield lines about sources whose files have changed. sizes, digests: those before, by path."""
    changed_sizes = _find_changed(sizes, sources.map_by_path(sources.sizes))
    if changed_sizes:
        path, before, now = changed_sizes[0]
        yield (
            f"{len(changed_sizes)} sources have a different number of samples than before ({path}: "
            f"{now}, before {before}), because of their files, train.seq, data.split or "
            "data.packing; their order is new and may repeat samples"
        )
    changed_contents = _find_changed(digests, sources.map_by_path(sources.digests))
    if changed_contents:
        yield (
            f"{len(changed_contents)} sources have other tokens or weights of labels than before, "
            f"under the same path: {changed_contents[0][0]}; they continue where they were"
        )


def _find_changed(before: Mapping[str, T], now: Mapping[str, T]) -> list[tuple[str, T, T]]:
    """Return the path and both values of each source that has another value than before."""
    return [
        (path, before[path], value)
        for path, value in now.items()
        if path in before and before[path] != value
    ]
