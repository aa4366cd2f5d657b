"""Group: ranks that communicate with each other, and the objects that record what they start."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch.distributed as dist
from torch import Tensor

from megaframe.distributed.desync_check import DesyncCheck, describe_tensor
from megaframe.distributed.rank_progress import RankProgress
from megaframe.distributed.traffic import Traffic

gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
"""Collectives on parts of equal size in one tensor, by their name from torch 2.13 on or before."""


@dataclass(frozen=True)
class Group:
    """The ranks that share this rank's coordinate on every axis but `axes`.

    Attributes:
        axes: Names of the axes along which the ranks lie.
        ranks: Their numbers in the world.
        index: This rank's position in `ranks`.
        handle: Torch's process group, None if the group is this rank alone.
        serial: Whether every collective is finished before its call returns.
        traffic: Counts bytes, and says what waits are charged to.
        progress: Records every wait.
        desync_check: Compares what the ranks start; None to compare nothing.
        host_staged: Whether the handle is a `HostStagedGroup`, which has the collectives of GPUs
            for host tensors too.
        control: Whether it is for small values. A rank then connects to few of the others, and
            only when it sends to them.
        steps: The groups over which these ranks exchange parts one after the other; empty for all
            at once.
    """

    axes: tuple[str, ...]
    ranks: tuple[int, ...]
    index: int
    handle: dist.ProcessGroup | None
    serial: bool = False
    traffic: Traffic = field(default_factory=Traffic)
    progress: RankProgress = field(default_factory=RankProgress)
    desync_check: DesyncCheck | None = None
    host_staged: bool = False
    control: bool = False
    steps: tuple[Group, ...] = ()

    @cached_property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.ranks)

    @property
    def others(self) -> tuple[int, ...]:
        """All ranks but this one."""
        return self.ranks[: self.index] + self.ranks[self.index + 1 :]

    def should_send_pairwise(self, tensor: Tensor) -> bool:
        """Return whether all-gather and reduce-scatter of this tensor are made of messages between
        all pairs of ranks."""
        # Gloo's own collectives are slower and add in low precision (`collectives.py`).
        return tensor.device.type == "cpu" and not self.host_staged and not self.control

    def should_batch_messages(self, tensor: Tensor) -> bool:
        """Return whether several sends and receives of such tensors are one operation, as in a
        group of NCCL's calls."""
        return tensor.is_cuda and not self.host_staged

    def check_collective(self, kind: str, tensor: Tensor | None) -> None:
        """Call before starting a collective, so that ranks can be compared.

        Args:
            kind: Its name.
            tensor: A tensor whose type and shape must be the same on all ranks; None for any
                shape.

        Raises:
            CollectiveMismatch: Ranks are compared and differ.
        """
        if self.desync_check is not None and self.handle is not None:
            self.desync_check.check_collective(
                self.handle.group_name, self._over, kind, tensor, self.index == 0
            )

    def check_message(self, tensor: Tensor, source: int, target: int) -> None:
        """Call before starting a send or a receive, so that both ends can be compared.

        Args:
            tensor: What is sent, or where it is received; type and shape must be the same.
            source: Index of the sending rank.
            target: Index of the receiving rank; one of the two is this rank.

        Raises:
            CollectiveMismatch: Ranks are compared and differ.
        """
        if self.desync_check is not None and self.handle is not None:
            ends = self.ranks[source], self.ranks[target]
            name, description = self.handle.group_name, describe_tensor(tensor.dtype, tensor.shape)
            self.desync_check.check_message(name, self._over, description, *ends)

    def check_parts(self, tensor: Tensor, leaving: Sequence[int], coming: Sequence[int]) -> None:
        """Call before starting an exchange of parts of any sizes, so that both ends of each part
        can be compared.

        Args:
            tensor: Has the type of all parts, and their shape but for the number of rows.
            leaving: Rows of the part to each rank.
            coming: Rows of the part from each rank.

        Raises:
            CollectiveMismatch: Ranks are compared and differ.
        """
        if self.desync_check is None or self.handle is None:
            return
        me, name = self.ranks[self.index], self.handle.group_name
        for other, out, home in zip(self.ranks, leaving, coming, strict=True):
            # Each part as a message of its own, so that both its ends can be named.
            for rows, ends in ((out, (me, other)), (home, (other, me))):
                description = describe_tensor(tensor.dtype, (rows, *tensor.shape[1:]))
                if other != me:
                    self.desync_check.check_message(name, self._over, description, *ends)

    @property
    def _over(self) -> str:
        return " x ".join(self.axes)


ALONE = Group((), (0,), 0, None)
"""A group of one rank, for code that runs without a mesh."""


@dataclass(frozen=True)
class Ring:
    """A ring of ranks.

    Attributes:
        index: This rank's index.
        size: Number of ranks.
        group: All of them. It is one group because a rank sends and receives in one operation
            (`shift_ring`).
    """

    index: int = 0
    size: int = 1
    group: Group = ALONE

    @property
    def next(self) -> int:
        """Index in the group of the rank after this one."""
        return self._wrap_index(self.index + 1)

    @property
    def before(self) -> int:
        """Index in the group of the rank before this one."""
        return self._wrap_index(self.index - 1)

    def _wrap_index(self, offset: int) -> int:
        return offset % self.size
