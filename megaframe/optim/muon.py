"""Muon: momentum with orthogonalised matrices (Jordan et al. 2024), each on one owner.

A matrix can be orthogonalised only as a whole. Its pieces, under any layout, are therefore sent to
one rank, and the result is sent back, so the answer is that of one process. As many buckets as
there are ranks are updated together, and their matrices are distributed by work. All ranks then
have the same amount of work, and about one bucket is in transit on each.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megaframe.data_parallel.bucket import Bucket
from megaframe.data_parallel.partition import BucketPartition
from megaframe.distributed.collectives import Group, Pending
from megaframe.distributed.connections import connect_pairs
from megaframe.optim.elementwise import (
    ElementwiseRule,
    GradientDescent,
    Momentum,
    MomentumOptions,
    UpdateTransform,
)
from megaframe.optim.matrix_gather import MatrixGather, MatrixPiece, RankPieces, assign_owners
from megaframe.optim.optimizer_state import MomentStorage
from megaframe.optim.update_rule import OptimizerShard, UpdateRule, UpdateStep
from megaframe.parameters.parameter import Precision

_COEFFICIENTS = 3.4445, -4.7750, 2.0315
"""Of x, x^3 and x^5: steep at 0, and near 1 elsewhere up to x = 1 (Jordan et al. 2024)."""
_STEPS = 5
_SCALE = 0.2
"""Root mean square of an update: about AdamW's, so that one rate fits both (Liu et al. 2025)."""


@dataclass
class _RunningUpdate:
    """What an update needs between its phases. transfer: the one in flight."""

    weights: Tensor
    grads: Tensor
    step: UpdateStep
    rounded: Tensor | None
    transfer: Pending[Tensor]


class Muon(UpdateRule):
    """The rule of a bucket of matrices: m = momentum m + g, and
    w -= lr (scale * orthogonal(g + momentum m) + decay w).

    Weights do not travel, only what the gradients have become, so weights can come in chunks.
    """

    has_phases = True

    def __init__(
        self,
        bucket: Bucket,
        options: MomentumOptions,
        storage: MomentStorage,
        precision: Precision,
        group: Group,
        partitions: Sequence[BucketPartition],
        after: Sequence[UpdateTransform] = (),
    ) -> None:
        """Allocate the state. All ranks of the group must call this.

        Args:
            bucket: The bucket of matrices.
            options: Constants of the momentum.
            storage: How the momentum is stored.
            precision: Matrices are orthogonalised in the type of the computation, or in fp32.
            group: The ranks that together hold one copy of the matrices.
            partitions: How the bucket is divided on each of these ranks.
            after: Transforms that follow Muon's own.
        """
        self._bucket, self._group = bucket, group
        # Two rules around the transfers: momentum before matrices are sent, descent when they are
        # back.
        transforms = [GradientDescent(options.rates), *after]
        self._momentum = ElementwiseRule(bucket.weights, [Momentum(options, storage)], storage)
        self._descent = ElementwiseRule(bucket.weights, transforms, storage)
        # Entries of a large matrix of norm 1 are too small for fp16.
        half = precision.compute == torch.float16
        self._dtype = torch.float32 if half else precision.compute
        self._pieces = RankPieces(
            # Owned spans are sent, so that no element is sent twice; results go to all that have
            # the weights.
            [_list_matrix_pieces(partition, partition.owned_span) for partition in partitions],
            [_list_matrix_pieces(partition, partition.master_span) for partition in partitions],
        )
        self._matrices = [
            MatrixPiece(index, box)
            for index, parameter in enumerate(bucket.parameters)
            for box in parameter.spec.matrices
        ]
        self._gather: MatrixGather | None = None
        self._running: _RunningUpdate | None = None
        # All ranks call it here in the same order, before the first exchange needs the connections.
        connect_pairs(self._group, bucket.device)

    @property
    def costs(self) -> list[float]:
        """The cost of each matrix; only the ratios matter."""
        # m^2 (2n + m) for sides m <= n: the iteration works on the m x m Gram matrix.
        sizes = [sorted(self._count_sides(matrix)) for matrix in self._matrices]
        return [float(short * short * (2 * long + short)) for short, long in sizes]

    def set_owners(self, owners: Sequence[int]) -> None:
        """Set which rank of the group owns each matrix."""
        self._gather = MatrixGather(self._group, self._pieces, self._matrices, owners, self._dtype)

    @property
    def state(self) -> dict[str, Tensor]:
        """All state, as it is stored in memory."""
        return {**self._momentum.state, **self._descent.state}

    def initialize_state(self, weights: Tensor) -> None:
        """Begin a run: the weights have their initial values."""
        self._descent.initialize_state(weights)

    def export_state(self, *, to_load: bool = False) -> Mapping[str, Tensor]:
        """Return the state for a checkpoint, each tensor as long as the weights."""
        momentum = self._momentum.export_state(to_load=to_load)
        return {**momentum, **self._descent.export_state(to_load=to_load)}

    def load_exported_state(self) -> None:
        """Take back the tensors that `export_state` returned, which have been changed."""
        self._momentum.load_exported_state()
        self._descent.load_exported_state()

    def update(
        self, weights: Tensor, grads: Tensor, step: UpdateStep, rounded: Tensor | None = None
    ) -> None:
        """Add to the momentum, and start sending the directions to the owners of the matrices."""
        assert self._gather is not None, "every matrix has an owner before the first update"
        # Leaves the directions in the memory of the gradients, from which pieces are sent.
        self._momentum.update(weights, grads, step)
        # `grads` begins at the master span, of which this rank sends only the part that it owns.
        span, start = self._bucket.owned_span, self._bucket.master_span.start
        owned = self._bucket.iterate_pieces(grads[span.start - start : span.stop - start], span)
        transfer = self._gather.collect([piece for _, _, piece in owned], grads.device)
        self._running = _RunningUpdate(weights, grads, step, rounded, transfer)

    def continue_update(self) -> None:
        """Orthogonalise the matrices that this rank owns, and start sending them back."""
        running = self._running
        assert self._gather is not None and running is not None, "`update` comes first"
        # Momentum is linear, so it is applied to pieces; orthogonalising is not, and needs whole
        # matrices.
        matrices = self._gather.assemble(running.transfer.wait())
        directions = {
            index: self._compute_direction(index, matrix) for index, matrix in matrices.items()
        }
        running.transfer = self._gather.spread(directions, running.grads.device)

    def finish_update(self) -> None:
        """Move the weights in the directions that the owners have sent."""
        running, self._running = self._running, None
        assert self._gather is not None and running is not None, "`update` comes first"
        # The gradients are not needed any more: their memory takes the directions.
        pieces = self._bucket.iterate_pieces(running.grads, self._bucket.master_span)
        targets = [piece for _, _, piece in pieces]
        for index, place, direction in self._gather.split_results(running.transfer.wait()):
            targets[index][place].copy_(direction)
        self._descent.update(running.weights, running.grads, running.step, running.rounded)

    def _count_sides(self, matrix: MatrixPiece) -> tuple[int, int]:
        """Return the number of outputs and of inputs of a matrix."""
        inputs = self._bucket.parameters[matrix.tensor].spec.inputs
        return math.prod(matrix.box.shape[:-inputs]), math.prod(matrix.box.shape[-inputs:])

    def _compute_direction(self, index: int, matrix: Tensor) -> Tensor:
        sides = self._count_sides(self._matrices[index])
        scale = _SCALE * math.sqrt(max(sides))
        return orthogonalize(matrix.view(sides)).mul_(scale).view(matrix.shape)


