"""Traffic: counts what a rank hands to the collectives of a group, and names what its waits for
them are charged to. That is a protocol here, because a step is timed on a higher floor."""

from __future__ import annotations

from dataclasses import dataclass
from types import TracebackType
from typing import Any, Protocol


class Waits(Protocol):
    """What waits for transfers are charged to: a context that each wait runs in. asks: a wait must
    first check whether it has to wait at all."""

    asks: bool

    def start(self) -> Any:
        """Return the time at which a transfer starts, to be passed to `landed`."""

    def __enter__(self) -> None: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...

    def landed(self, started: Any, size: int, late: bool) -> None:
        """Record that the wait that just ended was for `size` bytes. late: as far as is known, they
        had not arrived before the wait."""


class Unwatched:
    """Charges waits to nothing."""

    asks = False

    def start(self) -> None: ...

    def __enter__(self) -> None: ...

    def __exit__(self, *error: object) -> None: ...

    def landed(self, started: Any, size: int, late: bool) -> None: ...


UNWATCHED = Unwatched()


@dataclass
class Traffic:
    """What one rank has handed to the collectives of a group since the last `take()`.

    waits: what waits for collectives are charged to.
    messages: what waits for single sends and receives are charged to.
    """

    bytes: int = 0
    calls: int = 0
    waits: Waits = UNWATCHED
    messages: Waits = UNWATCHED
    _latest: int = 0

    def count(self, size: int) -> None:
        """Add one call that moves `size` bytes."""
        self.bytes += size
        self.calls += 1
        self._latest = size

    def add(self, size: int, calls: int) -> None:
        """Add several calls, which move `size` bytes in total."""
        self.bytes += size
        self.calls += calls

    def latest(self) -> int:
        """Return the bytes of the last counted call, and zero until another call is counted."""
        size, self._latest = self._latest, 0
        return size

    def take(self) -> tuple[int, int]:
        """Return (bytes, calls) so far, and start again from zero."""
        taken = self.bytes, self.calls
        self.bytes = self.calls = 0
        return taken
