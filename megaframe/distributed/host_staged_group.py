"""Host-staged group: a gloo group for tensors on any device, transferred through host memory.

It lets several ranks share one GPU, where NCCL refuses to run, and call the same collectives as
over NCCL. It is for trying layouts, not for speed: inputs are copied to the host while the rank
waits, and results are copied back when they are waited for.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megaframe.distributed.group import gather_single, scatter_single


class HostStagedWork(dist.Work):
    """Work of gloo on host tensors, whose results `wait` then copies to their destination."""

    def __init__(self, work: dist.Work, coming: Sequence[tuple[Tensor, Tensor]] = ()) -> None:
        """Hold the work until it is waited for.

        Args:
            work: Gloo's work.
            coming: (destination, host tensor) of each result.
        """
        super().__init__()
        self._work, self._coming = work, coming

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait for the work, then copy its results."""
        self._work.wait() if timeout is None else self._work.wait(timeout)
        for into, result in self._coming:
            into.copy_(result)
        self._coming = ()
        return True

    def is_completed(self) -> bool:
        """Return whether gloo's work is done, after which only copies remain."""
        return self._work.is_completed()


class HostStagedGroup(dist.ProcessGroup):
    """The ranks of the gloo group `over`. Only those forms of torch's collectives are implemented
    that this package calls."""

    def __init__(self, over: dist.ProcessGroup) -> None:
        super().__init__(over.rank(), over.size())  # type: ignore[call-arg]  # as in `FakeGroup`
        self._over = over

    @property
    def group_name(self) -> Any:
        """The name of the gloo group."""
        return self._over.group_name

    def allreduce(self, tensors: list[Tensor], opts: Any) -> HostStagedWork:  # type: ignore[override]
        """Reduce one tensor in place."""
        (tensor,) = tensors
        host = _copy_to_host(tensor)
        work = dist.all_reduce(host, opts.reduceOp, self._over, async_op=True)
        return HostStagedWork(work, [(tensor, host)])

    def all_gather_single(self, out: Tensor, tensor: Tensor, opts: object = None) -> HostStagedWork:
        """Gather parts of equal size into one tensor."""
        host_out, host_tensor = _allocate_on_host(out), _copy_to_host(tensor)
        work = gather_single(host_out, host_tensor, self._over, async_op=True)
        return HostStagedWork(work, [(out, host_out)])

    def allgather(  # type: ignore[override]
        self, outs: list[list[Tensor]], tensors: list[Tensor], opts: object
    ) -> HostStagedWork:
        """Gather parts of any sizes, by gloo's all-to-all, its only collective that allows them."""
        (parts,), (tensor,) = outs, tensors
        coming, leaving = [part.numel() for part in parts], [tensor.numel()] * self.size()
        flat = _copy_to_host(tensor).flatten().repeat(self.size())
        gathered = flat.new_empty(sum(coming))
        work = dist.all_to_all_single(gathered, flat, coming, leaving, self._over, async_op=True)
        results = zip(parts, gathered.split(coming), strict=True)
        return HostStagedWork(work, [(part, flat.view_as(part)) for part, flat in results])

    def reduce_scatter_single(self, out: Tensor, tensor: Tensor, opts: Any) -> HostStagedWork:
        """Sum, and scatter parts of equal size."""
        host_out, host_tensor = _allocate_on_host(out), _copy_to_host(tensor)
        work = scatter_single(host_out, host_tensor, opts.reduceOp, self._over, async_op=True)
        return HostStagedWork(work, [(out, host_out)])

    def reduce_scatter(  # type: ignore[override]
        self, outs: list[Tensor], tensor_lists: list[list[Tensor]], opts: Any
    ) -> HostStagedWork:
        """Sum, and scatter parts of any sizes, by an all-reduce of all parts."""
        (out,), (parts,) = outs, tensor_lists
        flat = torch.cat([_copy_to_host(part).flatten() for part in parts])
        work = dist.all_reduce(flat, opts.reduceOp, self._over, async_op=True)
        own_part = flat.split([part.numel() for part in parts])[self.rank()]
        return HostStagedWork(work, [(out, own_part.view_as(out))])

    def all_to_all_single(
        self,
        out: Tensor,
        tensor: Tensor,
        coming: list[int],
        leaving: list[int],
        opts: object = None,
    ) -> HostStagedWork:
        """Exchange parts with the given sizes, or of equal size if the lists are empty.

        Args:
            out: Gets the parts of all ranks.
            tensor: The parts for all ranks.
            coming: Rows from each rank; empty for equal parts.
            leaving: Rows to each rank; empty for equal parts.
            opts: Ignored.
        """
        host_out, host_tensor = _allocate_on_host(out), _copy_to_host(tensor)
        work = dist.all_to_all_single(
            host_out, host_tensor, coming or None, leaving or None, self._over, async_op=True
        )
        return HostStagedWork(work, [(out, host_out)])

    # The names before torch 2.13.
    _allgather_base = all_gather_single  # type: ignore[assignment]
    _reduce_scatter_base = reduce_scatter_single  # type: ignore[assignment]
    alltoall_base = all_to_all_single  # type: ignore[assignment]

    def send(self, tensors: list[Tensor], target: int, tag: int) -> HostStagedWork:
        """Send to one rank."""
        (tensor,) = tensors
        work = dist.isend(_copy_to_host(tensor), group=self._over, group_dst=target, tag=tag)
        assert work is not None, "this rank is one of the group's"
        return HostStagedWork(work)

    def recv(self, tensors: list[Tensor], source: int, tag: int) -> HostStagedWork:
        """Receive from one rank."""
        (tensor,) = tensors
        host = _allocate_on_host(tensor)
        work = dist.irecv(host, group=self._over, group_src=source, tag=tag)
        assert work is not None, "this rank is one of the group's"
        return HostStagedWork(work, [(tensor, host)])

    def barrier(self, opts: object = None) -> HostStagedWork:
        """Wait for all ranks of the group."""
        return HostStagedWork(dist.barrier(self._over, async_op=True))


def _copy_to_host(tensor: Tensor) -> Tensor:
    """Return a copy on the host, also if the tensor is already there."""
    return tensor.detach().to("cpu", copy=True).contiguous()


def _allocate_on_host(like: Tensor) -> Tensor:
    """Return an empty host tensor of the same shape and type."""
    return torch.empty(like.shape, dtype=like.dtype)
