"""Flat buffers that are reused, because on a CPU fresh memory costs a page fault every 4 KiB."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor


class BufferPool:
    """Lends buffers by type and length, and takes them back.

    Attributes:
        device: Where the buffers are.
        bytes: Size of all buffers that hold weights, values or gradients, lent or not.
        receive_bytes: Size of all buffers into which transfers write, lent or not.
    """

    def __init__(
        self, device: torch.device, allocate: Callable[[int, torch.dtype], Tensor] | None = None
    ) -> None:
        """Start an empty pool.

        Args:
            device: Where the buffers are.
            allocate: Returns zeros on the device, by length and type; by default torch's.
        """
        self.device = device
        self._allocate = allocate or partial(_allocate_zeros, device)
        self._free: defaultdict[tuple[torch.dtype, int], list[Tensor]] = defaultdict(list)
        self.bytes = self.receive_bytes = 0

    def borrow(self, length: int, dtype: torch.dtype) -> Tensor:
        """Return a buffer [length] with undefined content."""
        # A buffer is reused only for the same type and length, so it is never cut.
        free = self._free[dtype, length]
        if free:
            return free.pop()
        buffer = self._allocate(length, dtype)
        self.bytes += buffer.nbytes
        return buffer

    def borrow_receive_buffer(self, length: int, dtype: torch.dtype) -> Tensor:
        """Return a buffer for what a transfer brings, counted separately: a GPU needs none."""
        before = self.bytes
        buffer = self.borrow(length, dtype)
        self.receive_bytes += self.bytes - before
        self.bytes = before
        return buffer

    def give_back(self, buffer: Tensor) -> None:
        """Take back a buffer, whole as it was lent."""
        self._free[buffer.dtype, len(buffer)].append(buffer)


def _allocate_zeros(device: torch.device, length: int, dtype: torch.dtype) -> Tensor:
    return torch.zeros(length, dtype=dtype, device=device)
