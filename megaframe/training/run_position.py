"""Where a run begins: at its first step, or at the checkpoint that it resumes from."""

from __future__ import annotations

from dataclasses import dataclass

from megaframe.checkpoint import find_checkpoint, open_checkpoint, resolve_checkpoint_folder
from megaframe.checkpoint.train_state import read_train_state
from megaframe.config import CheckpointConfig, RunConfig, RunSection


@dataclass(frozen=True)
class RunPosition:
    """A place between two steps of a run.

    Attributes:
        step: Steps before it.
        samples: Samples of these steps.
        config: The config in the checkpoint; None at the first step.
    """

    step: int = 0
    samples: int = 0
    config: RunConfig | None = None


def find_position(run: RunSection, checkpoint: CheckpointConfig) -> RunPosition:
    """Return where the run begins: at the checkpoint that `checkpoint.resume` asks for, if there is
    one."""
    resume, root = checkpoint.resume, resolve_checkpoint_folder(run, checkpoint)
    # The manager of checkpoints looks for it again, and notes what is wrong.
    path = find_checkpoint(root, resume, lambda text: None) if resume else None
    if path is None:
        return RunPosition()
    with open_checkpoint(path) as saved:
        state = read_train_state(saved)
        samples = state.data.get("samples")
        if type(samples) is not int or not 0 <= samples < 1 << 53:
            samples = 0  # the loader refuses it, and says what it lacks
        return RunPosition(saved.step, samples, state.config)
