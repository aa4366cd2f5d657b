"""Bucket: a flat span of parameters that are reduced, updated and gathered together.

It has three buffers: `weights` (in master precision), `grads` (sums, in master precision) and
`values` (what the model computes with). The ranks that have the same parameters hold each buffer
either whole or divided into equal parts, one per rank; the ZeRO stage determines which ones stay
whole. An update starts and ends with this rank's part: its sums of gradients, its weights. If
values are rounded from the weights, the weights may be in host memory. The device then computes
from them only in chunks, in the rule, which rounds each chunk while it is on the device.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megaframe.data_parallel.buffers import Buffers
from megaframe.data_parallel.gradient_reducer import Wire
from megaframe.data_parallel.partition import Division
from megaframe.data_parallel.reducer_choice import PLAIN, Wiring
from megaframe.distributed.collectives import Group, Pending, all_gather_, own_part
from megaframe.optim.rule import Rule, Step
from megaframe.optim.state_offload import STAYS, Route
from megaframe.parameters.initialization import fill_initial_values
from megaframe.parameters.parameter import Parameter, Precision
from megaframe.parameters.spec import Box, ParamSpec

_ALIGNMENT = 64
"""Bytes to which the start of each parameter is aligned."""
UNSENT = "unsent."
"""Prefix of the names of what compression carries over from step to step."""


@dataclass(frozen=True)
class Sharing:
    """The ranks that have the same parameters, and what they divide among them.

    shard: the ranks that together hold one copy. replicas: the ranks with the same part of other
    copies. stage: 0 divides nothing, 1 the weights in master precision and the optimizer state, 2
    also gradients, 3 also values. wiring: how gradients travel.
    """

    shard: Group
    replicas: Group
    stage: int
    wiring: Wiring = PLAIN

    @property
    def slow(self) -> Group:
        """The ranks with slow links between them: replicas if there are any, else shards."""
        return self.replicas if self.replicas.size > 1 else self.shard


class Bucket:
    """Parameters with everything that an update needs. rule: makes the optimizer of this rank's
    weights, None if they are frozen. route: brings what it keeps to the device. together: each
    parameter and each rank's part start at a multiple of this many elements. replica: the
    parameters are copies of those of another stage, which counts and saves them."""

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
        """Whether the weights are in host memory."""
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
        """The summed gradients of the weights that this rank updates."""
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
        """Whether a reduction still holds a lent buffer of whole gradients."""
        self._reduction: Iterator[Pending[Tensor]] | None = None
        self._pending: Pending[Tensor] | None = None
        self._arriving: Pending[Tensor] | None = None

    @property
    def own_sums(self) -> Tensor:
        """This rank's part of the sums; the parts of all ranks together have each element once."""
        return self.sums if self.sharing.stage else own_part(self.sums, self.sharing.shard)

    def initialise(self, seed: int) -> None:
        """Begin with the initial weights."""
        self.draw(seed)
        self.begin()

    def draw(self, seed: int) -> None:
        """Set the initial weights and nothing else."""
        for parameter, box, weights in self.pieces(self.weights, self.kept):
            fill_initial_values(weights, parameter.spec, box, seed)

    def begin(self) -> None:
        """Begin a run with the weights as they are."""
        if self.optimizer is not None:
            self.optimizer.start(self.weights)
        self.renew()

    def divided(self, boxes: Sequence[Box], index: int) -> Division:
        """Return how the bucket is divided on rank `index` of the shard group. boxes: that rank's
        boxes of the parameters."""
        ranks = self.sharing.shard.size
        return Division.of(boxes, self._step, ranks, index, divided=self.sharing.stage > 0)

    def pieces(self, flat: Tensor, span: slice) -> Iterator[tuple[Parameter, Box, Tensor]]:
        """Yield what `flat`, which holds `span` of the bucket, has of each parameter, in boxes."""
        for number, box, place in self.division.pieces(span):
            yield self.parameters[number], box, flat[place].view(box.shape)

    def tensors(self, *, owned: bool) -> Iterator[tuple[str, ParamSpec, Box, Tensor]]:
        """Yield what a checkpoint holds of this bucket, as key, spec, box and piece: all that this
        rank keeps or, if `owned`, only its part, which no other rank of its copy saves."""
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
        """Yield what compression on this rank carries over from step to step, flat, by names that
        no other rank, layout or compression has."""
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
        """Forget the gradients of the previous step."""
        self._summed = False
        for parameter in self.parameters:
            parameter.fresh = True

    def reduce(self, *, last: bool) -> None:
        """Start reducing what has been added to the gradients. last: the step adds no more to them,
        so they are summed over replicas as well."""
        self.wait()
        for parameter in self.parameters:
            parameter.finish()
        self._reduction = self._reduce(last)
        self.advance()

    def advance(self) -> bool:
        """Wait for the transfer in flight, and start the next one; return whether there was a next
        one. All ranks call it at the same points of a step, so that they start transfers in the
        same order."""
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
        if stage >= 2:  # what is added from now on belongs to the next reduction
            self._grads, self.lends = None, True
            for parameter in self.parameters:
                parameter.release_grad()
        yield from self._over_shard.sum_part(grads)
        if stage >= 2:
            self._keep(grads)
        if last and replicas.size > 1:
            yield from self._over_replicas.sum(self.own_sums)
        if stage == 0:
            yield from self._over_shard.spread(grads)

    def _wire(self, group: Group, span: slice) -> Wire:
        """Return the wire for sums of `span` over the group."""

        def views(flat: Tensor) -> list[Tensor]:
            return [piece for _, _, piece in self.pieces(flat, span)]

        slow = views if group is self.sharing.slow else None
        length, master = span.stop - span.start, self._precision.master
        return self.sharing.wiring.wire(group, length, master, self._buffers, slow)

    def _whole_grads(self) -> Tensor:
        """Return the gradients of the whole bucket, to which parameters add from the first call."""
        if self._grads is None:
            self._grads = grads = self._buffers.take(self.length, self._precision.master)
            end = 0
            for parameter, span in zip(self.parameters, self.division.spans, strict=True):
                grads[end : span.start].zero_()  # padding is summed too, and must not change a norm
                end = span.stop
                parameter.grad = grads[span].view(parameter.box.shape)
            grads[end:].zero_()
        return self._grads

    def _keep(self, grads: Tensor) -> None:
        """Add this rank's part to its sums, and give back the buffer."""
        own = own_part(grads, self.sharing.shard)
        if self._summed:
            self.sums.add_(own)
        else:
            self.sums.copy_(own)
        self._summed, self.lends = True, False
        self._buffers.give(grads)

    # Weights.

    def update(self, step: Step) -> Iterable[None]:
        """Update the weights; returns the work that remains, as `Rule.update` does."""
        if self.optimizer is None:
            return ()
        self._sent()
        return self.optimizer.update(self.weights, self.sums, step, self._rounded)

    def settle(self) -> None:
        """Return when weights and state are back where they are kept. Code other than the rule may
        then read them, or change them and call `renew`."""
        if self.optimizer is not None:
            self.optimizer.settle()

    def renew(self) -> None:
        """Do what `gather` does, after code other than the rule has changed the weights."""
        self._sent()
        if self._rounded is not None:
            self._rounded.copy_(self.weights)
        self.gather()

    def gather(self) -> None:
        """Start bringing updated weights to where the model computes; at stage 3 drop the values
        instead, which `fetch` then gets anew."""
        self.drop()
        if self._values is not None:
            self._bring(self._values)

    def fetch(self) -> None:
        """Start fetching the values, if they are not here."""
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
        """At stage 3, release the values until they are fetched again."""
        if self.sharing.stage < 3 or self._values is None:
            return
        self.take()
        self._buffers.give(self._values)
        self._values = None
        for parameter in self.parameters:
            parameter.release_value()

    def _sent(self) -> None:
        """Return when this rank's weights are no longer being sent."""
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
