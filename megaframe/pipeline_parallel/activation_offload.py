"""Shelf: host memory for tensors that are not needed for a while.

On a GPU the copies run on two separate streams and are ordered by events alone. The copy to the
host starts as soon as a tensor is computed, and the copy back starts when the tensor needed before
it is taken. Nothing waits for a copy if the computation in between takes longer. Pinned buffers are
reused. Device memory is allocated on the computing stream and freed to it, so however far the host
runs ahead of the device, at most two leaving tensors hold device memory.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import torch
from torch import Tensor

_LEAVING = 2
"""Tensors that may be on their way from a device at the same time."""


@dataclass
class _Buffer:
    """A buffer on the host, pinned if the device is a GPU. free: when it may be written again."""

    memory: Tensor
    free: torch.cuda.Event | None = None


class Stored:
    """A tensor on the shelf."""

    def __init__(self, shelf: Shelf, x: Tensor) -> None:
        self._shelf = shelf
        self._coming: tuple[Tensor, torch.cuda.Event | None] | None = None
        self._kept, self._there = shelf._put(x)

    def fetch(self) -> None:
        """Start copying it back to the device."""
        if self._coming is None:
            self._coming = self._shelf._get(self._kept, self._there)

    def take(self) -> Tensor:
        """Return the tensor on the device. The shelf no longer has it."""
        self.fetch()
        assert self._coming is not None
        x, arrived = self._coming
        if arrived is not None:
            torch.cuda.current_stream(x.device).wait_event(arrived)
        return x


class Shelf:
    """The shelf of one device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._idle: dict[tuple[torch.Size, torch.dtype], list[_Buffer]] = {}
        self._leaving: deque[tuple[Tensor, torch.cuda.Event]] = deque()
        """Tensors being copied away, with the event at the end of their copy."""
        if device.type == "cuda":
            self._out, self._in = torch.cuda.Stream(device), torch.cuda.Stream(device)

    def store(self, x: Tensor) -> Stored:
        """Copy a tensor to the host. Nothing may change it afterwards."""
        return Stored(self, x)

    def _put(self, x: Tensor) -> tuple[_Buffer, torch.cuda.Event | None]:
        pool = self._idle.setdefault((x.shape, x.dtype), [])
        cuda = self._device.type == "cuda"
        kept = pool.pop() if pool else _Buffer(torch.empty_like(x, device="cpu", pin_memory=cuda))
        if not cuda:
            kept.memory.copy_(x)
            return kept, None
        self._let_go(_LEAVING - 1)
        self._out.wait_stream(torch.cuda.current_stream(self._device))
        if kept.free is not None:
            self._out.wait_event(kept.free)
        with torch.cuda.stream(self._out):
            kept.memory.copy_(x, non_blocking=True)
            there = self._out.record_event()
        self._leaving.append((x, there))
        return kept, there

    def _let_go(self, most: int) -> None:
        """Release the device memory of all but `most` leaving tensors. The computing stream waits
        for their copies before it reuses that memory."""
        here = torch.cuda.current_stream(self._device)
        while len(self._leaving) > most:
            _, there = self._leaving.popleft()
            here.wait_event(there)

    def _get(
        self, kept: _Buffer, there: torch.cuda.Event | None
    ) -> tuple[Tensor, torch.cuda.Event | None]:
        if there is None:
            x = kept.memory.clone()
        else:
            self._let_go(0)
            x = torch.empty_like(kept.memory, device=self._device)
            # Work queued on the computing stream may still use the memory of x.
            self._in.wait_stream(torch.cuda.current_stream(self._device))
            self._in.wait_event(there)
            with torch.cuda.stream(self._in):
                x.copy_(kept.memory, non_blocking=True)
                kept.free = self._in.record_event()
        self._idle[kept.memory.shape, kept.memory.dtype].append(kept)
        return x, kept.free
