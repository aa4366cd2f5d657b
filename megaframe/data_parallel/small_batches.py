"""Small batches: how the tokens of a step are divided where gradients are not yet reduced, and the
squared norms of the gradients of these parts, from which the noise of gradients is estimated
(McCandlish et al. 2018, An Empirical Model of Large-Batch Training, appendix A.1).

The norms are taken of what a rank is about to reduce, so they need no pass of their own. Only where
the ranks of one data rank each have a part of its gradient (context ranks; tensor ranks for what
they do not split) is that summed over them first, apart from the gradient, of which no bit changes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from megaframe.architecture.buckets import SUMMED_AT_ONCE
from megaframe.architecture.spec import EXPERT_AXES
from megaframe.data_parallel.bucket import Bucket
from megaframe.distributed.collectives import Group, all_reduce, reduce_scatter
from megaframe.distributed.mesh import Mesh
from megaframe.layout import Layout


@dataclass(frozen=True)
class SmallBatches:
    """How the tokens of a step are divided.

    Attributes:
        data_ranks: Number of neighbouring data ranks whose tokens are in one small batch.
        by_microbatch: Whether each of their microbatches is one of its own.
    """

    data_ranks: int = 1
    by_microbatch: bool = False

    def sum_tokens(self, tokens_DM: Tensor) -> Tensor:
        """Return the tokens of each small batch, from those of each data rank and microbatch."""
        tokens_DM = tokens_DM.unflatten(0, (-1, self.data_ranks)).sum(1)
        return (tokens_DM if self.by_microbatch else tokens_DM.sum(1)).flatten()


@dataclass(frozen=True)
class SquaredNorms:
    """Squared norms of the gradients of one step, by `SmallBatchNorms.kinds`, fp64 [kinds]. They
    are parts: those of all ranks are to be summed.

    Attributes:
        small: The sum over all small batches.
        whole: Of the whole batch.
    """

    small: Tensor
    whole: Tensor


class SmallBatchNorms:
    """Measures the gradients of the small batches of a step.

    Attributes:
        kinds: Kinds of small batches, the same on all ranks. A parameter's gradient is measured
            over one of them.
        active: Whether this step is measured.
    """

    def __init__(
        self,
        mesh: Mesh,
        buckets: Sequence[Bucket],
        axis_sets: Sequence[tuple[str, ...]],
        *,
        zero: int,
        tied: tuple[Bucket, Group] | None = None,
    ) -> None:
        """Prepare to measure. All ranks of the world must call this.

        Args:
            mesh: This rank's groups.
            buckets: All that are trained.
            axis_sets: Those over which gradients are summed.
            zero: The ZeRO stage.
            tied: The bucket whose gradients are summed over two pipeline ranks, and these.
        """
        self.kinds = list_kinds(mesh.layout, zero)
        self.active = False
        self._tied, self._tied_sum = tied, torch.empty(0, device=mesh.device)
        self._within = _divide_by_samples(mesh, axis_sets)
        self._mesh = mesh
        self._buckets = [bucket for bucket in buckets if self.find_kind(bucket) is not None]
        self._squares = torch.zeros(len(self.kinds), dtype=torch.float64, device=mesh.device)

    def find_kind(self, bucket: Bucket) -> int | None:
        """Return the index of the kind of small batches that a bucket's gradients are measured
        over; None if they are not: what routers know of loads is no gradient, and experts may have
        tokens of all data ranks at once."""
        specs = [parameter.spec for parameter in bucket.parameters]
        if specs[0].role == "balance":
            return None
        is_expert = any(axis in EXPERT_AXES for axis in specs[0].axes.values())
        data_ranks = count_data_ranks_of_experts(self._mesh.layout) if is_expert else 1
        if data_ranks is None:
            return None
        by_microbatch = bucket.sharding.stage >= 2 and not self._is_tied(bucket)
        return self.kinds.index(SmallBatches(data_ranks, by_microbatch))

    def start_step(self, *, measured: bool) -> None:
        """Begin a step, which is measured or not."""
        self.active = measured
        self._squares.zero_()
        self._tied_sum = self._tied_sum[:0]
        for bucket in self._buckets:
            bucket.before_reduction = partial(self._measure, bucket) if measured else None

    def finish(self) -> None:
        """Add what two pipeline ranks have each had a part of. Called when all gradients are added
        up, on all ranks."""
        if not self.active or self._tied is None:
            return
        bucket, ends = self._tied
        total = all_reduce(self._tied_sum, ends).wait()
        if not bucket.replica:
            self._add_square(bucket, total)
        self._tied_sum = total[:0]

    def number_kinds(self, buckets: Sequence[Bucket]) -> Tensor:
        """Return the kind of each bucket, int64 [buckets] on the device; for one that is not
        measured, the number of kinds."""
        kinds = [self.find_kind(bucket) for bucket in buckets]
        numbers = [len(self.kinds) if kind is None else kind for kind in kinds]
        return torch.tensor(numbers, device=self._mesh.device)

    def collect(self, squares: Tensor, kinds: Tensor, loss_scale: Tensor) -> SquaredNorms:
        """Return the squared norms of the step.

        Args:
            squares: Those of the pieces of the reduced gradient that this rank owns, fp64 [pieces].
            kinds: Of the bucket of each piece, as from `number_kinds`.
            loss_scale: The factor on all gradients.
        """
        whole = squares.new_zeros(len(self.kinds) + 1).index_add_(0, kinds, squares)[:-1]
        divisor = loss_scale.square()
        # Each replica owns the same pieces.
        whole = whole / self._mesh.layout.data_replicate
        return SquaredNorms(self._squares / divisor, whole / divisor)

    def _is_tied(self, bucket: Bucket) -> bool:
        return self._tied is not None and bucket is self._tied[0]

    def _measure(self, bucket: Bucket, grads: Tensor) -> None:
        """Take the norm of what a reduction of a bucket is about to sum, which stays as it is."""
        within = self._within.get(bucket.sharding.shard.ranks)
        if self._is_tied(bucket):
            own = grads if within is None else reduce_scatter(grads, within).wait()
            self._tied_sum = self._tied_sum + own if len(self._tied_sum) else own.clone()
        elif within is None:
            self._add_square(bucket, grads)
        else:
            for part in grads.split(SUMMED_AT_ONCE // within.size * within.size):
                self._add_square(bucket, reduce_scatter(part, within).wait())

    def _add_square(self, bucket: Bucket, flat: Tensor) -> None:
        kind = self.find_kind(bucket)
        assert kind is not None
        # As for the norm of the whole gradient: in master precision, and squares are summed in
        # fp64.
        self._squares[kind] += torch.linalg.vector_norm(flat).double().square()


def list_kinds(layout: Layout, zero: int) -> tuple[SmallBatches, ...]:
    """Return the kinds of small batches of a layout."""
    data_ranks = sorted({1, count_data_ranks_of_experts(layout) or 1})
    # Where gradients are divided, a rank never has those of all its microbatches.
    return tuple(
        SmallBatches(ranks, by_microbatch)
        for ranks in data_ranks
        for by_microbatch in (False, True)[: 1 + (zero >= 2)]
    )


def count_data_ranks_of_experts(layout: Layout) -> int | None:
    """Return how many data ranks send their tokens to the same experts' ranks; None if all of them
    do, or if a data rank sends to more than one set of experts' ranks that others send to as well:
    then the gradients of experts have no parts that are independent."""
    block, own = layout.expert * layout.expert_tensor, layout.tensor * layout.context
    if own % block == 0:
        return 1
    ranks = block // own
    return ranks if block % own == 0 and ranks < layout.data else None


def _divide_by_samples(
    mesh: Mesh, axis_sets: Sequence[tuple[str, ...]]
) -> dict[tuple[int, ...], Group]:
    """Make the groups of ranks that have parts of the gradient of the same samples. Returns this
    rank's by the ranks that sum over all samples, where there is more than one.

    Args:
        mesh: This rank's groups.
        axis_sets: Those over which gradients are summed.
    """
    layout, within = mesh.layout, dict[tuple[int, ...], Group]()
    own = layout.tensor * layout.context
    for axes in axis_sets:
        data_ranks = 1
        if "expert_shard" in axes:
            data_ranks = count_data_ranks_of_experts(layout) or layout.data
        # Tensor and context ranks are numbered before data ranks.
        group = mesh.divide_group(axes, own * data_ranks)
        if group.size > 1:
            within[mesh.group(*axes).ranks] = group
    return within
