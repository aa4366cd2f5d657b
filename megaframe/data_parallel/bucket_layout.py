"""BucketLayout: which parameters of a rank's stages share a bucket, and which unit uses it.

Parameters that are trained alike share a bucket, but there are separate ones for the matrices of a
unit's second half and for its other matrices, or for those of a few blocks
(`parallel.bucket_size`), for each table (which two units or two ranks may share), and for the gains
and biases of a stage.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from megaframe.architecture.buckets import group_blocks_into_buckets
from megaframe.architecture.spec import NO_PARAMETERS, ParamSpec
from megaframe.config import ParallelConfig
from megaframe.config.adapters import QuantisationConfig
from megaframe.data_parallel.bucket import Bucket, BucketSharding
from megaframe.data_parallel.buffers import BufferPool
from megaframe.data_parallel.quantised_bucket import QuantisedBucket
from megaframe.data_parallel.reducer_config import UNCOMPRESSED, ReducerConfig
from megaframe.distributed.mesh import Mesh
from megaframe.ops.block_codec import BlockCodec
from megaframe.ops.kernel_dispatch import Kernels
from megaframe.parameters.parameter import Module, Parameter, Precision

_TABLES = ("embedding", "head")
"""Roles of parameters that are used only at one end of the model."""
VECTORS = ("gain", "bias", *NO_PARAMETERS)
"""Roles of parameters that are so small that ranks keep their values whole at any ZeRO stage."""
_SHARDS = {"data": "data_shard", "expert_data": "expert_shard"}
"""For an axis, the name of its ranks within one copy of the state."""


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


class BucketLayout:
    """The buckets of a rank's stages.

    Units and second halves are keys by their `id`.

    Attributes:
        buckets: All buckets, in the order of stages and units; gains and biases come first in a
            stage.
        completed_by: For each unit and second half, the trained buckets whose gradients it
            completes.
        used_by: For each unit and second half, the buckets whose values it computes with, if any of
            them have to be gathered. Units that share buckets have the same list.
        vectors_of: For each stage, the trained buckets of its gains and biases.
    """

    def __init__(
        self,
        parallel: ParallelConfig,
        precision: Precision,
        mesh: Mesh,
        stages: Mapping[int, Sequence[Module]],
        bucketing: BucketingRule,
        buffers: BufferPool,
        kernels: Kernels,
    ) -> None:
        """Make the buckets and bind all parameters to them.

        Args:
            parallel: The section `parallel`.
            precision: Types of numbers.
            mesh: This rank's groups.
            stages: The units of each stage, by its index, in the order of the forward pass.
            bucketing: What the optimizer requires of buckets.
            buffers: Lends the memory of the buckets.
            kernels: Make values of weights that are kept as codes.
        """
        self._parallel, self._precision = parallel, precision
        self._mesh, self._bucketing = mesh, bucketing
        self._buffers, self._kernels = buffers, kernels
        self.completed_by: dict[int, list[Bucket]] = {}
        self.used_by: dict[int, list[Bucket]] = {}
        self.vectors_of: dict[int, list[Bucket]] = {}
        self._bucket_of: dict[Parameter, Bucket] = {}
        for stage, units in stages.items():
            self._lay_out_stage(stage, units)
        self.buckets: list[Bucket] = list(dict.fromkeys(self._bucket_of.values()))

    def _lay_out_stage(self, stage: int, units: Sequence[Module]) -> None:
        """Make buckets for the parameters of a stage that no earlier stage has."""
        # Gains and biases come first, because the first block waits for them.
        vectors = {p: None for u in units for p in u.parameters() if p.spec.role in VECTORS}
        buckets = self._make_buckets(list(vectors))
        self.vectors_of[stage] = [bucket for bucket in buckets if bucket.trained]
        self._bucket_of |= {p: bucket for bucket in buckets for p in bucket.parameters}
        minimum = self._parallel.bucket_size
        for sharing, halves in group_units(units, self._mesh, minimum):
            self._lay_out_units(sharing, halves=halves)

    def _lay_out_units(self, units: Sequence[Module], *, halves: bool) -> None:
        """Make buckets for the parameters of these units that no earlier unit has. The gradients of
        units that share buckets are complete after the first one, as a backward pass ends with it.

        Args:
            units: The units that share buckets.
            halves: The (only) unit's second half has buckets of its own.
        """
        first = units[0]
        second_half = first.second_half if halves else None
        in_second = set() if second_half is None else {*second_half.parameters()}
        parameters = dict.fromkeys(p for unit in units for p in unit.parameters())
        new = [p for p in parameters if p not in self._bucket_of]
        without_tables = [p for p in new if p.spec.role not in _TABLES]
        first_buckets = [self._make_bucket([p]) for p in new if p.spec.role in _TABLES]
        first_buckets += self._make_buckets([p for p in without_tables if p not in in_second])
        second_buckets = self._make_buckets([p for p in without_tables if p in in_second])
        self._bucket_of |= {
            p: bucket for bucket in (*first_buckets, *second_buckets) for p in bucket.parameters
        }
        # One list for all of them: it stands for them where their values come and go together.
        buckets = list_if_gathered(list({self._bucket_of[p]: None for p in parameters}))
        for unit in units:
            # Only the first unit reduces: a backward pass ends with it, and then the sums of all
            # are complete.
            self.completed_by[id(unit)] = []
            self.used_by[id(unit)] = buckets
            if unit.second_half is not None:
                self.completed_by[id(unit.second_half)] = []
                self.used_by[id(unit.second_half)] = []
        self.completed_by[id(first)] = [bucket for bucket in first_buckets if bucket.trained]
        if second_half is not None:
            self.completed_by[id(second_half)] = [
                bucket for bucket in second_buckets if bucket.trained
            ]
            self.used_by[id(second_half)] = list_if_gathered(second_buckets)

    def _make_buckets(self, parameters: Sequence[Parameter]) -> list[Bucket]:
        """Return a bucket for each set of parameters that are trained and summed alike."""
        groups: dict[object, list[Parameter]] = {}
        sizes, group_of = self._mesh.layout.sizes, self._bucketing.group_of
        for p in parameters:
            key = group_of(p.spec), p.spec.find_reduction_axes(sizes), self._find_codes(p.spec)
            groups.setdefault(key, []).append(p)
        return [self._make_bucket(group) for group in groups.values()]

    def _find_codes(self, spec: ParamSpec) -> QuantisationConfig | None:
        """Return how a parameter is kept as codes, as only frozen ones are."""
        return None if self._bucketing.is_trained(spec) else spec.quantised

    def _make_bucket(self, parameters: Sequence[Parameter]) -> Bucket:
        mesh, bucketing = self._mesh, self._bucketing
        spec, sizes = parameters[0].spec, mesh.layout.sizes
        stage = self._parallel.zero
        shard_axes = (_SHARDS.get(axis, axis) for axis in spec.find_reduction_axes(sizes))
        precision = self._precision
        reducer = ReducerConfig.from_parallel(self._parallel, compress=spec.role not in VECTORS)
        if spec.role in VECTORS:
            # Autograd saves gains and biases, so their values may not be withdrawn.
            stage = min(stage, 1)
        if spec.role == "balance":  # its gradients are counts, which all ranks need exactly
            stage, reducer = 0, UNCOMPRESSED
            # Values in master precision as well, so they are not rounded.
            precision = Precision(precision.master, precision.master)
        shard = mesh.group(*shard_axes)
        if shard.size == 1:
            # What has one owner is never divided: gradients add up in place, no values are copied.
            stage = min(stage, 1)
        sharding = BucketSharding(shard, mesh.group("data_replicate"), stage, reducer)
        boxes = [p.spec.find_local_box(mesh.coordinate, sizes) for p in parameters]
        of_bucket = parameters, boxes, precision, sharding, self._buffers
        if (codes := self._find_codes(spec)) is not None:
            coding = BlockCodec(codes), self._kernels
            return QuantisedBucket(*of_bucket, *coding, replica=parameters[0].replica)
        return Bucket(
            *of_bucket,
            trained=bucketing.is_trained(spec),
            allocate_host=bucketing.allocate_host,
            alignment=bucketing.alignment,
            replica=parameters[0].replica,
        )


def list_if_gathered(buckets: list[Bucket]) -> list[Bucket]:
    """Return the buckets if values of any of them have to be gathered, else none: values that are
    always here need not be waited for."""
    return buckets if any(bucket.gathers for bucket in buckets) else []


def has_tables(buckets: Sequence[Bucket]) -> bool:
    """Return whether these are the buckets of a unit that uses a table."""
    return any(bucket.parameters[0].spec.role in _TABLES for bucket in buckets)


def group_units(
    units: Sequence[Module], mesh: Mesh, minimum: int | Literal["auto"]
) -> Iterator[tuple[Sequence[Module], bool]]:
    """Yield the units of a stage in order, those together that share buckets.

    Args:
        units: The units of the stage.
        mesh: This rank's mesh.
        minimum: `parallel.bucket_size` in elements; half a block as long as it is not decided.

    Yields:
        The units, and whether the second half of the (only) unit has buckets of its own.
    """
    blocks = [unit for unit in units if _is_block(unit)]
    sizes = [_count_matrix_elements(block, mesh) for block in blocks]
    groups = group_blocks_into_buckets(sizes, 1 if minimum == "auto" else minimum)
    blocks_from = {
        id(blocks[group.start]): (blocks[group.start : group.stop], group.halves)
        for group in groups
    }
    for unit in units:
        if not _is_block(unit):
            yield [unit], unit.second_half is not None
        elif id(unit) in blocks_from:
            yield blocks_from[id(unit)]


def _is_block(unit: Module) -> bool:
    """Return whether a unit is a block of the model. An embedding, a predictor and the head, which
    use tables, do not share buckets."""
    return unit.second_half is not None and all(
        p.spec.role not in _TABLES for p in unit.parameters()
    )


def _count_matrix_elements(block: Module, mesh: Mesh) -> tuple[int, int]:
    """Return the elements of the matrices of a block's second half, and of its others. They are
    those of the first rank, which has the most, so that all ranks put the same blocks together."""
    first, sizes = dict.fromkeys(mesh.coordinate, 0), mesh.layout.sizes
    in_second = set() if block.second_half is None else {*block.second_half.parameters()}
    second_half = first_half = 0
    for p in block.parameters():
        size = 0 if p.spec.role in VECTORS else p.spec.find_local_box(first, sizes).size
        second_half, first_half = (
            (second_half + size, first_half) if p in in_second else (second_half, first_half + size)
        )
    return second_half, first_half
