"""StateOffload: carries optimizer state between host memory and the device, or leaves it there.

What is in host memory comes to the device a chunk at a time, through three staging buffers, each
direction in its own stream. A staging buffer is used again only when its chunk is back. Events on
the device ensure this without the host waiting, so however far ahead the host is, no more staging
buffers are needed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from megaframe.architecture.optimizer_state import OFFLOAD_BUFFERS

_ALIGNMENT = 512
"""Bytes to which each tensor in a staging buffer is aligned."""
StateParts = Mapping[str, tuple[Tensor, ...]]
"""Tensors of a chunk, by the name of the state that they store."""


@dataclass
class _StagingBuffer:
    """Memory on the device. free: the event after which the chunk that was in it is back."""

    memory: Tensor
    free: torch.cuda.Event | None = None


@dataclass(frozen=True)
class StagedChunk:
    """A chunk on the device.

    Attributes:
        parts: The chunk; may be changed until it is written back.
        buffer: The memory that it is in; None if it has not moved.
    """

    parts: StateParts
    buffer: _StagingBuffer | None = None


class StateOffload:
    """State that stays on the device that computes: nothing moves.

    Attributes:
        device: The device that computes if the state is elsewhere, else None.
        host_bytes: Size of what is stored in host memory.
    """

    device: torch.device | None = None
    host_bytes = 0

    @property
    def staging_bytes(self) -> int:
        """Size of the staging buffers on the device."""
        return 0

    def store(self, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Return the tensors, in the memory in which they are to stay."""
        return tensors

    def fetch(self, parts: StateParts, after: torch.cuda.Event | None) -> StagedChunk:
        """Start bringing a chunk to the device.

        Args:
            parts: Where the chunk is stored.
            after: The event that its last `write_back` returned.
        """
        return StagedChunk(parts)

    def wait_for_fetched(self) -> None:
        """Let all later computation use what has been fetched so far."""

    def write_back(self, chunk: StagedChunk, home: StateParts) -> torch.cuda.Event | None:
        """Start writing a chunk, as computed so far, to where it is stored. Returns the event after
        which it is there, or None if there is nothing to wait for."""
        return None

    def synchronize(self) -> None:
        """Return when everything has been written back, so that the host may read and change it."""


class HostOffload(StateOffload):
    """State in host memory, for a device that copies in order with its computation."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.host_bytes = device, 0
        self._buffers = [_StagingBuffer(self._allocate(0)) for _ in range(OFFLOAD_BUFFERS)]
        self._next = 0

    @property
    def staging_bytes(self) -> int:
        return sum(buffer.memory.nbytes for buffer in self._buffers)

    def store(self, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        self.host_bytes += sum(tensor.nbytes for tensor in tensors)
        return tensors

    def fetch(self, parts: StateParts, after: torch.cuda.Event | None) -> StagedChunk:
        # Three buffers take turns: while one chunk is computed with, the next one comes and the one
        # before goes back.
        buffer = self._buffers[self._next]
        self._next = (self._next + 1) % OFFLOAD_BUFFERS
        # Sized by the largest chunk so far, so it grows a few times and then never again.
        needed = sum(_round_up(tensor.nbytes) for part in parts.values() for tensor in part)
        if len(buffer.memory) < needed:  # chunks on their way keep their memory
            for staging in self._buffers:
                staging.memory = self._allocate(needed)
        chunk = StagedChunk(_make_views(buffer.memory, parts), buffer)
        self._copy_in(parts, chunk, after)
        return chunk

    def write_back(self, chunk: StagedChunk, home: StateParts) -> torch.cuda.Event | None:
        copy_parts(chunk.parts, home)
        return None

    def _allocate(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.uint8, device=self.device)

    def _copy_in(
        self, parts: StateParts, chunk: StagedChunk, after: torch.cuda.Event | None
    ) -> None:
        copy_parts(parts, chunk.parts)


class GpuHostOffload(HostOffload):
    """State in pinned host memory, for a GPU: copies run beside the computation, with a stream for
    each direction."""

    def __init__(self, device: torch.device) -> None:
        self._inward, self._outward = torch.cuda.Stream(device), torch.cuda.Stream(device)
        super().__init__(device)

    def store(self, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return super().store(tuple(tensor.pin_memory() for tensor in tensors))

    def wait_for_fetched(self) -> None:
        # Orders streams on the device; the host continues at once.
        torch.cuda.current_stream(self.device).wait_stream(self._inward)

    def write_back(self, chunk: StagedChunk, home: StateParts) -> torch.cuda.Event | None:
        assert chunk.buffer is not None
        # The copy must see the changed chunk, which the computing stream may still be writing.
        self._outward.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._outward):
            copy_parts(chunk.parts, home)
            # The next fetch into this buffer waits for the event on the device; the host does not
            # wait.
            chunk.buffer.free = self._outward.record_event()
        return chunk.buffer.free

    def synchronize(self) -> None:
        # Here the host waits, because it is about to read the memory itself.
        self._outward.synchronize()

    def _allocate(self, size: int) -> Tensor:
        memory = super()._allocate(size)
        for stream in (self._inward, self._outward):
            # Fresh memory may still be used by earlier work of the computing stream.
            stream.wait_stream(torch.cuda.current_stream(self.device))
            memory.record_stream(stream)  # not reused before they are done with it
        return memory

    def _copy_in(
        self, parts: StateParts, chunk: StagedChunk, after: torch.cuda.Event | None
    ) -> None:
        assert chunk.buffer is not None
        # The buffer's last chunk must have left it, and this chunk must have been written back.
        for event in (chunk.buffer.free, after):
            if event is not None:
                self._inward.wait_event(event)
        with torch.cuda.stream(self._inward):
            copy_parts(parts, chunk.parts)


NO_OFFLOAD = StateOffload()


def offload_to_host(device: torch.device) -> StateOffload:
    """Return the offload of a device's optimizer state to host memory."""
    return GpuHostOffload(device) if device.type == "cuda" else HostOffload(device)


def copy_parts(sources: StateParts, targets: StateParts) -> None:
    """Copy each source to its target, without a wait of the host for a device."""
    for name, part in sources.items():
        for source, target in zip(part, targets[name], strict=True):
            target.copy_(source, non_blocking=True)


def _round_up(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _make_views(memory: Tensor, parts: StateParts) -> StateParts:
    """Return views of `memory` for the parts, one after the other."""
    views, start = {}, 0
    for name, part in parts.items():
        of_part = []
        for tensor in part:
            # A view as another type needs a start that is aligned to it.
            of_part.append(memory[start : start + tensor.nbytes].view(tensor.dtype))
            start += _round_up(tensor.nbytes)
        views[name] = tuple(of_part)
    return views
