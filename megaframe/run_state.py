"""What a checkpoint holds beside its tensors, and which of them a run can do without."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from megaframe.checkpoint import Checkpoint, Place, Slice
from megaframe.config import RunConfig
from megaframe.config.compare import TRAINING_ONLY, differences
from megaframe.config.schema import Data
from megaframe.errors import UserError
from megaframe.optim.optimizer import OptimizerState

STATE, AVERAGE = "optimizer.", "optimizer.ema/"
"""How the names of tensors begin that are state of the optimizer, and averages of weights."""


@dataclass(frozen=True)
class HistoryState:
    """What was judged of the steps before: the last losses, and first samples of the steps that are
    left out, and of those that have failed once."""

    losses: Sequence[float] = ()
    left_out: Sequence[int] = ()
    failed: Sequence[int] = ()


class RunState(BaseModel):
    """config: of the run, resolved; keys that its version did not have yet are at their defaults.
    data: of the loader. loss and grad_norm: of the last step, with which the first step after a
    load is compared."""

    model_config = ConfigDict(extra="forbid")

    config: RunConfig
    data: dict[str, Any]
    optimizer: OptimizerState
    loss: float
    grad_norm: float
    history: HistoryState = HistoryState()


def initial_state(config: RunConfig) -> RunState:
    """Of a run that has not begun, for weights that come from elsewhere."""
    return RunState(
        config=config,
        data={},
        optimizer=OptimizerState(0, 1.0, 0),
        loss=math.nan,
        grad_norm=math.nan,
    )


def read_state(checkpoint: Checkpoint) -> RunState:
    """The state in a checkpoint. Raises `UserError` when it is not one of a run."""
    try:
        return RunState.model_validate(checkpoint.state)
    except ValidationError as error:
        unknown = [
            ".".join(map(str, one["loc"][1:]))
            for one in error.errors()
            if one["type"] == "extra_forbidden" and one["loc"][0] == "config"
        ]
        if unknown:
            raise UserError(
                f"{checkpoint.path} is of a run with keys that this version of megaframe does not "
                f"know: {', '.join(unknown)}; use the version that saved it, or a later one"
            ) from None
        raise UserError(f"{checkpoint.path} has no run state: {error}") from None


def without_missing(slices: Sequence[Slice], saved: Collection[str]) -> list[Slice]:
    """What of `slices` to load. State of the optimizer that is not saved, because a parameter was
    frozen or the optimizer another one, stays as it is, zero; an average starts from the weight."""
    found = []
    for part in slices:
        if part.name in saved or not part.name.startswith(STATE):
            found.append(part)
        elif part.name.startswith(AVERAGE):
            found.append(replace(part, name=part.name.removeprefix(AVERAGE)))
    return found


def new_state(slices: Sequence[Slice], saved: Collection[str]) -> Iterator[str]:
    """A line for each kind of state that `without_missing` does without."""
    missing: dict[str, dict[str, None]] = {}
    for part in slices:
        if part.name.startswith(STATE) and part.name not in saved:
            kind, _, name = part.name.removeprefix(STATE).partition("/")
            missing.setdefault(kind, {})[name] = None
    for kind, names in missing.items():
        start = "the weights" if kind == "ema" else "zero"
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        yield (
            f"the checkpoint has no optimizer state `{kind}` of {next(iter(names))}{more}; "
            f"it starts from {start}"
        )


def _other_splits(saved: Data, data: Data) -> Iterator[str]:
    """A line for each source that both have, by the name of its files, with documents of training
    that were held out before, or the other way round."""
    if other := [*differences(saved.split, data.split, (), "data.split")]:
        yield from other
        return
    before, now = (
        {Path(source.path).name: source.split or given.split for source in given.sources}
        for given in (saved, data)
    )
    for name in before.keys() & now.keys():
        yield from differences(before[name], now[name], (), f"data.sources, split of {name}")


def check_same_run(saved: RunConfig, config: RunConfig, path: Place) -> None:
    """Refuse a checkpoint of another model, or of other data or another order of them."""
    other = [
        *differences(saved.model, config.model, TRAINING_ONLY, "model"),
        *differences(saved.run.seed, config.run.seed, (), "run.seed"),
        *differences(saved.train.seq, config.train.seq, (), "train.seq"),
        *_other_splits(saved.data, config.data),
    ]
    if other:
        start = f"to start a new run from its weights, where they fit: checkpoint.weights={path}"
        raise UserError("\n  ".join([f"{path} is a checkpoint of another run:", *other, start]))
