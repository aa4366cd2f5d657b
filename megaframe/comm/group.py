"""Group: some ranks that communicate, and what their collectives are told to and counted in."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch.distributed as dist
from torch import Tensor

from megaframe.comm.order import Order
from megaframe.comm.place import Place
from megaframe.comm.traffic import Traffic

gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
"""Parts of one size in one tensor, by the name that torch has for it from 2.13 on, or before."""


@dataclass(frozen=True)
class Group:
    """The ranks that share this rank's coordinate on every axis but `axes`.

    `handle` is the process group of torch, None when the group is this rank alone.
    `serial` finishes every collective before returning, in the order of the calls.
    `place` is told of every wait. `order`, where there is one, compares what the ranks start.
    `ferried`: the handle is a `Ferry`, with the collectives of GPUs for the host's tensors too.
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

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.ranks)

    @property
    def others(self) -> tuple[int, ...]:
        """All ranks but this one."""
        return self.ranks[: self.index] + self.ranks[self.index + 1 :]

    def in_pairs(self, tensor: Tensor) -> bool:
        """Whether gathering and scattering such a tensor is made of messages between all pairs."""
        return tensor.device.type == "cpu" and not self.ferried

    def begin(self, kind: str, tensor: Tensor | None, *, alike: bool = True) -> None:
        """Something is about to start; raises `OutOfStep` where ranks are compared and differ.
        tensor: of one type and shape on all ranks. alike: whether they start it in one action."""
        if self.order is not None and self.handle is not None:
            shape = (
                ["", "any shape"] if tensor is None else [str(tensor.dtype), str([*tensor.shape])]
            )
            axes, first = " x ".join(self.axes), self.index == 0
            self.order.begin(self.handle.group_name, axes, first, [kind, *shape], alike)


ALONE = Group((), (0,), 0, None)
"""A group of one rank, for what runs without a mesh."""


@dataclass(frozen=True)
class Ring:
    """Ranks in a circle: which of how many this is, and links to the next one and from the one
    before."""

    index: int = 0
    size: int = 1
    next: Group = ALONE
    before: Group = ALONE
