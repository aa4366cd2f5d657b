"""Bucket: a flat span of parameters that are reduced, updated and gathered together.

It has three buffers: `weights` (in master precision), `grads` (sums, in master precision) and
`values` (what the model computes with). The ranks that have the same parameters hold each buffer
either whole or divided into equal parts, one per rank; the ZeRO stage determines which ones stay
whole. An update starts and ends with this rank's part: its sums of gradients, its weights. If
values are rounded from the weights, the weights may be in host memory. The device then computes
from them only in chunks, in the optimizer, which rounds each chunk while it is on the device.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megaframe.architecture.spec import Box
from megaframe.data_parallel.buffers import BufferPool
from megaframe.data_parallel.gradient_reducer import GradientReducer
from megaframe.data_parallel.partition import BucketPartition
from megaframe.data_parallel.reducer_config import UNCOMPRESSED, ReducerConfig
from megaframe.distributed.collectives import Group, Pending, all_gather_, get_own_part
from megaframe.parameters.initialization import fill_initial_values
from megaframe.parameters.parameter import Parameter, Precision

_ALIGNMENT = 64
"""Bytes to which the start of each parameter is aligned."""
COMPRESSION_PREFIX = "unsent."
"""Prefix of the names of what gradient compression carries over from step to step."""


@dataclass(frozen=True)
class BucketSharding:
    """The ranks that have the same parameters, and what they divide among them.

    Attributes:
        shard: The ranks that together hold one copy.
        replicas: The ranks with the same part of other copies.
        stage: ZeRO stage (Rajbhandari et al. 2020). 0 divides nothing, 1 the weights in master
            precision and the optimizer state, 2 also gradients, 3 also values.
        reducer: How gradients travel.
    """

    shard: Group
    replicas: Group
    stage: int
    reducer: ReducerConfig = UNCOMPRESSED

    @property
    def slow_group(self) -> Group:
        """The ranks with slow links between them: replicas if there are any, else shards."""
        return self.replicas if self.replicas.size > 1 else self.shard

    @property
    def is_alone(self) -> bool:
        """Whether no other rank has these parameters, so that nothing travels."""
        return self.shard.size == self.replicas.size == 1

    @property
    def gathers(self) -> bool:
        """Whether values come from other ranks."""
        return self.stage > 0 and self.shard.size > 1


class Bucket:
    """Parameters with their weights, gradients and values.

    Attributes:
        weights: Master weights of `master_span`, flat, on the device or in host memory.
        grad_sums: The summed gradients of the weights that this rank updates, flat.
        rounded: Weights of `master_span` in the precision of the computation, which an update
            writes; None if that is the master precision.
        owned_span: The part of the bucket that no other rank of the same copy has.
        master_span: The part of the bucket whose master weights this rank has.
        offloaded: Whether the master weights are in host memory.
        is_alone: Whether no other rank has these parameters, so that nothing travels.
        gathers: Whether values have to be gathered: from other ranks, or from codes. If not, they
            are always here.
        keeps_values: Whether they stay for the whole run once they are here.
        holds_full_grads: Whether a reduction still holds a borrowed buffer of whole gradients.
        before_reduction: Called with the gradients of the whole bucket before each reduction, which
            it must not change; None for nothing.
    """

    def __init__(
        self,
        parameters: Sequence[Parameter],
        boxes: Sequence[Box],
        precision: Precision,
        sharding: BucketSharding,
        buffers: BufferPool,
        *,
        trained: bool = True,
        allocate_host: Callable[[int, torch.dtype], Tensor] | None = None,
        alignment: int = 1,
        replica: bool = False,
    ) -> None:
        """Allocate the buffers and bind the parameters to them.

        Args:
            parameters: Trained alike and summed over the same ranks.
            boxes: What this rank has of each parameter.
            precision: Types of values and of weights.
            sharding: The ranks that share the bucket.
            buffers: Lends all memory on the device.
            trained: False if the parameters are frozen: there are no gradients then.
            allocate_host: Returns zeros in host memory, by length and type, for master weights
                that differ from the values; None keeps them on the device.
            alignment: Each parameter and each rank's part start at a multiple of this many
                elements.
            replica: The parameters are copies of those of another stage, which counts and saves
                them.
        """
        self.parameters, self.sharding, self.replica = tuple(parameters), sharding, replica
        self.trained, self.is_alone, self.gathers = trained, sharding.is_alone, sharding.gathers
        self.keeps_values = sharding.stage < 3
        self._precision, self._buffers, self.device = precision, buffers, buffers.device
        # Both bounds hold: 64 bytes, and the elements that the optimizer asks for.
        self._alignment = math.lcm(_ALIGNMENT // precision.compute.itemsize, alignment)
        self.partition = self.partition_of(boxes, sharding.shard.index)
        self.length, self.owned_span = self.partition.length, self.partition.owned_span
        self.master_span = self.partition.master_span
        self._allocate_weights(allocate_host)
        self._bind_parameters(boxes)
        # Replicas sum only what this rank owns after the sum over the shard group.
        self._over_shard = self._over_replicas = GradientReducer(sharding.shard)
        if trained:
            self._over_shard = self._make_reducer(sharding.shard, slice(0, self.length))
            self._over_replicas = self._make_reducer(sharding.replicas, self.owned_span)
        # Whether `grad_sums` holds gradients of this step; if not, the first sum overwrites it.
        self._summed = False
        self.holds_full_grads = False
        self.before_reduction: Callable[[Tensor], None] | None = None
        self._reduction: Iterator[Pending[Tensor]] | None = None
        self._transfer: Pending[Tensor] | None = None
        self._gathering: Pending[Tensor] | None = None

    def _allocate_weights(self, allocate_host: Callable[[int, torch.dtype], Tensor] | None) -> None:
        """Allocate the values and this rank's master weights, which may be the same memory."""
        precision, buffers = self._precision, self._buffers
        self._values: Tensor | None = None
        # Below stage 3 values stay for the whole run; at stage 3 `prefetch` borrows them.
        if self.keeps_values:
            self._values = buffers.borrow(self.length, precision.compute)
        count = self.master_span.stop - self.master_span.start
        mixed = precision.compute != precision.master
        self.offloaded = mixed and allocate_host is not None
        self.rounded: Tensor | None = None
        if self.offloaded and allocate_host is not None:
            self.weights = allocate_host(count, precision.master)
        elif mixed or self._values is None:
            # Separate master weights: a mixed precision rounds from them, and at stage 3 the values
            # go back to the pool.
            self.weights = buffers.borrow(count, precision.master)
        else:
            # In one precision the weights are this rank's part of the values themselves.
            self.weights = self._values[self.master_span]
        if mixed and self._values is not None:
            # An update writes its rounded weights straight into this rank's part of the values.
            self.rounded = self._values[self.master_span]
        elif self.offloaded:
            # At stage 3 there are no values to write into. The device keeps its rounded part, so
            # that a gather needs no copy from the host.
            self.rounded = buffers.borrow(count, precision.compute)

    def _bind_parameters(self, boxes: Sequence[Box]) -> None:
        """Bind the parameters to the values, and allocate the sums of their gradients."""
        self._grads: Tensor | None = None
        # At stages 2 and 3 the buffer of whole gradients is borrowed by the first addition.
        allocate_grads = self._borrow_full_grads if self.trained else None
        for parameter, box in zip(self.parameters, boxes, strict=True):
            parameter.bind(box, allocate_grads)
        if self._values is not None:
            self._bind_values(self._values)
        self.grad_sums = torch.empty(0, dtype=self._precision.master, device=self.device)
        if self.trained and self.sharding.stage < 2:
            # Below stage 2 the sums are a view of the buffer into which gradients are added.
            self.grad_sums = self._borrow_full_grads()[self.master_span]
        elif self.trained:
            count = self.owned_span.stop - self.owned_span.start
            self.grad_sums = self._buffers.borrow(count, self._precision.master)

    @property
    def stored(self) -> Tensor:
        """This rank's master weights as they are kept."""
        return self.weights

    @property
    def owned_grad_sums(self) -> Tensor:
        """This rank's part of the sums; the parts of all ranks together have each element once."""
        if self.sharding.stage:
            return self.grad_sums
        # At stage 0 all ranks hold the whole sum, but each still owns a part of it.
        return get_own_part(self.grad_sums, self.sharding.shard)

    @property
    def owned_weights(self) -> Tensor:
        """This rank's part of the weights, which no other rank of the same copy saves."""
        return (
            self.weights if self.sharding.stage else get_own_part(self.weights, self.sharding.shard)
        )

    def initialize_weights(self, seed: int) -> None:
        """Set the initial weights and nothing else; `publish_weights` makes them values."""
        for parameter, box, weights in self.iterate_pieces(self.weights, self.master_span):
            fill_initial_values(weights, parameter.spec, box, seed)

    def partition_of(self, boxes: Sequence[Box], index: int) -> BucketPartition:
        """Return how the bucket is divided on rank `index` of the shard group, which has these
        boxes of the parameters."""
        ranks = self.sharding.shard.size
        divided = self.sharding.stage > 0
        return BucketPartition.divide(boxes, self._alignment, ranks, index, divided=divided)

    def iterate_pieces(self, flat: Tensor, span: slice) -> Iterator[tuple[Parameter, Box, Tensor]]:
        """Yield what `flat`, which holds `span` of the bucket, has of each parameter, in boxes."""
        for number, box, place in self.partition.iterate_pieces(span):
            yield self.parameters[number], box, flat[place].view(box.shape)

    def list_compression_state(self) -> Iterator[tuple[str, Tensor]]:
        """Yield what compression on this rank carries over from step to step, flat, by names that
        no other rank, layout or compression has."""
        sharding = self.sharding
        places = [
            (p.spec.name, p.box.offset, p.box.shape, start)
            for p, start in zip(self.parameters, self.partition.starts, strict=True)
        ]
        groups = [(group.ranks, group.index) for group in (sharding.shard, sharding.replicas)]
        # Checkpoints contain a hash of exactly this text.
        text = f"({groups}, {sharding.stage}, {sharding.reducer.fingerprint}, "
        text += f"{self.length}, {places})"
        digest = hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
        for reducer in (self._over_shard, self._over_replicas):
            for name, tensor in reducer.state.items():
                yield f"{COMPRESSION_PREFIX}{digest}.{name}", tensor

    # Gradients.

    def start_step(self) -> None:
        """Forget the gradients of the previous step."""
        self._summed = False
        for parameter in self.parameters:
            # The first addition overwrites, so no buffer is cleared.
            parameter.fresh = True

    def reduce(self, *, last: bool) -> None:
        """Start reducing what has been added to the gradients.

        Args:
            last: The step adds no more to them, so they are summed over replicas as well.
        """
        # The previous reduction of this bucket uses the same sums and residuals.
        self.wait()
        self.finish_gradients()
        if self.before_reduction is not None:
            self.before_reduction(self._borrow_full_grads())
        self._reduction = self._start_transfers(last)
        self.advance()

    def finish_gradients(self) -> None:
        """Make all gradients valid sums. Where no other rank has them, that is all of a
        reduction."""
        for parameter in self.parameters:
            # What nothing was added to still has the content of an earlier step or borrower.
            if parameter.fresh or parameter.missing:
                parameter.finish()

    def advance(self) -> bool:
        """Wait for the transfer in flight, and start the next one; return whether there was a next
        one."""
        if self._transfer is not None:
            self._transfer.wait()
        if self._reduction is None:
            return False
        # The generator handles what has arrived and starts its next transfer. All ranks are at the
        # same point of the step here, so they start transfers in the same order.
        self._transfer = next(self._reduction, None)
        if self._transfer is None:
            self._reduction = None
        return self._transfer is not None

    def wait(self) -> None:
        """Return when every transfer of gradients is done."""
        while self.advance():
            pass

    def _start_transfers(self, last: bool) -> Iterator[Pending[Tensor]]:
        """Start the transfers of a reduction one by one; each is done before the next is asked
        for."""
        replicas, stage = self.sharding.replicas, self.sharding.stage
        grads = self._borrow_full_grads()
        # Everything stays whole and is summed at once: a single all-reduce.
        if stage == 0 and replicas.size == 1:
            yield from self._over_shard.sum(grads)
            return
        if stage >= 2:  # what is added from now on belongs to the next reduction
            self._grads, self.holds_full_grads = None, True
            for parameter in self.parameters:
                parameter.release_grad()
        yield from self._over_shard.sum_part(grads)
        if stage >= 2:
            self._accumulate(grads)
        # Slow links carry only this rank's part, and only once per step.
        if last and replicas.size > 1:
            yield from self._over_replicas.sum(self.owned_grad_sums)
        # Weights are updated whole on each rank, so each needs all sums.
        if stage == 0:
            yield from self._over_shard.spread(grads)

    def _make_reducer(self, group: Group, span: slice) -> GradientReducer:
        """Return the reducer of `span` over the group."""

        def split_views(flat: Tensor) -> list[Tensor]:
            return [piece for _, _, piece in self.iterate_pieces(flat, span)]

        slow_views = split_views if group is self.sharding.slow_group else None
        length, master = span.stop - span.start, self._precision.master
        return self.sharding.reducer.build(group, length, master, self._buffers, slow_views)

    def _borrow_full_grads(self) -> Tensor:
        """Return the gradients of the whole bucket, to which parameters add from the first call."""
        if self._grads is None:
            self._grads = grads = self._buffers.borrow(self.length, self._precision.master)
            end = 0
            for parameter, span in zip(self.parameters, self.partition.spans, strict=True):
                grads[end : span.start].zero_()  # padding is summed too, and must not change a norm
                end = span.stop
                parameter.grad = grads[span].view(parameter.box.shape)
            grads[end:].zero_()
        return self._grads

    def _accumulate(self, grads: Tensor) -> None:
        """Add this rank's part to its sums, and give the buffer back."""
        # Microbatches are added up in master precision, one after the other.
        own_part = get_own_part(grads, self.sharding.shard)
        if self._summed:
            self.grad_sums.add_(own_part)
        else:
            self.grad_sums.copy_(own_part)
        self._summed, self.holds_full_grads = True, False
        # The other parts of the buffer are undefined after the sum, and the sums are copied out of
        # it.
        self._buffers.give_back(grads)

    # Values.

    def open_weights(self) -> None:
        """Make `weights` the master weights, until `publish_weights` or `close_weights`. They
        always are, unless they are kept as codes."""

    def close_weights(self) -> None:
        """Forget changes of `weights` if they are kept as codes."""

    def publish_weights(self) -> None:
        """Bring weights to where the model computes after code other than the optimizer has changed
        them: round them, then `gather`."""
        self.wait_for_gather()
        if self.rounded is not None:
            # The only rounding: gathers send these bits, so all ranks compute with the same values.
            self.rounded.copy_(self.weights)
        self.gather()

    def spread_owned_weights(self) -> None:
        """Bring this rank's part of the weights, which code other than the optimizer has changed,
        to all ranks that have it, and publish them."""
        shard = self.sharding.shard
        if self.sharding.stage == 0 and shard.size > 1:
            whole = self.weights.to(self.device)
            all_gather_(whole, shard).wait()
            if self.offloaded:
                self.weights.copy_(whole)
        self.publish_weights()

    def gather(self) -> None:
        """Start bringing updated weights to where the model computes; at stage 3 release the values
        instead, which `prefetch` then gets anew."""
        self.release()
        if self._values is not None and self.gathers:
            self._start_gather(self._values)

    def prefetch(self) -> None:
        """Start gathering the values, if they are not on this rank."""
        if self._values is None:
            self._values = self._buffers.borrow(self.length, self._precision.compute)
            self._bind_values(self._values)
            self._start_gather(self._values)

    def wait_for_values(self) -> None:
        """Return when the values are on this rank."""
        self.prefetch()
        self.wait_for_gather()

    def wait_for_gather(self) -> None:
        """Return when no gather is in flight: this rank's weights may then be overwritten."""
        if self._gathering is not None:
            self._gathering.wait()
            self._gathering = None

    def release(self) -> None:
        """At stage 3, release the values until they are fetched again."""
        if self.keeps_values or self._values is None:
            return
        # The buffer goes back to the pool, so nothing may still be arriving in it.
        self.wait_for_gather()
        self._buffers.give_back(self._values)
        self._values = None
        for parameter in self.parameters:
            parameter.release_value()

    def _bind_values(self, values: Tensor) -> None:
        for parameter, span in zip(self.parameters, self.partition.spans, strict=True):
            parameter.value = values[span].view(parameter.box.shape)

    def _start_gather(self, values: Tensor) -> None:
        own_part = values[self.master_span]
        source = self.weights if self.rounded is None else self.rounded
        # Below stage 3 both are the same memory, which the update has written.
        if own_part.data_ptr() != source.data_ptr():
            own_part.copy_(source)
        self._gathering = all_gather_(values, self.sharding.shard)
