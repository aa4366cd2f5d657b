"""Optimizer: all buckets of this rank, from summed gradients to updated weights.

An update has three phases: the norm of the summed gradients, the update of each bucket with the
clipping factor and the loss scale folded in, and the copy to where the model computes. A norm that
is not finite stops it before any weight is touched.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megaframe.comm import Group, all_reduce
from megaframe.config import RunConfig
from megaframe.mesh import Mesh
from megaframe.optim.adamw import AdamWOptions
from megaframe.optim.bucket import Bucket
from megaframe.optim.rates import learning_rate
from megaframe.optim.scale import LossScale
from megaframe.parameter import PRECISIONS, Module, Parameter
from megaframe.spec import Box, ParamSpec

_NAMES = 512
"""Bytes of the names of bad parameters that ranks tell each other."""


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


@dataclass(frozen=True)
class Tied:
    """A parameter that two pipeline ranks hold, whose gradients are summed over these `ends`."""

    parameter: Parameter
    ends: Group


class Optimizer:
    """Buckets for the units of this rank's stages, in the order of the forward pass; parameters
    that two units share belong to the bucket of the first. A replica has a bucket of its own."""

    def __init__(
        self,
        config: RunConfig,
        mesh: Mesh,
        units: Sequence[Module],
        tied: Tied | None = None,
    ) -> None:
        self._optim, self._steps = config.optim, config.train.steps
        self._mesh, self._tied = mesh, tied
        self.scale = LossScale(config)
        self.updates = 0
        self._config = config
        self._buckets_of: dict[int, list[Bucket]] = {}
        taken: set[int] = set()
        for unit in units:
            mine = [p for p in unit.parameters() if id(p) not in taken]
            taken.update(map(id, mine))
            alike: dict[object, list[Parameter]] = {}
            for p in mine:
                alike.setdefault((p.replica, p.spec.summed_over(mesh.layout.sizes)), []).append(p)
            self._buckets_of[id(unit)] = [self._bucket(kind) for kind in alike.values()]

    def _bucket(self, parameters: Sequence[Parameter]) -> Bucket:
        mesh, optim = self._mesh, self._optim
        sizes = mesh.layout.sizes
        place = {**mesh.coordinate, "data": 0, "context": 0}  # these ranks all take the same norm
        return Bucket(
            parameters,
            {p.spec.name: p.spec.local(mesh.coordinate, sizes) for p in parameters},
            PRECISIONS[self._config.train.precision],
            mesh.device,
            mesh.group(*parameters[0].spec.summed_over(sizes)),
            AdamWOptions(optim.beta1, optim.beta2, optim.eps, optim.weight_decay),
            counted=not parameters[0].replica and parameters[0].spec.owned(place, sizes),
            replica=parameters[0].replica,
        )

    @property
    def buckets(self) -> list[Bucket]:
        """All buckets, in the order of the units."""
        return [bucket for buckets in self._buckets_of.values() for bucket in buckets]

    def initialise(self, seed: int) -> None:
        """Set the initial weights."""
        for bucket in self.buckets:
            bucket.initialise(seed)

    def start_step(self) -> None:
        """Forget the gradients of the step before."""
        for bucket in self.buckets:
            bucket.start_step()

    def reduce(self, unit: Module) -> None:
        """Start summing the gradients of one unit over the ranks that have its parameters."""
        for bucket in self._buckets_of[id(unit)]:
            bucket.reduce()

    def wait(self) -> None:
        """Return when every reduction is done."""
        for bucket in self.buckets:
            bucket.wait()
        if self._tied is not None:
            all_reduce(self._tied.parameter.grad, self._tied.ends).wait()

    def update(self) -> Update:
        """Clip the summed gradients and update the weights."""
        scale = self.scale.value
        norm = self._norm() / scale
        lr = learning_rate(self._optim, self.updates, self._steps)
        finite = norm - norm == 0.0
        self.scale.update(finite)
        if not finite:
            return Update(norm, lr, self._bad())
        clip = self._optim.clip
        divisor = scale * (norm / clip if clip and norm > clip else 1.0)
        self.updates += 1
        for bucket in self.buckets:
            tensor = torch.full((), divisor, dtype=bucket.grads.dtype, device=bucket.grads.device)
            bucket.update(self.updates, lr, tensor)
            bucket.gather()
        return Update(norm, lr)

    def tensors(self, *, replicas: bool = True) -> Iterator[tuple[str, ParamSpec, Box, Tensor]]:
        """Everything that a checkpoint holds of the weights and of the optimizer of this rank;
        replicas are loaded, not saved."""
        for bucket in self.buckets:
            if replicas or not bucket.replica:
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

    def _norm(self) -> float:
        """Norm of the gradients of the whole model, each parameter counted once."""
        own = [torch.linalg.vector_norm(bucket.grads) for bucket in self.buckets if bucket.counted]
        square = torch.zeros((), dtype=torch.float64, device=self._mesh.device)
        if own:
            square = torch.linalg.vector_norm(torch.stack(own)).double().square()
        return math.sqrt(all_reduce(square, self._mesh.group("pipeline", "tensor")).wait())

    def _bad(self) -> tuple[str, ...]:
        """Names of parameters with gradients that are not finite, on the first rank that has any;
        every rank that holds a part of the model gets the same."""
        bad = [
            parameter.spec.name
            for bucket in self.buckets
            for parameter, grad in bucket.pieces(bucket.grads)
            if not bool(torch.isfinite(grad).all())
        ]
        group = self._mesh.group("pipeline", "tensor")
        first = torch.tensor(group.index if bad else group.size, device=self._mesh.device)
        first = all_reduce(first, group, "min").wait()
        text = ",".join(bad).encode()[:_NAMES] if int(first) == group.index else b""
        names = torch.tensor([*text.ljust(_NAMES, b" ")], dtype=torch.int32)
        if not text:
            names.zero_()
        names = all_reduce(names.to(self._mesh.device), group).wait()
        return tuple(bytes(names.tolist()).decode(errors="replace").strip().split(","))
