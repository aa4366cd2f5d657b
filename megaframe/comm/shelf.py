"""Shelf: the host's memory as the place of tensors that are not needed for a while.

On a GPU copies run on streams of their own, the `io` lane, ordered by events alone: away as soon as
a tensor is made, back when the one before it is taken, so that neither is waited for if computing
what lies between takes longer. Pinned buffers are used again. The device's memory comes from the
stream that computes and goes back to it: what the host has started ahead of the device holds no
more of it than two tensors.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import torch
from torch import Tensor

_LEAVING = 2
"""Tensors that are on their way from a device at once."""


@dataclass
class _Buffer:
    """Pinned memory. free: when it may be written again."""

    memory: Tensor
    free: torch.cuda.Event | None = None


class Stored:
    """A tensor on the shelf."""

    def __init__(self, shelf: Shelf, x: Tensor) -> None:
        self._shelf = shelf
        self._coming: tuple[Tensor, torch.cuda.Event | None] | None = None
        self._kept, self._there = shelf._put(x)

    def fetch(self) -> None:
        """Start bringing it."""
        if self._coming is None:
            self._coming = self._shelf._get(self._kept, self._there)

    def take(self) -> Tensor:
        """The same numbers, on the device; the shelf has them no longer."""
        self.fetch()
        assert self._coming is not None
        x, arrived = self._coming
        if arrived is not None:
            torch.cuda.current_stream(x.device).wait_event(arrived)
        return x


class Shelf:
    """Of one device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._idle: dict[tuple[torch.Size, torch.dtype], list[_Buffer]] = {}
        self._leaving: deque[tuple[Tensor, torch.cuda.Event]] = deque()
        """What is being copied away, with the end of that."""
        if device.type == "cuda":
            self._out, self._in = torch.cuda.Stream(device), torch.cuda.Stream(device)

    def store(self, x: Tensor) -> Stored:
        """Put a tensor away; nobody may change it."""
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
        """Let all but so many of those that leave be used again, by what computes behind their
        copies."""
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
            # Its memory may be in use by what was computed last.
            self._in.wait_stream(torch.cuda.current_stream(self._device))
            self._in.wait_event(there)
            with torch.cuda.stream(self._in):
                x.copy_(kept.memory, non_blocking=True)
                kept.free = self._in.record_event()
        self._idle[kept.memory.shape, kept.memory.dtype].append(kept)
        return x, kept.free
