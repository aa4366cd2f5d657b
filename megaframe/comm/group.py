"""Group: ranks that communicate with each other, and the objects that record what they start."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch.distributed as dist
from torch import Tensor

from megaframe.comm.order import Order
from megaframe.comm.place import Place
from megaframe.comm.traffic import Traffic

gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
"""Collectives on parts of equal size in one tensor, by their name from torch 2.13 on or before."""


@dataclass(frozen=True)
class Group:
    """The ranks that share this rank's coordinate on every axis but `axes`.

    index: this rank's position in `ranks`.
    handle: torch's process group, None if the group is this rank alone.
    serial: finish every collective before its call returns.
    traffic: counts bytes, and says what waits are charged to.
    place: records every wait.
    order: compares what the ranks start; None to compare nothing.
    ferried: the handle is a `Ferry`, which supports the collectives of GPUs for host tensors too.
    steps: the groups over which these ranks exchange parts one after the other; empty: all at once.
    """

    axes: tuple[str, ...]
    ranks: tuple[int, ...]
    index: int
    handle: dist.ProcessGroup | None
    serial: bool = False
    traffic: Traffic = field(default_factory=Traffic)
    place: Place = field(default_factory=Place)
    order: Order | None = None
    ferried: bool = False
    steps: tuple[Group, ...] = ()

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.ranks)

    @property
    def others(self) -> tuple[int, ...]:
        """All ranks but this one."""
        return self.ranks[: self.index] + self.ranks[self.index + 1 :]

    def in_pairs(self, tensor: Tensor) -> bool:
        """Return whether all-gather and reduce-scatter of this tensor are made of messages between
        all pairs of ranks."""
        return tensor.device.type == "cpu" and not self.ferried

    def begin(self, kind: str, tensor: Tensor | None, *, alike: bool = True) -> None:
        """Call before starting an operation, so that ranks can be compared.

        kind: its name.
        tensor: a tensor whose type and shape must be the same on all ranks; None for any shape.
        alike: all ranks start the operation in the same action.
        Raises `OutOfStep` if ranks are compared and differ.
        """
        if self.order is not None and self.handle is not None:
            shape = (
                ["", "any shape"] if tensor is None else [str(tensor.dtype), str([*tensor.shape])]
            )
            axes, first = " x ".join(self.axes), self.index == 0
            self.order.begin(self.handle.group_name, axes, first, [kind, *shape], alike)


ALONE = Group((), (0,), 0, None)
"""A group of one rank, for code that runs without a mesh."""


@dataclass(frozen=True)
class Ring:
    """A ring of ranks: this rank's index, their number, the link to the next rank, and the link
    from the one before."""

    index: int = 0
    size: int = 1
    next: Group = ALONE
    before: Group = ALONE
