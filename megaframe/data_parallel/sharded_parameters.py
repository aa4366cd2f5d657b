"""ShardedParameters: where the values and gradients of a rank's stages are, under any ZeRO stage.

A stage asks for the values of a unit before it computes with them, and says when a microbatch has
added everything to a unit's gradients. Everything else happens here: which parameters share a
bucket, when values are gathered and released, and when a reduction starts and is waited for. What
the sums are used for is up to the optimizer.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from megaframe.architecture.buckets import group_blocks_into_buckets
from megaframe.architecture.spec import ParamSpec, copies_of
from megaframe.config import RunConfig
from megaframe.data_parallel.bucket import Bucket, BucketSharding
from megaframe.data_parallel.buffers import BufferPool
from megaframe.data_parallel.reducer_config import UNCOMPRESSED, ReducerConfig
from megaframe.distributed.collectives import Group, all_reduce
from megaframe.distributed.mesh import Mesh, read_local_world_size
from megaframe.parameters.parameter import PRECISIONS, Module, Parameter, Precision
from megaframe.schedule.zero_buffers import BLOCKS_PRESENT, REDUCTIONS_IN_FLIGHT

_TABLES = ("embedding", "head")
"""Roles of parameters that are used only at one end of the model."""
_VECTORS = ("gain", "bias", "balance")
"""Roles of parameters that are so small that ranks keep their values whole at any ZeRO stage."""
_SHARDS = {"data": "data_shard", "expert_data": "expert_shard"}
"""For an axis, the name of its ranks within one copy of the state."""


class ParameterSharding(Protocol):
    """What a stage needs of its parameters. Their values are on this rank between `gather` and
    `release`. A unit's second half has gradients of its own, which `reduce` gets separately."""

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

    def prefetch(self, unit: Module) -> None: ...

    def gather(self, unit: Module, *, with_second_half: bool = True) -> None: ...

    def gather_second_half(self, second_half: Module) -> None: ...

    def release(self, unit: Module) -> None: ...

    def reduce(self, unit: Module, *, last: bool) -> None: ...

    def reduce_vectors(self, stage: int) -> None: ...


@dataclass(frozen=True)
class BucketingRule:
    """What the optimizer requires of buckets.

    Attributes:
        group_of: Returns what parameters of one bucket must have in common.
        is_trained: Returns False for frozen parameters.
        alignment: Each parameter and each rank's part start at a multiple of this many elements.
        allocate_host: Allocates master weights in host memory; None if they stay on the device.
    """

    group_of: Callable[[ParamSpec], Hashable]
    is_trained: Callable[[ParamSpec], bool]
    alignment: int = 1
    allocate_host: Callable[[int, torch.dtype], Tensor] | None = None


@dataclass(frozen=True)
class TiedEmbedding:
    """A table that two pipeline ranks, `ends`, have; its gradients are summed over these two."""

    parameter: Parameter
    ends: Group


