"""Bucket: a flat span of parameters that are reduced, updated and gathered together.

It has three buffers: `weights` (in master precision), `grads` (sums, in master precision) and
`values` (what the model computes with). Of each, the ranks that have the same parameters hold
either all or an equal part, their own; the ZeRO stage is which of them stay whole. An update starts
and ends with this rank's part: its sum of gradients, its weights. Weights that values are rounded
from may lie in the host's memory: then nothing on the device is computed from them but in chunks,
by the rule, which rounds each while it is there.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megaframe.comm import Group, Pending
from megaframe.comm.flat import all_gather_, part
from megaframe.init import fill
from megaframe.optim.buffers import Buffers
from megaframe.optim.division import Division
from megaframe.optim.route import STAYS, Route
from megaframe.optim.rule import Rule, Step
from megaframe.optim.wire import Wire
from megaframe.optim.wiring import PLAIN, Wiring
from megaframe.parameter import Parameter, Precision
from megaframe.spec import Box, ParamSpec

_ALIGNMENT = 64
"""Bytes on which each parameter starts."""
UNSENT = "unsent."
"""How the names of what compression hands on from step to step begin."""


@dataclass(frozen=True)
class Sharing:
    """The ranks that have the same parameters, and what they divide among them.

    shard: those that hold one copy together. replicas: those with the same part of other copies.
    stage: 0 divides nothing, 1 the weights in master precision and the optimizer's state, 2 also
    gradients, 3 also values. wiring: how gradients travel.
    """

    shard: Group
    replicas: Group
    stage: int
    wiring: Wiring = PLAIN

    @property
    def slow(self) -> Group:
        """The ranks between which links are slow: replicas, where there are any."""
        return self.replicas if self.replicas.size > 1 else self.shard


class Bucket:
    """Parameters with everything that an update needs. rule: makes the optimizer of this rank's
    weights, None where they are frozen. route: by which it comes to what it keeps. together: each
    parameter and each rank's part starts at a multiple of so many elements. replica: the parameters
    are those of another stage, which speaks for them."""

    def __init__(
        self,
        parameters: Sequence[Parameter],
        boxes: Sequence[Box],
        precision: Precision,
        sharing: Sharing,
        buffers: Buffers,
        rule: Callable[[Bucket], Rule] | None,
        *,
        route: Route = STAYS,
        together: int = 1,
        replica: bool = False,
    ) -> None:
        self.parameters, self.sharing, self.replica = tuple(parameters), sharing, replica
        self._precision, self._buffers, self.device = precision, buffers, buffers.device
        self._step = math.lcm(_ALIGNMENT // precision.compute.itemsize, together)
        self.division = self.divided(boxes, sharing.shard.index)
        self.length, self.own = self.division.length, self.division.own
        self.kept = self.division.kept
        self._values: Tensor | None = None
        self._grads: Tensor | None = None
        if sharing.stage < 3:
            self._values = buffers.take(self.length, precision.compute)
        count, mixed = self.kept.stop - self.kept.start, precision.compute != precision.master
        self.away = mixed and route.device is not None
        """Whether weights lie in the host's memory."""
        self._rounded: Tensor | None = None
        if self.away:
            (self.weights,) = route.keep((torch.zeros(count, dtype=precision.master),))
        elif mixed or self._values is None:
            self.weights = buffers.take(count, precision.master)
        else:
            self.weights = self._values[self.kept]
        if mixed and self._values is not None:
            self._rounded = self._values[self.kept]
        elif self.away:
            self._rounded = buffers.take(count, precision.compute)
        place = None if rule is None else self._whole_grads
        for parameter, box in zip(parameters, boxes, strict=True):
            parameter.bind(box, place)
        if self._values is not None:
            self._show(self._values)
        self.optimizer = None if rule is None else rule(self)
        self.sums = self.weights[:0]
        """This rank's sum of gradients, of what it updates."""
        if rule is not None and sharing.stage < 2:
            self.sums = self._whole_grads()[self.kept]
        elif rule is not None:
            self.sums = buffers.take(self.own.stop - self.own.start, precision.master)
        self._over_shard = self._over_replicas = Wire(sharing.shard)
        if rule is not None:
            self._over_shard = self._wire(sharing.shard, slice(0, self.length))
            self._over_replicas = self._wire(sharing.replicas, self.own)
        self._summed = False
        self.lends = False
        """Whether a reduction needs a buffer of whole gradients until it is further."""
        self._reduction: Iterator[Pending[Tensor]] | None = None
        self._pending: Pending[Tensor] | None = None
        self._arriving: Pending[Tensor] | None = None

    @property
    def own_sums(self) -> Tensor:
        """This rank's part of the sums: all ranks' parts together have each element once."""
        return self.sums if self.sharing.stage else part(self.sums, self.sharing.shard)

    def initialise(self, seed: int) -> None:
        """Begin with the initial weights."""
        self.draw(seed)
        self.begin()

    def draw(self, seed: int) -> None:
        """Set the initial weights, and no more."""
        for parameter, box, weights in self.pieces(self.weights, self.kept):
            fill(weights, parameter.spec, box, seed)

    def begin(self) -> None:
        """Take the weights as they are for those that a run begins with."""
        if self.optimizer is not None:
            self.optimizer.start(self.weights)
        self.renew()

    def divided(self, boxes: Sequence[Box], index: int) -> Division:
        """How it lies on the rank of this index among those that share it, which has these boxes
        of the parameters."""
        ranks = self.sharing.shard.size
        return Division.of(boxes, self._step, ranks, index, divided=self.sharing.stage > 0)

    def pieces(self, flat: Tensor, span: slice) -> Iterator[tuple[Parameter, Box, Tensor]]:
        """What `flat`, which holds `span` of the bucket, has of each parameter, in boxes."""
        for number, box, place in self.division.pieces(span):
            yield self.parameters[number], box, flat[place].view(box.shape)

    def tensors(self, *, owned: bool) -> Iterator[tuple[str, ParamSpec, Box, Tensor]]:
        """What a checkpoint has of this bucket, as key, spec, box and piece: all that this rank
        keeps, or, `owned`, its part, which no other rank of its copy speaks for."""
        if self.replica and owned:
            return
        span = self.own if owned else self.kept
        state = {} if self.optimizer is None else self.optimizer.shown(to_load=not owned)
        for prefix, kept in (("", self.weights), *state.items()):
            flat = kept[span.start - self.kept.start : span.stop - self.kept.start]
            for parameter, box, piece in self.pieces(flat, span):
                name = parameter.spec.name
                key = f"optimizer.{prefix}/{name}" if prefix else name
                yield key, parameter.spec, box, piece

    def unsent(self) -> Iterator[tuple[str, Tensor]]:
        """What compression on this rank has to hand on from step to step, flat, by a name that no
        other rank, layout or compression has."""
        sharing = self.sharing
        place = [
            (p.spec.name, p.box.offset, p.box.shape, start)
            for p, start in zip(self.parameters, self.division.starts, strict=True)
        ]
        groups = [(group.ranks, group.index) for group in (sharing.shard, sharing.replicas)]
        text = repr((groups, sharing.stage, sharing.wiring, self.length, place))
        digest = hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
        for wire in (self._over_shard, self._over_replicas):
            for name, tensor in wire.state.items():
                yield f"{UNSENT}{digest}.{name}", tensor

    # Gradients.

    def start_step(self) -> None:
        """Forget the gradients."""
        self._summed = False
        for parameter in self.parameters:
            parameter.fresh = True

    def reduce(self, *, last: bool) -> None:
        """Start summing what has been added to the gradients over the ranks; with `last` the step
        adds no more, and replicas are summed as well."""
        self.wait()
        for parameter in self.parameters:
            parameter.finish()
        self._reduction = self._reduce(last)
        self.advance()

    def advance(self) -> bool:
        """Wait for the transfer under way, and start the next one; whether there was one. All ranks
        call it at the same points of a step, so that all start transfers in the same order."""
        if self._pending is not None:
            self._pending.wait()
        if self._reduction is None:
            return False
        self._pending = next(self._reduction, None)
        if self._pending is None:
            self._reduction = None
        return self._pending is not None

    def wait(self) -> None:
        """Return when every transfer of gradients is done."""
        while self.advance():
            pass

    def _reduce(self, last: bool) -> Iterator[Pending[Tensor]]:
        replicas, stage = self.sharing.replicas, self.sharing.stage
        grads = self._whole_grads()
        if stage == 0 and replicas.size == 1:
            yield from self._over_shard.sum(grads)
            return
        if stage >= 2:  # what is added from now on is of the next reduction
            self._grads, self.lends = None, True
            for parameter in self.parameters:
                parameter.let_go_of_grad()
        yield from self._over_shard.sum_part(grads)
        if stage >= 2:
            self._keep(grads)
        if last and replicas.size > 1:
            yield from self._over_replicas.sum(self.own_sums)
        if stage == 0:
            yield from self._over_shard.spread(grads)

    def _wire(self, group: Group, span: slice) -> Wire:
        """That for sums of `span` over the group."""

        def views(flat: Tensor) -> list[Tensor]:
            return [piece for _, _, piece in self.pieces(flat, span)]

        slow = views if group is self.sharing.slow else None
        length, master = span.stop - span.start, self._precision.master
        return self.sharing.wiring.wire(group, length, master, self._buffers, slow)

    def _whole_grads(self) -> Tensor:
        """Gradients of the whole bucket; parameters add to them from the first call on."""
        if self._grads is None:
            self._grads = grads = self._buffers.take(self.length, self._precision.master)
            end = 0
            for parameter, span in zip(self.parameters, self.division.spans, strict=True):
                grads[end : span.start].zero_()  # padding is summed, and must change no norm
                end = span.stop
                parameter.grad = grads[span].view(parameter.box.shape)
            grads[end:].zero_()
        return self._grads

    def _keep(self, grads: Tensor) -> None:
        """Add this rank's part to its sums, and let the buffer go."""
        own = part(grads, self.sharing.shard)
        if self._summed:
            self.sums.add_(own)
        else:
            self.sums.copy_(own)
        self._summed, self.lends = True, False
        self._buffers.give(grads)

    # Weights.

    def update(self, step: Step) -> Iterable[None]:
        """Update the weights; what remains to be done is that of `Rule.update`."""
        if self.optimizer is None:
            return ()
        self._sent()
        return self.optimizer.update(self.weights, self.sums, step, self._rounded)

    def settle(self) -> None:
        """Return when weights and state are where they are kept: others than the rule may read
        them, and change them before `renew`."""
        if self.optimizer is not None:
            self.optimizer.settle()

    def renew(self) -> None:
        """As `gather`, of weights that others than the rule have changed."""
        self._sent()
        if self._rounded is not None:
            self._rounded.copy_(self.weights)
        self.gather()

    def gather(self) -> None:
        """Start bringing updated weights to where the model computes; with stage 3, forget the
        values, which `fetch` brings anew."""
        self.drop()
        if self._values is not None:
            self._bring(self._values)

    def fetch(self) -> None:
        """Start bringing the values, where they are not here."""
        if self._values is None:
            self._values = self._buffers.take(self.length, self._precision.compute)
            self._show(self._values)
            self._bring(self._values)

    def take(self) -> None:
        """Return when the values are here."""
        self.fetch()
        if self._arriving is not None:
            self._arriving.wait()
            self._arriving = None

    def drop(self) -> None:
        """With stage 3, let the values go until they are fetched again."""
        if self.sharing.stage < 3 or self._values is None:
            return
        self.take()
        self._buffers.give(self._values)
        self._values = None
        for parameter in self.parameters:
            parameter.let_go_of_value()

    def _sent(self) -> None:
        """Return when this rank's weights are not being sent any more."""
        if self._arriving is not None:
            self.take()

    def _show(self, values: Tensor) -> None:
        for parameter, span in zip(self.parameters, self.division.spans, strict=True):
            parameter.value = values[span].view(parameter.box.shape)

    def _bring(self, values: Tensor) -> None:
        mine = values[self.kept]
        source = self.weights if self._rounded is None else self._rounded
        if mine.data_ptr() != source.data_ptr():
            mine.copy_(source)
        if self.sharing.stage:
            self._arriving = all_gather_(values, self.sharing.shard)
