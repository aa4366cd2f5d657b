"""Flat buffers that are reused, because on a CPU fresh memory costs a page fault every 4 KiB."""

from __future__ import annotations

from collections import defaultdict

import torch
from torch import Tensor


class Buffers:
    """Lends buffers by type and length, and takes them back."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._free: defaultdict[tuple[torch.dtype, int], list[Tensor]] = defaultdict(list)
        self.bytes = self.rooms = 0
        """Bytes of buffers that hold something, and of room for transfers; in use or not."""

    def take(self, length: int, dtype: torch.dtype) -> Tensor:
        """Return a buffer [length] with undefined content."""
        free = self._free[dtype, length]
        if free:
            return free.pop()
        made = torch.zeros(length, dtype=dtype, device=self.device)
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