def _list_matrix_pieces(partition: BucketPartition, span: slice) -> list[MatrixPiece]:
    return [MatrixPiece(number, box) for number, box, _ in partition.iterate_pieces(span)]


def orthogonalize(matrix_OI: Tensor) -> Tensor:
    """Return roughly U V^T of a matrix U S V^T: its singular values become about 0.7 to 1.2, by
    five Newton-Schulz iterations of a quintic (Jordan et al. 2024), in the matrix's own type."""
    a, b, c = _COEFFICIENTS
    # The norm of a large matrix is summed in at least fp32.
    wide = torch.promote_types(matrix_OI.dtype, torch.float32)
    norm = torch.linalg.vector_norm(matrix_OI, dtype=wide).clamp_min(torch.finfo(wide).tiny)
    # A Frobenius norm of 1 bounds all singular values by 1, up to which the quintic is near 1.
    x = (matrix_OI / norm).to(matrix_OI.dtype)
    tall = x.shape[0] > x.shape[1]
    # The Gram matrix is then that of the shorter side.
    x = x.t() if tall else x
    for _ in range(_STEPS):
        # a X + (b G + c G^2) X with G = X X^T, as two fused products.
        gram = x @ x.t()
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x.t() if tall else x).contiguous()


def group_shards(shards: Sequence[OptimizerShard], group: Group) -> list[list[OptimizerShard]]:
    """Put shards that are updated together in one list each, and give the matrices of Muon their
    owners.

    Args:
        shards: The shards of all buckets.
        group: The ranks that together hold one copy of the matrices; they become the owners.

    Returns:
        The shards that are trained, in order.
    """
    groups: list[list[OptimizerShard]] = []
    window: list[OptimizerShard] = []
    for shard in shards:
        if shard.rule is None:
            continue
        if not isinstance(shard.rule, Muon):
            groups.append([shard])
            continue
        if not window:
            groups.append(window)
        window.append(shard)
        # As many buckets as ranks: about one bucket is then in transit on each rank.
        if len(window) == group.size:
            window = []
    for group_of_shards in groups:
        rules = [shard.rule for shard in group_of_shards if isinstance(shard.rule, Muon)]
        # Costs follow from specs alone, so all ranks agree without a transfer.
        owners = iter(assign_owners([cost for rule in rules for cost in rule.costs], group.size))
        for rule in rules:
            rule.set_owners([next(owners) for _ in rule.costs])
    return groups