class ShardedParameters:
    """The buckets for the units of this rank's stages.

    Parameters that are trained alike share a bucket, but there are separate ones for the matrices
    of a unit's second half and for its other matrices, or for those of a few blocks
    (`parallel.bucket_size`), for each table (which two units or two ranks may share), and for the
    gains and biases of a stage.

    Attributes:
        buckets: All buckets, in the order of stages and units; gains and biases come first in a
            stage.
        buffers: The memory of the buckets on the device.
    """

    def __init__(
        self,
        config: RunConfig,
        mesh: Mesh,
        stages: Mapping[int, Sequence[Module]],
        bucketing: BucketingRule,
        tied: TiedEmbedding | None = None,
    ) -> None:
        """Make the buckets and bind all parameters to them. All ranks of the world must call this.

        Args:
            config: The run.
            mesh: This rank's groups, with those of experts if the model has any.
            stages: The units of each stage, by its number, in the order of the forward pass.
            bucketing: What the optimizer requires of buckets.
            tied: The token embedding, if this rank and another one have it.
        """
        self._config, self._mesh, self._bucketing, self._tied = config, mesh, bucketing, tied
        self.buffers = BufferPool(mesh.device, mesh.allocate)
        if config.parallel.reduce_precision == "bf16":
            node_size = config.parallel.node_size or read_local_world_size()
            mesh.divide_exchanges(self._summing_axes(), node_size)
        self._owned: dict[int, list[Bucket]] = {}
        """For each unit and second half, the trained buckets whose gradients it completes."""
        self._used: dict[int, list[Bucket]] = {}
        """For each unit and second half, the buckets whose values it computes with. Units that
        share buckets have the same list, which stands for them in `_resident`."""
        self._vectors: dict[int, list[Bucket]] = {}
        """For each stage, the trained buckets of its gains and biases."""
        self._resident: list[Sequence[Bucket]] = []
        """Of blocks, the one gathered last and the one prefetched last, each as its buckets."""
        self._in_flight: dict[int, Sequence[Bucket]] = {}
        """Buckets whose reductions were started, the latest ones last."""
        bucket_of: dict[Parameter, Bucket] = {}
        for number, units in stages.items():
            self._lay_out_stage(number, units, bucket_of)
        self.buckets: list[Bucket] = list(dict.fromkeys(bucket_of.values()))
        # Tables have their own buckets, so both ends of a tied table have the same parts.
        self._tied_bucket = next(
            (b for b in self.trained if tied is not None and tied.parameter in b.parameters), None
        )
        self._gradients_divided = config.parallel.zero >= 2
        plain = ReducerConfig.of(config.parallel, compress=True).uncompressed
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

    def expert_loads(self) -> Iterator[tuple[str, Tensor, Tensor]]:
        """Yield for each router on this rank the name of its balance parameter, the load [E] of its
        experts in the last step over all ranks, and the parameter's value [E]."""
        for bucket in self.buckets:
            if bucket.parameters[0].spec.role == "balance":
                loads = bucket.pieces(bucket.grad_sums, bucket.master_span)
                values = bucket.pieces(bucket.weights, bucket.master_span)
                for (parameter, _, load_E), (*_, value_E) in zip(loads, values, strict=True):
                    yield parameter.spec.name, load_E, value_E

    def compression_state(self) -> Iterator[tuple[str, Tensor]]:
        """Yield what gradient compression carries over from step to step; only the same rank of the
        same layout can use it."""
        for bucket in self.buckets:
            yield from bucket.compression_state()

    # Values.

    def prefetch(self, unit: Module) -> None:
        """Start gathering the values of a unit, if they are not here."""
        self._prefetch(self._used[id(unit)])

    def gather(self, unit: Module, *, with_second_half: bool = True) -> None:
        """Return when a unit's values are here; if not `with_second_half`, those that only its
        second half uses may still be missing."""
        buckets = self._used[id(unit)]
        # The values of the second half arrive while the first half is computed.
        late: Sequence[Bucket] = ()
        if not with_second_half and unit.second_half is not None:
            late = self._used[id(unit.second_half)]
        self._prefetch(buckets)
        for bucket in buckets:
            if bucket not in late:
                bucket.wait_for_values()

    def gather_second_half(self, second_half: Module) -> None:
        """Return when the values of the second half of a gathered unit are here."""
        for bucket in self._used[id(second_half)]:
            bucket.wait_for_values()

    def release(self, unit: Module) -> None:
        """Say that a unit's values are not used until they are gathered again. Only tables are
        released at once; a block makes room for another one."""
        buckets = self._used[id(unit)]
        # Tables are large and used once per pass, so they go at once. A block stays until another
        # one needs its space, because a backward pass begins with the block that ended the forward
        # pass.
        if _has_tables(buckets):
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
            if bucket.sharding.stage < 3:
                bucket.wait_for_values()

    def _prefetch(self, buckets: Sequence[Bucket]) -> None:
        if not _has_tables(buckets):
            # Lists are compared by identity: units that share buckets have the same list object.
            self._resident = [other for other in self._resident if other is not buckets]
            # The block prefetched longest ago gives its buffer to the new one.
            if len(self._resident) == BLOCKS_PRESENT:
                _release(self._resident.pop(0))
            self._resident.append(buckets)
        for bucket in buckets:
            bucket.prefetch()

    # Gradients.

    def start_step(self) -> None:
        """Forget the gradients of the previous step."""
        for bucket in self.buckets:
            bucket.start_step()

    def reduce(self, unit: Module, *, last: bool) -> None:
        """Reduce the gradients of the matrices that a unit, without its second half, or a second
        half owns. Only the `last` microbatch of the step starts the reduction or, if gradients are
        divided, each one does."""
        # At stages 2 and 3 a borrowed buffer holds one microbatch, so each one is reduced. Below,
        # microbatches add up in place and travel once.
        if last or self._gradients_divided:
            self._start_reduction(self._owned[id(unit)], last)

    def reduce_vectors(self, stage: int) -> None:
        """Reduce the gains and biases of a stage, after the last microbatch has left it."""
        self._start_reduction(self._vectors[stage], last=True)

    def wait_for_gradients(self) -> None:
        """Return when every reduction is done."""
        for buckets in self._in_flight.values():
            for bucket in buckets:
                bucket.wait()
        self._in_flight.clear()
        # After the sums over data ranks: both ends of a tied table then get the same total, so that
        # their copies stay equal.
        if self._tied is not None and self._tied_bucket is not None:
            all_reduce(self._tied_bucket.grad_sums, self._tied.ends).wait()

    def _start_reduction(self, buckets: Sequence[Bucket], last: bool) -> None:
        if not buckets:
            return
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
            bucket.reduce(last=last)
        self._in_flight[id(buckets)] = buckets

    # Layout of buckets.

    def _summing_axes(self) -> Iterator[tuple[str, ...]]:
        """Yield the axis sets over which gradients may be summed, the same on all ranks."""
        # Groups are made collectively, so all ranks list the same sets in the same order.
        layout, model = self._mesh.layout, self._config.model
        yield ("data_shard", "context")
        if layout.tensor > 1:
            yield ("data_shard", "context", "tensor")
        if copies_of(model.kv_heads, layout.tensor) > 1:
            yield ("data_shard", "context", "tensor_copies")
        if model.moe is not None:
            yield ("expert_shard",)
        yield ("data_replicate",)

    def _lay_out_stage(
        self, number: int, units: Sequence[Module], bucket_of: dict[Parameter, Bucket]
    ) -> None:
        """Make buckets for the parameters of a stage that no earlier stage has, and add them to
        `bucket_of`."""
        # Gains and biases come first, because the first block waits for them.
        vectors = {p: None for u in units for p in u.parameters() if p.spec.role in _VECTORS}
        buckets = self._buckets_of(list(vectors))
        self._vectors[number] = [bucket for bucket in buckets if bucket.trained]
        bucket_of |= {p: bucket for bucket in buckets for p in bucket.parameters}
        least = self._config.parallel.bucket_size
        for sharing, halves in bucket_units(units, self._mesh, least):
            self._lay_out_units(sharing, bucket_of, halves=halves)

    def _lay_out_units(
        self, units: Sequence[Module], bucket_of: dict[Parameter, Bucket], *, halves: bool
    ) -> None:
        """Make buckets for the parameters of these units that no earlier unit has, and add them to
        `bucket_of`. The gradients of units that share buckets are complete after the first one, as
        a backward pass ends with it.

        Args:
            units: The units that share buckets.
            bucket_of: The buckets of all parameters so far.
            halves: The (only) unit's second half has buckets of its own.
        """
        first = units[0]
        second_half = first.second_half if halves else None
        in_second = set() if second_half is None else {*second_half.parameters()}
        every = dict.fromkeys(p for unit in units for p in unit.parameters())
        new = [p for p in every if p not in bucket_of]
        rest = [p for p in new if p.spec.role not in _TABLES]
        first_buckets = [self._bucket([p]) for p in new if p.spec.role in _TABLES]
        first_buckets += self._buckets_of([p for p in rest if p not in in_second])
        second = self._buckets_of([p for p in rest if p in in_second])
        bucket_of |= {p: bucket for bucket in (*first_buckets, *second) for p in bucket.parameters}
        # One list for all of them: it stands for them where their values come and go together.
        used = list({bucket_of[p]: None for p in every})
        for unit in units:
            # Only the first unit reduces: a backward pass ends with it, and then the sums of all
            # are complete.
            self._owned[id(unit)] = []
            self._used[id(unit)] = used
            if unit.second_half is not None:
                self._owned[id(unit.second_half)] = []
                self._used[id(unit.second_half)] = []
        self._owned[id(first)] = [bucket for bucket in first_buckets if bucket.trained]
        if second_half is not None:
            self._owned[id(second_half)] = [bucket for bucket in second if bucket.trained]
            self._used[id(second_half)] = second

    def _buckets_of(self, parameters: Sequence[Parameter]) -> list[Bucket]:
        """Return a bucket for each set of parameters that are trained and summed alike."""
        alike: dict[object, list[Parameter]] = {}
        sizes = self._mesh.layout.sizes
        for p in parameters:
            group = self._bucketing.group_of(p.spec), p.spec.find_reduction_axes(sizes)
            alike.setdefault(group, []).append(p)
        return [self._bucket(group) for group in alike.values()]

    def _bucket(self, parameters: Sequence[Parameter]) -> Bucket:
        mesh, bucketing = self._mesh, self._bucketing
        spec, sizes = parameters[0].spec, mesh.layout.sizes
        stage = self._config.parallel.zero
        shard = (_SHARDS.get(axis, axis) for axis in spec.find_reduction_axes(sizes))
        precision = PRECISIONS[self._config.train.precision]
        reducer = ReducerConfig.of(self._config.parallel, compress=spec.role not in _VECTORS)
        if spec.role in _VECTORS:
            # Autograd saves gains and biases, so their values may not be withdrawn.
            stage = min(stage, 1)
        if spec.role == "balance":  # its gradients are counts, which all ranks need exactly
            stage, reducer = 0, UNCOMPRESSED
            # Values in master precision as well, so they are not rounded.
            precision = Precision(precision.master, precision.master)
        sharding = BucketSharding(mesh.group(*shard), mesh.group("data_replicate"), stage, reducer)
        return Bucket(
            parameters,
            [p.spec.local(mesh.coordinate, sizes) for p in parameters],
            precision,
            sharding,
            self.buffers,
            trained=bucketing.is_trained(spec),
            allocate_host=bucketing.allocate_host,
            alignment=bucketing.alignment,
            replica=parameters[0].replica,
        )


