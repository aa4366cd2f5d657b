"""Engine: runs one rank's list of actions in order.

It knows the kinds of action and not the schedules: gradient accumulation, pipelines and anything
that a text file can say are executed by the same few lines.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import Tensor

from megaframe.meter import Part
from megaframe.microbatch import Microbatch
from megaframe.model import Stage
from megaframe.optim.optimizer import Optimizer, Update
from megaframe.schedule import Action, Kind


@dataclass(frozen=True)
class Outcome:
    """What one step gave. loss: sum over this rank's valid tokens, fp64 scalar."""

    loss: Tensor
    update: Update


class Engine:
    """Runs actions on the stages of this rank. `time` gives a context that charges what runs in it
    to a part of the step."""

    def __init__(
        self,
        stages: Mapping[int, Stage],
        optimizer: Optimizer,
        time: Callable[[Part], AbstractContextManager[object]],
    ) -> None:
        self._stages = stages
        self._optimizer = optimizer
        self._time = time

    def run(
        self, actions: Sequence[Action], microbatches: Sequence[Microbatch], step: int, scale: float
    ) -> Outcome:
        """Execute `actions` on the microbatches of optimizer step `step`; gradients are those of
        scale * (sum of the losses). The list ends with the update."""
        losses: list[Tensor] = []
        update: Update | None = None
        reducing: set[int] = set()
        self._optimizer.start_step()
        for action in actions:
            if action.kind is Kind.UPDATE:
                with self._time("communication"):
                    self._optimizer.wait()
                with self._time("optimizer"):
                    update = self._optimizer.update()
                continue
            assert action.stage is not None
            if action.kind is Kind.REDUCE:
                reducing.add(action.stage)
                continue
            assert action.microbatch is not None
            stage = self._stages[action.stage]
            if action.kind is Kind.F:
                microbatch = microbatches[action.microbatch]
                losses.append(stage.forward(action.microbatch, microbatch, step, scale))
            else:
                done = self._optimizer.reduce if action.stage in reducing else None
                stage.backward(action.microbatch, done)
        assert update is not None
        return Outcome(torch.stack(losses).sum(), update)
