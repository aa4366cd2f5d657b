"""Flat buffers that are used again: on a CPU fresh memory costs a page fault every 4 KiB."""

from __future__ import annotations

from collections import defaultdict

import torch
from torch import Tensor


class Buffers:
    """Hands out buffers by type and length, and takes them back."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._free: defaultdict[tuple[torch.dtype, int], list[Tensor]] = defaultdict(list)
        self.bytes = self.rooms = 0
        """Made so far, in use or not: those that hold something, and room for transfers."""

    def take(self, length: int, dtype: torch.dtype) -> Tensor:
        """A buffer [length] with anything in it."""
        free = self._free[dtype, length]
        if free:
            return free.pop()
        made = torch.zeros(length, dtype=dtype, device=self.device)
        self.bytes += made.nbytes
        return made

    def room(self, length: int, dtype: torch.dtype) -> Tensor:
        """The like for what a transfer brings, counted apart: a GPU needs none."""
        before = self.bytes
        room = self.take(length, dtype)
        self.rooms += self.bytes - before
        self.bytes = before
        return room

    def give(self, buffer: Tensor) -> None:
        """Take a buffer back, whole as it was handed out."""
        self._free[buffer.dtype, len(buffer)].append(buffer)
