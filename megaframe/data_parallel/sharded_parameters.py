"""ShardedParameters: where the values and gradients of a rank's stages are, under any ZeRO stage.

A stage asks for the values of a unit before it computes with them, and says when a microbatch has
added everything to a unit's gradients. Everything else happens here: when values are gathered and
released, and when a reduction starts and is waited for. What the sums are used for is up to the
optimizer. Which parameters share a bucket is decided in `bucket_layout.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from megaframe.architecture.model_blocks import count_kv_copies
from megaframe.config import ModelConfig, RunConfig
from megaframe.data_parallel.bucket import Bucket
from megaframe.data_parallel.bucket_layout import BucketingRule, BucketLayout, has_tables
from megaframe.data_parallel.buffers import BufferPool
from megaframe.data_parallel.reducer_config import ReducerConfig
from megaframe.data_parallel.small_batches import SmallBatchNorms
from megaframe.distributed.collectives import Group, all_reduce
from megaframe.distributed.mesh import Mesh, read_local_world_size
from megaframe.layout import Layout
from megaframe.ops.kernel_dispatch import NO_KERNELS, Kernels
from megaframe.parameters.parameter import PRECISIONS, Module, Parameter
from megaframe.schedule.zero_buffers import BLOCKS_PRESENT, REDUCTIONS_IN_FLIGHT


class ParameterSharding(Protocol):
    """What a stage needs of its parameters. Their values are on this rank between `gather` and
    `release`. A unit's second half has gradients of its own, which `reduce` gets separately.

    Attributes:
        gathers: Whether any values have to be gathered. If not, all are always here, and a stage
            need not ask for them.
    """

    gathers: bool

    def prefetch(self, unit: Module) -> None:
        """Start gathering the values of a unit, ahead of `gather`."""
        ...

    def gather(self, unit: Module, *, with_second_half: bool = True) -> None:
        """Return when a unit's values are here. If not `with_second_half`, those that only its
        second half uses are here only when `gather_second_half` returns."""
        ...

    def gather_second_half(self, second_half: Module) -> None:
        """Return when the values of the second half of a gathered unit are here."""
        ...

    def release(self, unit: Module) -> None:
        """Say that a unit's values are not used until they are gathered again."""
        ...

    def reduce(self, unit: Module, *, last: bool) -> None:
        """Reduce the gradients of the matrices that a unit, without its second half, or a second
        half owns, after a microbatch has added everything to them.

        Args:
            unit: The unit or second half.
            last: No later microbatch of the step adds to them.
        """
        ...

    def reduce_vectors(self, stage: int) -> None:
        """Reduce the gains and biases of a stage, after the last microbatch has left it."""
        ...


class NoSharding:
    """Parameters whose values are always on this rank, and whose gradients nobody reduces: for
    evaluation and generation."""

    gathers = False

    def prefetch(self, unit: Module) -> None: ...

    def gather(self, unit: Module, *, with_second_half: bool = True) -> None: ...

    def gather_second_half(self, second_half: Module) -> None: ...

    def release(self, unit: Module) -> None: ...

    def reduce(self, unit: Module, *, last: bool) -> None: ...

    def reduce_vectors(self, stage: int) -> None: ...


@dataclass(frozen=True)
class TiedEmbedding:
    """A table that two pipeline ranks, `ends`, have; its gradients are summed over these two."""

    parameter: Parameter
    ends: Group