def bucket_units(
    units: Sequence[Module], mesh: Mesh, least: int | Literal["auto"]
) -> Iterator[tuple[Sequence[Module], bool]]:
    """Yield the units of a stage in order, those together that share buckets.

    Args:
        units: The units of the stage.
        mesh: This rank's mesh.
        least: `parallel.bucket_size` in elements; half a block as long as it is not decided.

    Yields:
        The units, and whether the second half of the (only) unit has buckets of its own.
    """
    blocks = [unit for unit in units if _is_block(unit)]
    sizes = [_matrix_sizes(block, mesh) for block in blocks]
    groups = group_blocks_into_buckets(sizes, 1 if least == "auto" else least)
    by_first = {id(blocks[of.start]): (blocks[of.start : of.stop], of.halves) for of in groups}
    for unit in units:
        if not _is_block(unit):
            yield [unit], unit.second_half is not None
        elif id(unit) in by_first:
            yield by_first[id(unit)]


def _is_block(unit: Module) -> bool:
    """Return whether a unit is a block of the model. An embedding, a predictor and the head, which
    use tables, do not share buckets."""
    return unit.second_half is not None and all(
        p.spec.role not in _TABLES for p in unit.parameters()
    )


def _matrix_sizes(block: Module, mesh: Mesh) -> tuple[int, int]:
    """Return the elements of the matrices of a block's second half, and of its others. They are
    those of the first rank, which has the most, so that all ranks put the same blocks together."""
    first, sizes = dict.fromkeys(mesh.coordinate, 0), mesh.layout.sizes
    in_second = set() if block.second_half is None else {*block.second_half.parameters()}
    late = rest = 0
    for p in block.parameters():
        size = 0 if p.spec.role in _VECTORS else p.spec.local(first, sizes).size
        late, rest = (late + size, rest) if p in in_second else (late, rest + size)
    return late, rest


def _has_tables(buckets: Sequence[Bucket]) -> bool:
    return any(bucket.parameters[0].spec.role in _TABLES for bucket in buckets)


def _release(buckets: Sequence[Bucket]) -> None:
    for bucket in buckets:
        bucket.release()
