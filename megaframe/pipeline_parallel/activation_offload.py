"""ActivationOffload: host memory for activations that are not needed for a while.

On a GPU the copies run on two separate streams and are ordered by events alone. The copy to the
host starts as soon as a tensor is computed, and the copy back starts when the tensor needed before
it is taken. Nothing waits for a copy if the computation in between takes longer. Pinned buffers are
reused. Device memory is allocated on the computing stream and freed to it.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import torch
from torch import Tensor

_MAX_OUTGOING = 2
"""Tensors that may be on their way from a device at the same time."""


@dataclass
class _HostBuffer:
    """A buffer on the host, pinned if the device is a GPU. free: when it may be written again."""

    memory: Tensor
    free: torch.cuda.Event | None = None


class OffloadedActivation:
    """A tensor in host memory."""

    def __init__(self, offload: ActivationOffload, x: Tensor) -> None:
        self._offload = offload
        self._incoming: tuple[Tensor, torch.cuda.Event | None] | None = None
        self._buffer, self._stored = offload._copy_out(x)

    def fetch(self) -> None:
        """Start copying it back to the device."""
        if self._incoming is None:
            self._incoming = self._offload._copy_in(self._buffer, self._stored)

    def take(self) -> Tensor:
        """Return the tensor on the device. Its host memory is free again."""
        self.fetch()
        assert self._incoming is not None
        x, arrived = self._incoming
        if arrived is not None:
            # Ordered on the device; the host does not wait.
            torch.cuda.current_stream(x.device).wait_event(arrived)
        return x


class ActivationOffload:
    """The activations of one device that are in host memory."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._idle: dict[tuple[torch.Size, torch.dtype], list[_HostBuffer]] = {}
        self._outgoing: deque[tuple[Tensor, torch.cuda.Event]] = deque()
        """Tensors being copied to the host, with the event at the end of their copy."""
        if device.type == "cuda":
            self._out, self._in = torch.cuda.Stream(device), torch.cuda.Stream(device)

    def store(self, x: Tensor) -> OffloadedActivation:
        """Copy a tensor to the host. Nothing may change it afterwards."""
        return OffloadedActivation(self, x)

    def _copy_out(self, x: Tensor) -> tuple[_HostBuffer, torch.cuda.Event | None]:
        pool = self._idle.setdefault((x.shape, x.dtype), [])
        cuda = self._device.type == "cuda"
        if pool:
            buffer = pool.pop()
        else:
            buffer = _HostBuffer(torch.empty_like(x, device="cpu", pin_memory=cuda))
        if not cuda:
            buffer.memory.copy_(x)
            return buffer, None
        # However far the host runs ahead, at most two outgoing tensors hold device memory.
        self._free_outgoing(_MAX_OUTGOING - 1)
        # The computing stream may still be writing x.
        self._out.wait_stream(torch.cuda.current_stream(self._device))
        # The buffer's last tensor may still be on its way back to the device.
        if buffer.free is not None:
            self._out.wait_event(buffer.free)
        with torch.cuda.stream(self._out):
            buffer.memory.copy_(x, non_blocking=True)
            stored = self._out.record_event()
        # Holds a reference, so the memory of x is not freed while it is being copied.
        self._outgoing.append((x, stored))
        return buffer, stored

    def _free_outgoing(self, most: int) -> None:
        """Release the device memory of all but `most` outgoing tensors. The computing stream waits
        for their copies before it reuses that memory."""
        computing = torch.cuda.current_stream(self._device)
        while len(self._outgoing) > most:
            # Drops the reference. The memory belongs to the computing stream, which therefore waits
            # for the copy before it can reuse it.
            _, stored = self._outgoing.popleft()
            computing.wait_event(stored)

    def _copy_in(
        self, buffer: _HostBuffer, stored: torch.cuda.Event | None
    ) -> tuple[Tensor, torch.cuda.Event | None]:
        if stored is None:
            # A clone, because the buffer goes back to the pool below.
            x = buffer.memory.clone()
        else:
            # Before x is allocated, which may then take the memory of these.
            self._free_outgoing(0)
            x = torch.empty_like(buffer.memory, device=self._device)
            # Work queued on the computing stream may still use the memory of x.
            self._in.wait_stream(torch.cuda.current_stream(self._device))
            self._in.wait_event(stored)
            with torch.cuda.stream(self._in):
                x.copy_(buffer.memory, non_blocking=True)
                buffer.free = self._in.record_event()
        # Reusable at once: the next copy into it waits for `free` on its stream.
        self._idle[buffer.memory.shape, buffer.memory.dtype].append(buffer)
        return x, buffer.free


def take_last_input(inputs: list[Tensor | OffloadedActivation]) -> Tensor:
    """Remove the last of the inputs of blocks and return it as a leaf; the one before it starts to
    come back."""
    x = inputs.pop()
    # A fresh leaf: the copy from the host has no graph.
    leaf = x.take().requires_grad_() if isinstance(x, OffloadedActivation) else x
    if inputs and isinstance(previous := inputs[-1], OffloadedActivation):
        previous.fetch()  # arrives while the block of the last one is computed
    return leaf
