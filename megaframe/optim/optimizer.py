"""Optimizer: all buckets of this rank, from summed gradients to updated weights.

An update has three phases: the norm of the summed gradients, the update of each bucket with the
clipping factor and the loss scale folded in, and the way of the new weights to where the model
computes. All three are computed on the device, so that nothing waits for the host: a norm that is
not finite leaves every weight as it was, and the host hears of it when it asks.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest

import torch
from torch import Tensor

from megaframe.comm import Group, all_reduce
from megaframe.config import RunConfig
from megaframe.mesh import Mesh
from megaframe.optim.bucket import Bucket, Sharing
from megaframe.optim.buffers import Buffers
from megaframe.optim.choice import Choices
from megaframe.optim.muon import together
from megaframe.optim.rates import learning_rate
from megaframe.optim.resident import Residents
from megaframe.optim.rule import Step
from megaframe.optim.scale import LossScale
from megaframe.parameter import PRECISIONS, Module, Parameter
from megaframe.spec import Box, ParamSpec

_NAMES = 512
"""Bytes of the names of bad parameters that ranks tell each other."""
_VECTORS = ("gain", "bias")
"""Roles of what is so small that all ranks keep it whole at any ZeRO stage."""


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
    """Buckets for the units of this rank's stages, given by number.

    The matrices of a unit are a bucket, a parameter that two units or two ranks share is one of its
    own, and the gains and biases of a stage are one.
    """

    def __init__(
        self,
        config: RunConfig,
        mesh: Mesh,
        stages: Mapping[int, Sequence[Module]],
        tied: Tied | None = None,
    ) -> None:
        self._config, self._mesh, self._tied = config, mesh, tied
        self._optim, self._steps = config.optim, config.train.steps
        self._choices = Choices(config, mesh)
        self.scale = LossScale(config)
        self.updates = 0
        self.buffers = Buffers(mesh.device)
        self._residents = Residents()
        self._in_flight: deque[Bucket] = deque()
        self.buckets: list[Bucket] = []
        """All, in the order of the units."""
        self._owned: dict[int, list[Bucket]] = {}
        self._used: dict[int, list[Bucket]] = {}
        self._vectors: dict[int, list[Bucket]] = {}
        self._lay_out(stages)
        self._together = together(self.buckets, self._choices.owners)
        self._tied_bucket = next(
            (b for b in self._trained() if tied is not None and tied.parameter in b.parameters),
            None,
        )
        self._divided = config.parallel.zero >= 2
        self._in_parts = self._divided or mesh.layout.data_replicate > 1

    def _lay_out(self, stages: Mapping[int, Sequence[Module]]) -> None:
        bucket_of: dict[Parameter, Bucket] = {}
        users = [p for units in stages.values() for unit in units for p in unit.parameters()]
        for number, units in stages.items():
            vectors: list[Parameter] = []
            for unit in units:
                mine = [p for p in unit.parameters() if p.spec.role not in _VECTORS]
                vectors += [p for p in unit.parameters() if p.spec.role in _VECTORS]
                new = [p for p in mine if p not in bucket_of]
                alone = [p for p in new if self._is_tied(p) or users.count(p) > 1]
                rest = [p for p in new if p not in alone]
                made = [self._bucket([p]) for p in alone] + self._buckets_of(rest)
                bucket_of |= {p: bucket for bucket in made for p in bucket.parameters}
                self._owned[id(unit)] = [b for b in made if b.optimizer is not None]
            made = self._buckets_of(vectors)
            self._vectors[number] = [b for b in made if b.optimizer is not None]
            bucket_of |= {p: bucket for bucket in made for p in bucket.parameters}
            for unit in units:
                self._used[id(unit)] = list({bucket_of[p]: None for p in unit.parameters()})
        self.buckets = list(dict.fromkeys(bucket_of.values()))

    def _is_tied(self, parameter: Parameter) -> bool:
        return self._tied is not None and self._tied.parameter is parameter

    def _buckets_of(self, parameters: Sequence[Parameter]) -> list[Bucket]:
        """One bucket for those that are alike."""
        alike: dict[object, list[Parameter]] = {}
        sizes = self._mesh.layout.sizes
        for p in parameters:
            kind = self._choices.kind(p.spec), p.spec.summed_over(sizes)
            alike.setdefault(kind, []).append(p)
        return [self._bucket(kind) for kind in alike.values()]

    def _bucket(self, parameters: Sequence[Parameter]) -> Bucket:
        mesh = self._mesh
        spec, sizes = parameters[0].spec, mesh.layout.sizes
        stage = self._config.parallel.zero
        shard = ("data_shard" if axis == "data" else axis for axis in spec.summed_over(sizes))
        sharing = Sharing(
            mesh.group(*shard),
            mesh.group("data_replicate"),
            min(stage, 1) if spec.role in _VECTORS else stage,
        )
        return Bucket(
            parameters,
            {p.spec.name: p.spec.local(mesh.coordinate, sizes) for p in parameters},
            PRECISIONS[self._config.train.precision],
            sharing,
            self.buffers,
            self._choices.rule(spec),
            replica=parameters[0].replica,
        )

    def initialise(self, seed: int) -> None:
        """Set the initial weights."""
        for bucket in self.buckets:
            bucket.initialise(seed)

    # Values, as the passes of a stage need them.

    def fetch(self, unit: Module) -> None:
        """Start bringing the values of a unit to this rank, where they are not here."""
        self._residents.fetch(self._used[id(unit)])

    def take(self, unit: Module) -> None:
        """Return when they are here."""
        self._residents.take(self._used[id(unit)])

    def leave(self, unit: Module) -> None:
        """They are not used until they are taken again."""
        self._residents.leave(self._used[id(unit)])

    # Gradients.

    def start_step(self) -> None:
        """Forget the gradients of the step before."""
        for bucket in self.buckets:
            bucket.start_step()

    def reduce(self, unit: Module, *, last: bool = True) -> None:
        """A microbatch has added all that it adds to the gradients of the matrices that `unit`
        owns; the `last` one of the step starts their way over the ranks that have them. Where
        gradients are divided, each one does."""
        if last or self._divided:
            self._start(self._owned[id(unit)], last)

    def reduce_vectors(self, stage: int) -> None:
        """The same for gains and biases, when the last microbatch has left a stage."""
        self._start(self._vectors[stage], last=True)

    def _start(self, buckets: Sequence[Bucket], last: bool) -> None:
        for bucket in buckets:
            bucket.reduce(last=last)
            before = self._in_flight[-1] if self._in_flight else bucket
            if self._in_parts and before is not bucket:
                before.advance()  # it has had the time in which this one was computed
            self._in_flight.append(bucket)

    def wait(self) -> None:
        """Return when every reduction is done."""
        while self._in_flight:
            self._in_flight.popleft().wait()
        if self._tied is not None and self._tied_bucket is not None:
            all_reduce(self._tied_bucket.sums, self._tied.ends).wait()

    # Weights.

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
        self._residents.clear()
        master, device = PRECISIONS[self._config.train.precision].master, self._mesh.device
        tensor = torch.full((), divisor, dtype=master, device=device)
        step = Step(self.updates, lr, tensor, torch.zeros((), device=device))
        for buckets in self._together:
            for _ in zip_longest(*(bucket.update(step) for bucket in buckets)):
                pass  # each does the part that comes next
            for bucket in buckets:
                bucket.gather()
        return Update(norm, lr)

    def tensors(self, *, owned: bool = False) -> Iterator[tuple[str, ParamSpec, Box, Tensor]]:
        """Everything that a checkpoint holds of the weights and of the optimizer: what this rank
        keeps, or, `owned`, what it alone saves."""
        if owned and self._mesh.group("data_replicate").index:
            return
        for bucket in self.buckets:
            yield from bucket.tensors(owned=owned)

    def state(self) -> OptimizerState:
        """The numbers that a checkpoint holds beside the tensors."""
        return OptimizerState(self.updates, self.scale.value, self.scale.good)

    def load_state(self, state: OptimizerState) -> None:
        """Continue from `state`; the tensors were loaded into the buckets before."""
        self.updates = state.updates
        self.scale.value, self.scale.good = state.loss_scale, state.good_steps
        self._residents.clear()
        for bucket in self.buckets:
            if bucket.optimizer is not None:
                bucket.optimizer.load()
            bucket.gather()

    def _norm(self) -> float:
        """Norm of the gradients of the whole model, each element counted once."""
        own = [torch.linalg.vector_norm(bucket.own_sums) for bucket in self._counted()]
        square = torch.zeros((), dtype=torch.float64, device=self._mesh.device)
        if own:
            square = torch.linalg.vector_norm(torch.stack(own)).double().square()
        return math.sqrt(all_reduce(square, self._one_copy()).wait())

    def _trained(self) -> list[Bucket]:
        return [b for b in self.buckets if b.optimizer is not None]

    def _counted(self) -> list[Bucket]:
        return [b for b in self._trained() if not b.replica]

    def _one_copy(self) -> Group:
        """The ranks that hold one copy of the model together."""
        return self._mesh.group("pipeline", "data_shard", "context", "tensor")

    def _bad(self) -> tuple[str, ...]:
        """Names of parameters with gradients that are not finite, on the first rank that has any;
        every rank that holds a part of the model gets the same."""
        bad = [
            parameter.spec.name
            for bucket in self._counted()
            for parameter, _, grad in bucket.pieces(bucket.own_sums, bucket.own)
            if not bool(torch.isfinite(grad).all())
        ]
        group = self._one_copy()
        first = torch.tensor(group.index if bad else group.size, device=self._mesh.device)
        first = all_reduce(first, group, "min").wait()
        text = ",".join(dict.fromkeys(bad)).encode()[:_NAMES] if int(first) == group.index else b""
        names = torch.tensor([*text.ljust(_NAMES, b" ")], dtype=torch.int32)
        if not text:
            names.zero_()
        names = all_reduce(names.to(self._mesh.device), group).wait()
        return tuple(bytes(names.tolist()).decode(errors="replace").strip().split(","))
