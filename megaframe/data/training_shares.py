"""Whether what a run holds out is what it never trained on: the training shares of its sources.

The training share comes first in a source, so what is held out may be divided otherwise at any
time: no sample of training changes, and nothing that was trained on is evaluated.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from megaframe.config.compare import find_differences
from megaframe.config.data import DataConfig, Split
from megaframe.data.indexed_dataset import IndexedDataset
from megaframe.data.streaming.corpus import is_stream
from megaframe.errors import UserError


def find_changed_shares(
    saved: DataConfig, state: Mapping[str, Any], data: DataConfig
) -> Iterator[str]:
    """Yield a line for each source that a run and its checkpoint train on in different shares.

    A source is the same if it has the same path or, if that is new, the same tokens, whatever its
    file is called now.

    Args:
        saved: The section of the checkpoint.
        state: The state of the loader in the checkpoint.
        data: The section of the run.
    """
    before = {source.path: source.split or saved.split for source in saved.sources}
    own = {source.path for source in saved.sources if source.split}
    lines: dict[str, None] = {}
    for source in data.sources:
        path = source.path if source.path in before else _find_source(source.path, state, data)
        shares = source.split or data.split
        if path in before and before[path][0] != shares[0]:
            is_common = path not in own and source.split is None
            name = "data.split" if is_common else f"data.sources, split of {source.path}"
            lines |= dict.fromkeys(find_differences(before[path], shares, (), name))
    yield from lines


def _find_source(path: str, state: Mapping[str, Any], data: DataConfig) -> str:
    """Return the path that a source had in a checkpoint; empty if it is new."""
    digests = state.get("digests", {})
    if digests and not is_stream(path):
        digest = IndexedDataset(path).compute_digest()
        return next((old for old, known in digests.items() if known == digest), "")
    # An earlier version saved no digests. A source that is still there is no other one.
    present = {source.path for source in data.sources}
    gone = [old for old in state.get("sizes", {}) if old not in present]
    same = [old for old in gone if Path(old).name == Path(path).name]
    return same[0] if len(same) == 1 else ""


def divide_for_evaluation(data: DataConfig, split: Split) -> DataConfig:
    """Return the section of a finished run with another `data.split`, for its evaluation.

    Args:
        data: The section of the run.
        split: Shares of training, validation and test.

    Raises:
        UserError: If they do not sum to 1, if no source would change, and if something that was
            trained on would count as held out.
    """
    given = f"--data-split {' '.join(f'{share:g}' for share in split)}"
    if not all(0 <= share <= 1 for share in split) or abs(sum(split) - 1) > 1e-6:
        raise UserError(
            f"{given}: takes three shares from 0 to 1 that sum to 1, and these sum to "
            f"{sum(split):g}; the run has {' '.join(map(str, data.split))}"
        )
    if all(source.split for source in data.sources):
        raise UserError(
            f"{given}: every source of the run has a split of its own, which it does not change"
        )
    train = data.split[0]
    if split[0] < train:
        rest = round(1 - train, 9)
        raise UserError(
            f"{given} would count as held out what the run trained on: the first "
            f"{train:g} of each source, and not {split[0]:g}; use {train} and divide {rest:g}"
        )
    return data.model_copy(update={"split": split})
