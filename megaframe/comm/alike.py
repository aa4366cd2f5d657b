"""Alike: a process group of one process that plays a rank alone, as if all others did the like.

Nothing travels. A tensor without content (on the meta device) stays so; numbers that say how much
comes from where are real, and are taken from what this rank gives itself, because each other one
would give it as much.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import Tensor


class Done(dist.Work):
    """Work that is done."""

    def wait(self, timeout: timedelta | None = None) -> bool:
        """There is nothing to wait for."""
        return True

    def is_completed(self) -> bool:
        """It is."""
        return True


class Alike(dist.ProcessGroup):
    """Rank `index` of `size` that are alike."""

    def __init__(self, index: int, size: int) -> None:
        super().__init__(index, size)  # type: ignore[call-arg]  # the stubs know another one only
        self._arriving: dict[int, list[Tensor]] = {}

    def allreduce(self, *given: Any, **options: Any) -> Done:
        """The sum or the largest of what all have: as it is here, up to a factor."""
        return Done()

    def _allgather_base(self, out: Tensor, given: Tensor, opts: object = None) -> Done:
        for part in out.chunk(self.size()):
            part.copy_(given)
        return Done()

    def allgather(self, *given: Any, **options: Any) -> Done:
        """Every rank has what this one has."""
        (parts,), (own,) = given[:2]
        for part in parts:
            _fill(part, own)
        return Done()

    def _reduce_scatter_base(self, out: Tensor, given: Tensor, opts: object = None) -> Done:
        return Done()

    def reduce_scatter(self, *given: object) -> Done:
        """Sums are of numbers that nobody looks at."""
        return Done()

    def alltoall_base(
        self,
        out: Tensor,
        given: Tensor,
        coming: list[int],
        leaving: list[int],
        opts: object = None,
    ) -> Done:
        """From each rank comes what this one keeps."""
        if not out.is_meta:
            even = [len(given) // self.size()] * self.size()
            own = given.split(leaving or even)[self.rank()]
            for part in out.split(coming or even):
                _fill(part, own)
        return Done()

    def recv(self, tensors: list[Tensor], source: int, tag: int) -> Done:
        """It arrives when this rank sends the like."""
        if not tensors[0].is_meta:
            self._arriving.setdefault(source, []).append(tensors[0])
        return Done()

    def send(self, tensors: list[Tensor], target: int, tag: int) -> Done:
        """The other one sends it back."""
        for into in self._arriving.pop(target, []):
            _fill(into, tensors[0])
        return Done()

    def barrier(self, opts: object = None) -> Done:
        """All are here."""
        return Done()


def _fill(into: Tensor, given: Tensor) -> None:
    """Copy as often as it goes; nothing is known where nothing is given."""
    if into.is_meta:
        return
    if not len(given):
        into.zero_()
        return
    times = -(-len(into) // len(given))
    into.copy_(given.repeat(times, *[1] * (given.dim() - 1))[: len(into)])
