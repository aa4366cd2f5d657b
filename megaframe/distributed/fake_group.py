"""Fake group: a process group for one rank that runs alone, as if all other ranks did the same.

Nothing is transferred. Tensors without content (on the meta device) stay so. Real numbers, such as
how many rows come from which rank, are filled with what this rank sends to itself, because every
other rank would send it the same. torch's own fake group (`torch.testing._internal.distributed`)
leaves tensors that are received as they were, which these numbers must not be.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import Tensor


class FinishedWork(dist.Work):
    """Work that is already done."""

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Return at once: there is nothing to wait for."""
        return True

    def is_completed(self) -> bool:
        """Return true."""
        return True


class FakeGroup(dist.ProcessGroup):
    """Rank `index` of `size` ranks that all do the same."""

    def __init__(self, index: int, size: int) -> None:
        super().__init__(index, size)  # type: ignore[call-arg]  # the stubs know another one only
        self._arriving: dict[int, list[Tensor]] = {}

    def allreduce(self, *args: Any, **options: Any) -> FinishedWork:
        """Leave the tensor as it is: a sum or maximum over equal tensors, up to a factor."""
        return FinishedWork()

    def _allgather_base(self, out: Tensor, tensor: Tensor, opts: object = None) -> FinishedWork:
        for part in out.chunk(self.size()):
            part.copy_(tensor)
        return FinishedWork()

    def allgather(self, *args: Any, **options: Any) -> FinishedWork:
        """Fill every part with this rank's tensor."""
        (parts,), (tensor,) = args[:2]
        for part in parts:
            _fill(part, tensor)
        return FinishedWork()

    def _reduce_scatter_base(
        self, out: Tensor, tensor: Tensor, opts: object = None
    ) -> FinishedWork:
        return FinishedWork()

    def reduce_scatter(self, *args: object) -> FinishedWork:
        """Do nothing: no code reads these sums."""
        return FinishedWork()

    def alltoall_base(
        self,
        out: Tensor,
        tensor: Tensor,
        coming: list[int],
        leaving: list[int],
        opts: object = None,
    ) -> FinishedWork:
        """Fill the part from each rank with what this rank sends to itself.

        Args:
            out: Gets the parts of all ranks.
            tensor: The parts for all ranks.
            coming: Rows from each rank; empty for equal parts.
            leaving: Rows to each rank; empty for equal parts.
            opts: Ignored.
        """
        if not out.is_meta:
            even = [len(tensor) // self.size()] * self.size()
            sent_to_itself = tensor.split(leaving or even)[self.rank()]
            for part in out.split(coming or even):
                _fill(part, sent_to_itself)
        return FinishedWork()

    def recv(self, tensors: list[Tensor], source: int, tag: int) -> FinishedWork:
        """Remember the tensor; it is filled when this rank sends to the same rank."""
        if not tensors[0].is_meta:
            self._arriving.setdefault(source, []).append(tensors[0])
        return FinishedWork()

    def send(self, tensors: list[Tensor], target: int, tag: int) -> FinishedWork:
        """Fill all tensors that are to be received from `target` with the one sent."""
        for into in self._arriving.pop(target, []):
            _fill(into, tensors[0])
        return FinishedWork()

    def barrier(self, opts: object = None) -> FinishedWork:
        """Return at once."""
        return FinishedWork()


def _fill(into: Tensor, tensor: Tensor) -> None:
    """Fill `into` by repeating `tensor` along the first dim; zero if `tensor` is empty."""
    if into.is_meta:
        return
    if not len(tensor):
        into.zero_()
        return
    times = -(-len(into) // len(tensor))
    into.copy_(tensor.repeat(times, *[1] * (tensor.dim() - 1))[: len(into)])
