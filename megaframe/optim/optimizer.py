"""Optimizer: all buckets of this rank, from summed gradients to updated weights.

An update has three phases: the norm of the summed gradients, the update of each bucket with the
clipping factor and the loss scale folded in, and the way of the new weights to where the model
computes. All three are computed on the device, so that nothing waits for the host: a norm that is
not finite leaves every weight as it was, and the host hears of it when it asks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import zip_longest

import torch
from torch import Tensor

from megaframe.comm import Group, Pending, all_reduce
from megaframe.comm.landing import land
from megaframe.config import RunConfig
from megaframe.kernels import NO_KERNELS, Kernels
from megaframe.mesh import EXPERT_SETS, Mesh
from megaframe.optim.bucket import Bucket, Sharing
from megaframe.optim.buffers import Buffers
from megaframe.optim.choice import Choices
from megaframe.optim.muon import together
from megaframe.optim.rates import learning_rate
from megaframe.optim.resident import TABLES, Residents
from megaframe.optim.rule import Step
from megaframe.optim.scale import LossScale
from megaframe.optim.wiring import PLAIN, Wiring
from megaframe.parameter import PRECISIONS, Module, Parameter, Precision
from megaframe.plan.lent import WAITED
from megaframe.spec import Box, ParamSpec

_NAMES = 512
"""Bytes of the names of sick parameters that ranks tell each other."""
_VECTORS = ("gain", "bias", "balance")
"""Roles of what is so small that all ranks keep it whole at any ZeRO stage."""
_SHARDS = {"data": "data_shard", "expert_data": "expert_shard"}
"""Of the ranks on an axis, those within one copy of the state."""


@dataclass(frozen=True)
class Update:
    """What became of one optimizer step. grad_norm: before clipping, fp64 scalar on the device; one
    that is not finite means that nothing was updated. landed: that norm, and the norm of each piece
    of gradient that this rank sums, on the host when it is called."""

    grad_norm: Tensor
    lr: float
    landed: Callable[[], list[Tensor]]

    def finite(self) -> bool:
        """Whether weights were updated; waits for the step."""
        return bool(torch.isfinite(self.landed()[0]))


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

    The matrices of a unit's late part are a bucket, as are the rest of them, each table (which two
    units or two ranks may share) and the gains and biases of a stage.
    """

    def __init__(
        self,
        config: RunConfig,
        mesh: Mesh,
        stages: Mapping[int, Sequence[Module]],
        tied: Tied | None = None,
        kernels: Kernels = NO_KERNELS,
    ) -> None:
        self._kernels = kernels
        self._config, self._mesh, self._tied = config, mesh, tied
        self._optim, self._steps = config.optim, config.train.steps
        self._choices = Choices(config, mesh, kernels)
        self.route = self._choices.route
        self._scale = LossScale(config)
        self._updates = 0
        self._last: Update | None = None
        self._reader: Callable[[], None] | None = None
        self.buffers = Buffers(mesh.device)
        self._residents = Residents()
        self._in_flight: dict[int, Sequence[Bucket]] = {}
        """Those whose reductions were started, the last one behind."""
        self.buckets: list[Bucket] = []
        """All, in the order of the stages and their units, gains and biases of a stage first."""
        self._owned: dict[int, list[Bucket]] = {}
        self._used: dict[int, list[Bucket]] = {}
        self._vectors: dict[int, list[Bucket]] = {}
        if config.model.moe is not None:
            mesh.add_groups(EXPERT_SETS)
        self._lay_out(stages)
        self._together = together(self.buckets, self._choices.owners)
        self._tied_bucket = next(
            (b for b in self._trained() if tied is not None and tied.parameter in b.parameters),
            None,
        )
        self._divided = config.parallel.zero >= 2
        plain = Wiring.of(config.parallel, compress=True).plain
        self._in_parts = config.parallel.zero >= 1 or mesh.layout.data_replicate > 1 or not plain
        """Whether a reduction needs this rank more than once, or a buffer until it is done."""

    def _lay_out(self, stages: Mapping[int, Sequence[Module]]) -> None:
        bucket_of: dict[Parameter, Bucket] = {}
        for number, units in stages.items():
            # First of all, for the first block waits for them: behind the rest they would come last
            vectors = {p: None for u in units for p in u.parameters() if p.spec.role in _VECTORS}
            made = self._buckets_of(list(vectors))
            self._vectors[number] = [b for b in made if b.optimizer is not None]
            bucket_of |= {p: bucket for bucket in made for p in bucket.parameters}
            for unit in units:
                self._lay_out_unit(unit, bucket_of)
            for unit in units:
                self._used[id(unit)] = list({bucket_of[p]: None for p in unit.parameters()})
        self.buckets = list(dict.fromkeys(bucket_of.values()))

    def _lay_out_unit(self, unit: Module, bucket_of: dict[Parameter, Bucket]) -> None:
        """Buckets for what no unit before had, added to `bucket_of`."""
        behind = set() if unit.late is None else {*unit.late.parameters()}
        new = [p for p in unit.parameters() if p not in bucket_of]
        rest = [p for p in new if p.spec.role not in TABLES]
        early = [self._bucket([p]) for p in new if p.spec.role in TABLES]
        early += self._buckets_of([p for p in rest if p not in behind])
        late = self._buckets_of([p for p in rest if p in behind])
        bucket_of |= {p: bucket for bucket in (*early, *late) for p in bucket.parameters}
        self._owned[id(unit)] = [b for b in early if b.optimizer is not None]
        if unit.late is not None:
            self._owned[id(unit.late)] = [b for b in late if b.optimizer is not None]
            self._used[id(unit.late)] = late

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
        shard = (_SHARDS.get(axis, axis) for axis in spec.summed_over(sizes))
        precision = PRECISIONS[self._config.train.precision]
        wiring = Wiring.of(self._config.parallel, compress=spec.role not in _VECTORS)
        if spec.role in _VECTORS:
            stage = min(stage, 1)
        if spec.role == "balance":  # counts, which all ranks need as they are
            stage, wiring, precision = 0, PLAIN, Precision(precision.master, precision.master)
        sharing = Sharing(mesh.group(*shard), mesh.group("data_replicate"), stage, wiring)
        return Bucket(
            parameters,
            [p.spec.local(mesh.coordinate, sizes) for p in parameters],
            precision,
            sharing,
            self.buffers,
            self._choices.rule(spec),
            route=self.route,
            together=self._choices.together,
            replica=parameters[0].replica,
        )

    def initialise(self, seed: int) -> None:
        """Begin with the initial weights."""
        self.draw(seed)
        self.begin()

    def draw(self, seed: int) -> None:
        """Set the initial weights, and no more: others may be loaded over them."""
        for bucket in self.buckets:
            bucket.draw(seed)

    def begin(self) -> None:
        """Take the weights as they are for those that a run begins with."""
        for bucket in self.buckets:
            bucket.begin()

    def loads(self) -> Iterator[tuple[str, Tensor, Tensor]]:
        """Of each router here the name of what it knows of the load of its experts, their load [E]
        in the last step over all ranks, and what it knows [E]."""
        for bucket in self.buckets:
            if bucket.parameters[0].spec.role == "balance":
                loads = bucket.pieces(bucket.sums, bucket.kept)
                known = bucket.pieces(bucket.weights, bucket.kept)
                for (parameter, _, load_E), (*_, known_E) in zip(loads, known, strict=True):
                    yield parameter.spec.name, load_E, known_E

    # Values, as the passes of a stage need them.

    def fetch(self, unit: Module) -> None:
        """Start bringing the values of a unit to this rank, where they are not here."""
        self._residents.fetch(self._used[id(unit)])

    def take(self, unit: Module, *, whole: bool = True) -> None:
        """Return when they are here, or all but those that only the late part has."""
        late = () if whole or unit.late is None else self._used[id(unit.late)]
        self._residents.take(self._used[id(unit)], late)

    def take_late(self, late: Module) -> None:
        """Return when those of the late part of a unit are here, which has been taken."""
        for bucket in self._used[id(late)]:
            bucket.take()

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
        owns, a late part or the rest of one; the `last` one of the step starts their way over the
        ranks that have them. Where gradients are divided, each one does."""
        if last or self._divided:
            self._start(self._owned[id(unit)], last)

    def reduce_vectors(self, stage: int) -> None:
        """The same for gains and biases, when the last microbatch has left a stage."""
        self._start(self._vectors[stage], last=True)

    def _start(self, buckets: Sequence[Bucket], last: bool) -> None:
        if not buckets:
            return
        self._in_flight.pop(id(buckets), None)
        if self._in_parts:
            # A transfer has had the time in which two others were computed. What comes behind it
            # can wait for the end of the step, unless it keeps a buffer.
            others = [*self._in_flight.values()]
            for before in (WAITED, 2 * WAITED)[: len(others) // WAITED]:
                for bucket in others[-before]:
                    if before == WAITED or bucket.lends:
                        bucket.advance()
        for bucket in buckets:
            bucket.reduce(last=last)
        self._in_flight[id(buckets)] = buckets

    def wait(self) -> None:
        """Return when every reduction is done."""
        for buckets in self._in_flight.values():
            for bucket in buckets:
                bucket.wait()
        self._in_flight.clear()
        if self._tied is not None and self._tied_bucket is not None:
            all_reduce(self._tied_bucket.sums, self._tied.ends).wait()

    # Weights.

    def hold(self, until: Callable[[], None]) -> None:
        """Weights and state are being read: the next update starts when `until` returns."""
        self._reader = until

    def update(self) -> Update:
        """Clip the summed gradients and update the weights. What became of it is told to the host,
        which must not be made to wait for it, a step later."""
        self._hear()
        if self._reader is not None:
            self._reader()
            self._reader = None
        lr = learning_rate(self._optim, self._updates, self._steps)
        pieces = self._piece_norms()
        norm = self._norm(pieces) / self._scale.value
        divisor = torch.full_like(norm, self._scale.value)
        if self._optim.clip:
            divisor *= (norm / self._optim.clip).clamp_min(1.0)
        skip = (~torch.isfinite(norm)).float()
        divisor = divisor.to(PRECISIONS[self._config.train.precision].master)
        self._residents.clear()
        step = Step(self._updates + 1, lr, divisor, skip)
        for buckets in self._together:
            for _ in zip_longest(*(bucket.update(step) for bucket in buckets)):
                pass  # each does the part that comes next
            for bucket in buckets:
                bucket.gather()
        self._last = Update(norm, lr, land([Pending(norm), Pending(pieces)], self._mesh.device))
        return self._last

    def _hear(self) -> None:
        """Learn what became of the last update."""
        if self._last is not None:
            finite, self._last = self._last.finite(), None
            self._updates += finite
            self._scale.update(finite)

    @property
    def loss_scale(self) -> float:
        """What the loss of the next step is to be multiplied with."""
        if self._scale.dynamic:
            self._hear()
        return self._scale.value

    def settle(self) -> None:
        """Return when updated weights are where the model computes: others may be loaded over them
        then."""
        self._residents.clear()
        for bucket in self.buckets:
            if bucket.sharing.stage < 3:
                bucket.take()

    def tensors(self, *, owned: bool = False) -> Iterator[tuple[str, ParamSpec, Box, Tensor]]:
        """Everything that a checkpoint holds of the weights and of the optimizer: what this rank
        keeps, or, `owned`, what it alone saves."""
        if owned and self._mesh.group("data_replicate").index:
            return
        for bucket in self.buckets:
            yield from bucket.tensors(owned=owned)

    def unsent(self) -> Iterator[tuple[str, Tensor]]:
        """What compression hands on from step to step, which only the same rank of the same layout
        can use."""
        for bucket in self.buckets:
            yield from bucket.unsent()

    def held(self) -> dict[str, int]:
        """Bytes on this rank's device by kind; `buffers`: values to compute with beside the
        weights, and room for whole gradients and transfers."""
        weights = sum(bucket.weights.nbytes for bucket in self.buckets if not bucket.away)
        gradients = sum(bucket.sums.nbytes for bucket in self._trained())
        rules = [bucket.optimizer for bucket in self.buckets if bucket.optimizer is not None]
        here = rules if self.route.device is None else []
        state = sum(tensor.nbytes for rule in here for tensor in rule.state.values())
        rest = max(0, self.buffers.bytes - weights - gradients) + self.route.rooms
        return {"weights": weights, "gradients": gradients, "optimizer": state, "buffers": rest}

    def state(self) -> OptimizerState:
        """The numbers that a checkpoint holds beside the tensors."""
        self._hear()
        return OptimizerState(self._updates, self._scale.value, self._scale.good)

    def load_state(self, state: OptimizerState) -> None:
        """Continue from `state`; the tensors were loaded into the buckets before."""
        self._last, self._updates = None, state.updates
        self._scale.value, self._scale.good = state.loss_scale, state.good_steps
        self._residents.clear()
        for bucket in self.buckets:
            if bucket.optimizer is not None:
                bucket.optimizer.load()
            bucket.renew()

    def _piece_norms(self) -> Tensor:
        """Norm of each piece of gradient that this rank sums, fp64 [pieces]. All ranks that hold
        one copy of the model together have each element of the gradient once."""
        pieces = [piece for _, piece in self._own_pieces]
        if not pieces:
            return torch.zeros(0, dtype=torch.float64, device=self._mesh.device)
        found = [self._kernels.find("square_sum", piece) for piece in pieces]
        if self._kernels.has("square_sum") and all(found):
            sums = [run(p) for run, p in zip(found, pieces, strict=True) if run is not None]
            return torch.stack(sums).sqrt()
        return torch.stack(torch._foreach_norm(pieces)).double()

    @cached_property
    def _own_pieces(self) -> list[tuple[str, Tensor]]:
        """By the names that a piece is of; with a kernel one each bucket, which is one launch."""
        if self._kernels.has("square_sum"):
            return [
                (",".join(p.spec.name for p in bucket.parameters), bucket.own_sums)
                for bucket in self._trained()
                if not bucket.replica and bucket.parameters[0].spec.role != "balance"
            ]
        return [
            (parameter.spec.name, piece)
            for bucket in self._trained()
            if not bucket.replica and bucket.parameters[0].spec.role != "balance"
            for parameter, _, piece in bucket.pieces(bucket.own_sums, bucket.own)
        ]

    def _norm(self, pieces: Tensor) -> Tensor:
        """Norm of the gradients of the whole model, from the norms of this rank's pieces."""
        return all_reduce(pieces.square().sum(), self._one_copy()).wait().sqrt()

    def _trained(self) -> list[Bucket]:
        return [b for b in self.buckets if b.optimizer is not None]

    def _one_copy(self) -> Group:
        """The ranks that hold one copy of the model together."""
        return self._mesh.group("pipeline", "data_shard", "context", "tensor")

    def sick(self, update: Update) -> tuple[str, ...]:
        """Names of parameters whose gradients of an update were not finite, on the first rank that
        has any. All ranks call it, and get the same."""
        norms = update.landed()[1].tolist()
        found = {
            name: None
            for (name, _), norm in zip(self._own_pieces, norms, strict=True)
            if not math.isfinite(norm)
        }
        group = self._one_copy()
        first = torch.tensor(group.index if found else group.size, device=self._mesh.device)
        first = all_reduce(first, group, "min").wait()
        text = ",".join(found).encode()[:_NAMES] if int(first) == group.index else b""
        names = torch.tensor([*text.ljust(_NAMES, b" ")], dtype=torch.int32)
        if not text:
            names.zero_()
        names = all_reduce(names.to(self._mesh.device), group).wait()
        return tuple(bytes(names.tolist()).decode(errors="replace").strip().split(","))
