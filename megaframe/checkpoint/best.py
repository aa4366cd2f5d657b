"""The checkpoints of a run with the lowest evaluation losses, which `checkpoint.keep_best` keeps.

Each checkpoint records the loss of the evaluation after its step in its own state, so a run that
resumes knows them all, and no other file must agree with them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from pydantic import JsonValue

from megaframe.checkpoint.folder import list_checkpoints, step_of
from megaframe.checkpoint.load import open_checkpoint
from megaframe.checkpoint.stores.store import StorePath
from megaframe.errors import UserError

_STATE_KEY = "eval_loss"


def read_evaluation_loss(state: Mapping[str, JsonValue]) -> float | None:
    """Return the evaluation loss in the state of a checkpoint; None if its step had no evaluation,
    or one that is not a finite number."""
    loss = state.get(_STATE_KEY)
    return loss if isinstance(loss, float) and math.isfinite(loss) else None


class BestCheckpoints:
    """The evaluation losses of the checkpoints in a folder.

    Args:
        root: The folder, whose checkpoints are read once.
        keep: Number of checkpoints that are kept because of their losses.
    """

    def __init__(self, root: StorePath, keep: int) -> None:
        self._root, self._keep = root, keep
        self._loss_of_step: dict[int, float | None] = {}
        for path in list_checkpoints(root) if keep else ():
            try:
                with open_checkpoint(path) as checkpoint:
                    self.add(checkpoint.step, checkpoint.state)
            except UserError:  # a damaged one is not the best
                continue

    def add(self, step: int, state: Mapping[str, JsonValue]) -> None:
        """Add a checkpoint, in place of an earlier one of the same step."""
        self._loss_of_step[step] = read_evaluation_loss(state)

    def list_names(self) -> list[str]:
        """Return the names of those to keep, the best first; of equal ones the earlier."""
        losses = []
        for path in list_checkpoints(self._root) if self._keep else ():
            loss = self._loss_of_step.get(step_of(path))
            if loss is not None and not path.name.endswith(".replaced"):
                losses.append((loss, step_of(path), path.name))
        return [name for _, _, name in sorted(losses)[: self._keep]]
