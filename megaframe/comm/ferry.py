"""Ferry: a group of gloo for tensors of any device, which travel through the host's memory.

With it several ranks share one GPU, where NCCL refuses to run, and call the very collectives that
they call over NCCL. It is for trying layouts, not for speed: what leaves is copied while the rank
waits, and what comes is copied when it is waited for.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megaframe.comm.group import gather_single, scatter_single


class Crossing(dist.Work):
    """Work of gloo on the host, whose results are then copied to where they are wanted."""

    def __init__(self, work: dist.Work, coming: Sequence[tuple[Tensor, Tensor]] = ()) -> None:
        super().__init__()
        self._work, self._coming = work, coming

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait for all of it."""
        self._work.wait() if timeout is None else self._work.wait(timeout)
        for into, found in self._coming:
            into.copy_(found)
        self._coming = ()
        return True

    def is_completed(self) -> bool:
        """Whether nothing is left to wait for but a copy."""
        return self._work.is_completed()


class Ferry(dist.ProcessGroup):
    """The ranks of the group `over`, which is gloo's. Of the forms that a collective of torch may
    be called in there is the one that this package uses."""

    def __init__(self, over: dist.ProcessGroup) -> None:
        super().__init__(over.rank(), over.size())  # type: ignore[call-arg]  # as in `Alike`
        self._over = over

    @property
    def group_name(self) -> Any:
        """That of gloo's group."""
        return self._over.group_name

    def allreduce(self, tensors: list[Tensor], opts: Any) -> Crossing:  # type: ignore[override]
        """In place."""
        (tensor,) = tensors
        host = _leaving(tensor)
        work = dist.all_reduce(host, opts.reduceOp, self._over, async_op=True)
        return Crossing(work, [(tensor, host)])

    def all_gather_single(self, out: Tensor, given: Tensor, opts: object = None) -> Crossing:
        """Parts of one size."""
        host, own = _arriving(out), _leaving(given)
        work = gather_single(host, own, self._over, async_op=True)
        return Crossing(work, [(out, host)])

    def allgather(  # type: ignore[override]
        self, outs: list[list[Tensor]], given: list[Tensor], opts: object
    ) -> Crossing:
        """Parts of any sizes, which gloo takes from all to all alone."""
        (parts,), (own,) = outs, given
        coming, leaving = [part.numel() for part in parts], [own.numel()] * self.size()
        flat = _leaving(own).flatten().repeat(self.size())
        whole = flat.new_empty(sum(coming))
        work = dist.all_to_all_single(whole, flat, coming, leaving, self._over, async_op=True)
        found = zip(parts, whole.split(coming), strict=True)
        return Crossing(work, [(part, flat.view_as(part)) for part, flat in found])

    def reduce_scatter_single(self, out: Tensor, given: Tensor, opts: Any) -> Crossing:
        """Parts of one size."""
        host, all_of_it = _arriving(out), _leaving(given)
        work = scatter_single(host, all_of_it, opts.reduceOp, self._over, async_op=True)
        return Crossing(work, [(out, host)])

    def reduce_scatter(  # type: ignore[override]
        self, outs: list[Tensor], given: list[list[Tensor]], opts: Any
    ) -> Crossing:
        """Parts of any sizes."""
        (out,), (parts,) = outs, given
        flat = torch.cat([_leaving(part).flatten() for part in parts])
        work = dist.all_reduce(flat, opts.reduceOp, self._over, async_op=True)
        found = flat.split([part.numel() for part in parts])[self.rank()]
        return Crossing(work, [(out, found.view_as(out))])

    def all_to_all_single(
        self,
        out: Tensor,
        given: Tensor,
        coming: list[int],
        leaving: list[int],
        opts: object = None,
    ) -> Crossing:
        """Even parts where no sizes are given."""
        host, own = _arriving(out), _leaving(given)
        work = dist.all_to_all_single(
            host, own, coming or None, leaving or None, self._over, async_op=True
        )
        return Crossing(work, [(out, host)])

    # As torch called them before 2.13.
    _allgather_base = all_gather_single  # type: ignore[assignment]
    _reduce_scatter_base = reduce_scatter_single  # type: ignore[assignment]
    alltoall_base = all_to_all_single  # type: ignore[assignment]

    def send(self, tensors: list[Tensor], target: int, tag: int) -> Crossing:
        """To one rank."""
        (tensor,) = tensors
        work = dist.isend(_leaving(tensor), group=self._over, group_dst=target, tag=tag)
        assert work is not None, "this rank is one of the group's"
        return Crossing(work)

    def recv(self, tensors: list[Tensor], source: int, tag: int) -> Crossing:
        """From one rank."""
        (tensor,) = tensors
        host = _arriving(tensor)
        work = dist.irecv(host, group=self._over, group_src=source, tag=tag)
        assert work is not None, "this rank is one of the group's"
        return Crossing(work, [(tensor, host)])

    def barrier(self, opts: object = None) -> Crossing:
        """All are here."""
        return Crossing(dist.barrier(self._over, async_op=True))


def _leaving(tensor: Tensor) -> Tensor:
    """A copy on the host, of its own where the tensor is there as well."""
    return tensor.detach().to("cpu", copy=True).contiguous()


def _arriving(like: Tensor) -> Tensor:
    """Memory on the host for such a tensor."""
    return torch.empty(like.shape, dtype=like.dtype)
