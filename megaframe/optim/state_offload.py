"""Route: carries data between the place where it is kept, possibly host memory, and the device.

What is kept on the host comes to the device a chunk at a time. Three rooms (buffers on the device)
take turns: while one chunk is computed with, the next one comes and the one before goes back, each
direction in its own stream. A room is used again only when its chunk is back home. Events on the
device ensure this without the host waiting, so however far ahead the host is, no more rooms are
needed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from megaframe.architecture.optimizer_state import OFFLOAD_BUFFERS

_ALIGNMENT = 512
"""Bytes to which each tensor in a room is aligned."""
Parts = Mapping[str, tuple[Tensor, ...]]


@dataclass
class _Room:
    """Memory on the device. free: the event after which the chunk that was in it is back home."""

    memory: Tensor
    free: torch.cuda.Event | None = None


@dataclass(frozen=True)
class Visit:
    """A chunk on the device. parts: may be changed until they are put back."""

    parts: Parts
    room: _Room | None = None


class Route:
    """The route of what is kept on the device that computes, where nothing moves. device: the
    device that computes if data is kept elsewhere, else None. bytes: kept elsewhere."""

    device: torch.device | None = None
    bytes = 0

    @property
    def rooms(self) -> int:
        """Bytes of rooms on the device."""
        return 0

    def keep(self, made: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Return the tensors, in the memory in which they are to be kept."""
        return made

    def fetch(self, parts: Parts, after: torch.cuda.Event | None) -> Visit:
        """Start bringing what is kept. after: the event that its last `put_back` returned."""
        return Visit(parts)

    def arrive(self) -> None:
        """Let all later computation use what has been fetched so far."""

    def put_back(self, visit: Visit, home: Parts) -> torch.cuda.Event | None:
        """Start bringing back the visit's parts as computed so far. Returns the event after which
        they are back, or None if there is nothing to wait for."""
        return None

    def settle(self) -> None:
        """Return when everything has been put back, so that the host may read and change it."""


class HostRoute(Route):
    """The route between host memory and a device that copies in order with its computation."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.bytes = device, 0
        self._rooms = [_Room(self._made(0)) for _ in range(OFFLOAD_BUFFERS)]
        self._turn = 0

    @property
    def rooms(self) -> int:
        return sum(room.memory.nbytes for room in self._rooms)

    def keep(self, made: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        self.bytes += sum(one.nbytes for one in made)
        return made

    def fetch(self, parts: Parts, after: torch.cuda.Event | None) -> Visit:
        room = self._rooms[self._turn]
        self._turn = (self._turn + 1) % OFFLOAD_BUFFERS
        needed = sum(_aligned(one.nbytes) for part in parts.values() for one in part)
        if len(room.memory) < needed:  # chunks on their way keep their memory
            for each in self._rooms:
                each.memory = self._made(needed)
        visit = Visit(_places(room.memory, parts), room)
        self._bring(parts, visit, after)
        return visit

    def put_back(self, visit: Visit, home: Parts) -> torch.cuda.Event | None:
        copy(visit.parts, home)
        return None

    def _made(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.uint8, device=self.device)

    def _bring(self, parts: Parts, visit: Visit, after: torch.cuda.Event | None) -> None:
        copy(parts, visit.parts)


class GpuRoute(HostRoute):
    """The route to a GPU: copies run beside the computation, with a stream for each direction."""

    def __init__(self, device: torch.device) -> None:
        self._inward, self._outward = torch.cuda.Stream(device), torch.cuda.Stream(device)
        super().__init__(device)

    def keep(self, made: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return super().keep(tuple(one.pin_memory() for one in made))

    def arrive(self) -> None:
        torch.cuda.current_stream(self.device).wait_stream(self._inward)

    def put_back(self, visit: Visit, home: Parts) -> torch.cuda.Event | None:
        assert visit.room is not None
        self._outward.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._outward):
            copy(visit.parts, home)
            visit.room.free = self._outward.record_event()
        return visit.room.free

    def settle(self) -> None:
        self._outward.synchronize()

    def _made(self, size: int) -> Tensor:
        made = super()._made(size)
        for stream in (self._inward, self._outward):
            stream.wait_stream(torch.cuda.current_stream(self.device))
            made.record_stream(stream)  # not reused before they are done with it
        return made

    def _bring(self, parts: Parts, visit: Visit, after: torch.cuda.Event | None) -> None:
        assert visit.room is not None
        for event in (visit.room.free, after):
            if event is not None:
                self._inward.wait_event(event)
        with torch.cuda.stream(self._inward):
            copy(parts, visit.parts)


STAYS = Route()


def route_from(device: torch.device) -> Route:
    """Return the route from host memory to a device."""
    return GpuRoute(device) if device.type == "cuda" else HostRoute(device)


def copy(sources: Parts, targets: Parts) -> None:
    """Copy each source to its target, without a wait of the host for a device."""
    for name, part in sources.items():
        for source, target in zip(part, targets[name], strict=True):
            target.copy_(source, non_blocking=True)


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _places(memory: Tensor, parts: Parts) -> Parts:
    """Return the places of the parts in `memory`, one after the other, as views."""
    places, start = {}, 0
    for name, part in parts.items():
        found = []
        for one in part:
            found.append(memory[start : start + one.nbytes].view(one.dtype))
            start += _aligned(one.nbytes)
        places[name] = tuple(found)
    return places
