"""Flat buffers that are reused, because on a CPU fresh memory costs a page fault every 4 KiB."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor


class Buffers:
    """Lends buffers by type and length, and takes them back.

    allocate: returns zeros on the device, by length and type; by default torch's.
    """

    def __init__(
        self,
        device: torch.device,
        allocate: Callable[[int, torch.dtype], Tensor] | None = None,
    ) -> None:
        self.device = device
        self._allocate = allocate or partial(_zeros, device)
        self._free: defaultdict[tuple[torch.dtype, int], list[Tensor]] = defaultdict(list)
        self.bytes = self.rooms = 0
        """Bytes of buffers that hold something, and of room for transfers; in use or not."""

    def take(self, length: int, dtype: torch.dtype) -> Tensor:
        """Return a buffer [length] with undefined content."""
        free = self._free[dtype, length]
        if free:
            return free.pop()
        made = self._allocate(length, dtype)
        self.bytes += made.nbytes
        return made

    def room(self, length: int, dtype: torch.dtype) -> Tensor:
        """Return a buffer for what a transfer brings, counted separately: a GPU needs none."""
        before = self.bytes
        room = self.take(length, dtype)
        self.rooms += self.bytes - before
        self.bytes = before
        return room

    def give(self, buffer: Tensor) -> None:
        """Take back a buffer, whole as it was lent."""
        self._free[buffer.dtype, len(buffer)].append(buffer)


def _zeros(device: torch.device, length: int, dtype: torch.dtype) -> Tensor:
    return torch.zeros(length, dtype=dtype, device=device)
