"""What a checkpoint holds beside its tensors."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from megaframe.checkpoint import Checkpoint
from megaframe.errors import UserError
from megaframe.optim.optimizer import OptimizerState


class RunState(BaseModel):
    """config: of the run, resolved. data: of the loader. loss and grad_norm: of the last step, with
    which the first step after a load is compared."""

    model_config = ConfigDict(extra="forbid")

    config: dict[str, dict[str, Any]]
    data: dict[str, Any]
    optimizer: OptimizerState
    loss: float
    grad_norm: float


def read_state(checkpoint: Checkpoint) -> RunState:
    """The state in a checkpoint. Raises `UserError` when it is not one of a run."""
    try:
        return RunState.model_validate(checkpoint.state)
    except ValidationError as error:
        raise UserError(f"{checkpoint.path} holds no state of a run: {error}") from None