class ShardedParameters:
    """The buckets for the units of this rank's stages, laid out by `BucketLayout`.

    Attributes:
        buckets: All buckets, in the order of stages and units; gains and biases come first in a
            stage.
        buffers: The memory of the buckets on the device.
        gathers: As in `ParameterSharding`.
        small_batches: Measures gradients before they are reduced; None if no step is to be.
    """

    def __init__(
        self,
        config: RunConfig,
        mesh: Mesh,
        stages: Mapping[int, Sequence[Module]],
        bucketing: BucketingRule,
        tied: TiedEmbedding | None = None,
        kernels: Kernels = NO_KERNELS,
    ) -> None:
        """Make the buckets and bind all parameters to them. All ranks of the world must call this.

        Args:
            config: The run.
            mesh: This rank's groups, with those of experts if the model has any.
            stages: The units of each stage, by its index, in the order of the forward pass.
            bucketing: What the optimizer requires of buckets.
            tied: The token embedding, if this rank and another one have it.
            kernels: Make values of weights that are kept as codes.
        """
        self._tied = tied
        self.buffers = BufferPool(mesh.device, mesh.allocate)
        if config.parallel.reduce_precision == "bf16":
            node_size = config.parallel.node_size or read_local_world_size()
            mesh.divide_exchanges(_list_reduction_axes(config.model, mesh.layout), node_size)
        precision = PRECISIONS[config.train.precision]
        self._layout = BucketLayout(
            config.parallel, precision, mesh, stages, bucketing, self.buffers, kernels
        )
        self.buckets = self._layout.buckets
        self.gathers = any(bucket.gathers for bucket in self.buckets)
        self._is_alone = all(bucket.is_alone for bucket in self.buckets)
        self._resident: list[Sequence[Bucket]] = []
        """Of blocks, the one gathered last and the one prefetched last, each as its buckets."""
        self._in_flight: dict[int, Sequence[Bucket]] = {}
        """Buckets whose reductions were started, the latest ones last."""
        # Tables have their own buckets, so both ends of a tied table have the same parts.
        self._tied_bucket = next(
            (b for b in self.trained if tied is not None and tied.parameter in b.parameters), None
        )
        self._gradients_divided = any(bucket.sharding.stage >= 2 for bucket in self.trained)
        self.small_batches: SmallBatchNorms | None = None
        if config.metrics.gradient_noise_every:
            bucket = self._tied_bucket
            self.small_batches = SmallBatchNorms(
                mesh,
                self.trained,
                [*_list_shard_axes(config.model, mesh.layout)],
                zero=config.parallel.zero,
                tied=None if tied is None or bucket is None else (bucket, tied.ends),
            )
        plain = ReducerConfig.from_parallel(config.parallel, compress=True).uncompressed
        # A plain all-reduce at stage 0 is one transfer and needs no `advance`.
        self._in_parts = config.parallel.zero >= 1 or mesh.layout.data_replicate > 1 or not plain
        """Whether a reduction takes several transfers, or holds a buffer until it is done."""

    @property
    def trained(self) -> list[Bucket]:
        """The buckets that are not frozen."""
        return [bucket for bucket in self.buckets if bucket.trained]

    def initialize_weights(self, seed: int) -> None:
        """Set the initial weights and nothing else; others may be loaded over them."""
        for bucket in self.buckets:
            bucket.initialize_weights(seed)

    def list_expert_loads(self) -> Iterator[tuple[str, Tensor, Tensor]]:
        """Yield for each router on this rank the name of its balance parameter, the load [E] of its
        experts in the last step over all ranks, and the parameter's value [E]."""
        for bucket in self.buckets:
            if bucket.trained and bucket.parameters[0].spec.role == "balance":
                loads = bucket.iterate_pieces(bucket.grad_sums, bucket.master_span)
                values = bucket.iterate_pieces(bucket.weights, bucket.master_span)
                for (parameter, _, load_E), (*_, value_E) in zip(loads, values, strict=True):
                    yield parameter.spec.name, load_E, value_E

    def list_compression_state(self) -> Iterator[tuple[str, Tensor]]:
        """Yield what gradient compression carries over from step to step; only the same rank of the
        same layout can use it."""
        for bucket in self.buckets:
            yield from bucket.list_compression_state()

    # Values.

    def prefetch(self, unit: Module) -> None:
        """Start gathering the values of a unit, if they are not here."""
        if buckets := self._layout.used_by[id(unit)]:
            self._prefetch(buckets)

    def gather(self, unit: Module, *, with_second_half: bool = True) -> None:
        """Return when a unit's values are here; if not `with_second_half`, those that only its
        second half uses may still be missing."""
        buckets = self._layout.used_by[id(unit)]
        if not buckets:
            return
        # The values of the second half arrive while the first half is computed.
        deferred: Sequence[Bucket] = ()
        if not with_second_half and unit.second_half is not None:
            deferred = self._layout.used_by[id(unit.second_half)]
        self._prefetch(buckets)
        for bucket in buckets:
            if bucket not in deferred:
                bucket.wait_for_values()

    def gather_second_half(self, second_half: Module) -> None:
        """Return when the values of the second half of a gathered unit are here."""
        for bucket in self._layout.used_by[id(second_half)]:
            bucket.wait_for_values()

    def release(self, unit: Module) -> None:
        """Say that a unit's values are not used until they are gathered again. Only tables are
        released at once; a block makes room for another one."""
        buckets = self._layout.used_by[id(unit)]
        # Tables are large and used once per pass, so they go at once. A block stays until another
        # one needs its space, because a backward pass begins with the block that ended the forward
        # pass.
        if has_tables(buckets):
            _release(buckets)

    def release_blocks(self) -> None:
        """Release the values of all blocks, before or after their weights change."""
        while self._resident:
            # Values that stayed are rounded from the old weights.
            _release(self._resident.pop())

    def wait_for_values(self) -> None:
        """Return when updated weights are where the model computes, and no values are here that are
        not always here. Other values may then be loaded over them."""
        self.release_blocks()
        for bucket in self.buckets:
            if bucket.keeps_values:
                bucket.wait_for_values()

    def _prefetch(self, buckets: Sequence[Bucket]) -> None:
        if not has_tables(buckets):
            # Lists are compared by identity: units that share buckets have the same list object.
            self._resident = [other for other in self._resident if other is not buckets]
            # The block prefetched longest ago gives its buffer to the new one.
            if len(self._resident) == BLOCKS_PRESENT:
                _release(self._resident.pop(0))
            self._resident.append(buckets)
        for bucket in buckets:
            bucket.prefetch()

    # Gradients.

    def start_step(self, *, measured: bool = False) -> None:
        """Forget the gradients of the previous step. measured: those of the small batches of this
        one are measured."""
        for bucket in self.buckets:
            bucket.start_step()
        if self.small_batches is not None:
            self.small_batches.start_step(measured=measured)

    def reduce(self, unit: Module, *, last: bool) -> None:
        """Reduce the gradients of the matrices that a unit, without its second half, or a second
        half owns. Only the `last` microbatch of the step starts the reduction or, if gradients are
        divided, each one does."""
        # At stages 2 and 3 a borrowed buffer holds one microbatch, so each one is reduced. Below,
        # microbatches add up in place and travel once.
        if last or self._gradients_divided:
            self._reduce(self._layout.completed_by[id(unit)], last)

    def reduce_vectors(self, stage: int) -> None:
        """Reduce the gains and biases of a stage, after the last microbatch has left it."""
        self._reduce(self._layout.vectors_of[stage], last=True)

    def wait_for_gradients(self) -> None:
        """Return when every reduction is done."""
        for buckets in self._in_flight.values():
            for bucket in buckets:
                bucket.wait()
        self._in_flight.clear()
        if self.small_batches is not None:
            self.small_batches.finish()
        # After the sums over data ranks: both ends of a tied table then get the same total, so that
        # their copies stay equal.
        if self._tied is not None and self._tied_bucket is not None:
            all_reduce(self._tied_bucket.grad_sums, self._tied.ends).wait()

    def _reduce(self, buckets: Sequence[Bucket], last: bool) -> None:
        if self._is_alone:
            for bucket in buckets:
                bucket.finish_gradients()
        elif buckets:
            self._start_reduction(buckets, last)

    def _start_reduction(self, buckets: Sequence[Bucket], last: bool) -> None:
        # Put back below as the latest one: `bucket.reduce` waits for its previous reduction itself.
        self._in_flight.pop(id(buckets), None)
        if self._in_parts:
            # The transfer started two reductions ago has had time to finish: start its next one.
            # Anything after that can wait for the end of the step, unless it holds a lent buffer.
            earlier = [*self._in_flight.values()]
            pairs = len(earlier) // REDUCTIONS_IN_FLIGHT
            for before in (REDUCTIONS_IN_FLIGHT, 2 * REDUCTIONS_IN_FLIGHT)[:pairs]:
                for bucket in earlier[-before]:
                    if before == REDUCTIONS_IN_FLIGHT or bucket.holds_full_grads:
                        bucket.advance()
        for bucket in buckets:
            if last or bucket.sharding.stage >= 2:
                bucket.reduce(last=last)
        self._in_flight[id(buckets)] = buckets


def _list_reduction_axes(model: ModelConfig, layout: Layout) -> Iterator[tuple[str, ...]]:
    """Yield the axis sets over which gradients may be summed, the same on all ranks."""
    yield from _list_shard_axes(model, layout)
    yield ("data_replicate",)


def _list_shard_axes(model: ModelConfig, layout: Layout) -> Iterator[tuple[str, ...]]:
    """Yield those of the ranks that hold one copy."""
    # Groups are made collectively, so all ranks list the same sets in the same order.
    yield ("data_shard", "context")
    if layout.tensor > 1:
        yield ("data_shard", "context", "tensor")
    if count_kv_copies(model, layout.tensor) > 1:
        yield ("data_shard", "context", "tensor_copies")
    if model.moe is not None:
        yield ("expert_shard",)


def _release(buckets: Sequence[Bucket]) -> None:
    for bucket in buckets:
        bucket.release()
