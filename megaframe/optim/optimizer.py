"""Optimizer: all buckets of this rank, from summed gradients to updated weights.

An update has three phases: the norm of the summed gradients, the update of each bucket with the
clipping factor and the loss scale folded in, and the copy to where the model computes. A norm that
is not finite stops it before any weight is touched.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megaframe.config import RunConfig
from megaframe.mesh import Mesh
from megaframe.optim.adamw import AdamWOptions
from megaframe.optim.bucket import Bucket
from megaframe.optim.rates import learning_rate
from megaframe.optim.scale import LossScale
from megaframe.parameter import PRECISIONS, Module
from megaframe.spec import Box, ParamSpec


@dataclass(frozen=True)
class Update:
    """What became of one optimizer step. grad_norm: before clipping. bad: names of parameters with
    gradients that are not finite; if there are any, nothing was updated."""

    grad_norm: float
    lr: float
    bad: tuple[str, ...] = ()


@dataclass(frozen=True)
class OptimizerState:
    """updates: done so far. loss_scale: of the next step. good_steps: since the last overflow."""

    updates: int
    loss_scale: float
    good_steps: int


class Optimizer:
    """Buckets for `units` in the order of the forward pass; parameters that two units share belong
    to the bucket of the first."""

    def __init__(self, config: RunConfig, mesh: Mesh, units: Sequence[Module]) -> None:
        self._optim, self._steps = config.optim, config.train.steps
        self.scale = LossScale(config)
        self.updates = 0
        optim = config.optim
        options = AdamWOptions(optim.beta1, optim.beta2, optim.eps, optim.weight_decay)
        sizes = mesh.layout.sizes
        self._bucket_of: dict[int, Bucket] = {}
        taken: set[int] = set()
        for unit in units:
            mine = [p for p in unit.parameters() if id(p) not in taken]
            taken.update(map(id, mine))
            boxes = {p.spec.name: p.spec.local(mesh.coordinate, sizes) for p in mine}
            self._bucket_of[id(unit)] = Bucket(
                mine,
                boxes,
                PRECISIONS[config.train.precision],
                mesh.device,
                mesh.group("data"),
                options,
            )

    @property
    def buckets(self) -> list[Bucket]:
        """All buckets, in the order of the units."""
        return list(self._bucket_of.values())

    def initialise(self, seed: int) -> None:
        """Set the initial weights."""
        for bucket in self.buckets:
            bucket.initialise(seed)

    def start_step(self) -> None:
        """Forget the gradients of the step before."""
        for bucket in self.buckets:
            bucket.start_step()

    def reduce(self, unit: Module) -> None:
        """Start summing the gradients of one unit over the data ranks."""
        self._bucket_of[id(unit)].reduce()

    def wait(self) -> None:
        """Return when every reduction is done."""
        for bucket in self.buckets:
            bucket.wait()

    def update(self) -> Update:
        """Clip the summed gradients and update the weights."""
        scale = self.scale.value
        norms = [torch.linalg.vector_norm(bucket.grads) for bucket in self.buckets]
        norm = float(torch.linalg.vector_norm(torch.stack(norms))) / scale
        lr = learning_rate(self._optim, self.updates, self._steps)
        finite = norm - norm == 0.0
        self.scale.update(finite)
        if not finite:
            return Update(norm, lr, tuple(self._bad()))
        clip = self._optim.clip
        divisor = scale * (norm / clip if clip and norm > clip else 1.0)
        self.updates += 1
        for bucket in self.buckets:
            tensor = torch.full((), divisor, dtype=bucket.grads.dtype, device=bucket.grads.device)
            bucket.update(self.updates, lr, tensor)
            bucket.gather()
        return Update(norm, lr)

    def tensors(self) -> Iterator[tuple[str, ParamSpec, Box, Tensor]]:
        """Everything that a checkpoint holds of the weights and of the optimizer."""
        for bucket in self.buckets:
            yield from bucket.tensors()

    def state(self) -> OptimizerState:
        """The numbers that a checkpoint holds beside the tensors."""
        return OptimizerState(self.updates, self.scale.value, self.scale.good)

    def load_state(self, state: OptimizerState) -> None:
        """Continue from `state`; the tensors were loaded into the buckets before."""
        self.updates = state.updates
        self.scale.value, self.scale.good = state.loss_scale, state.good_steps
        for bucket in self.buckets:
            bucket.gather()

    def _bad(self) -> Iterator[str]:
        for bucket in self.buckets:
            for parameter, grad in bucket.pieces(bucket.grads):
                if not bool(torch.isfinite(grad).all()):
                    yield parameter.spec.name
