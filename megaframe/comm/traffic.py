"""Traffic: what a rank hands to the collectives of a group, and what its waits for them
are charged to. Who charges them is a protocol, for the clock of a step is kept floors above."""

from __future__ import annotations

from dataclasses import dataclass
from types import TracebackType
from typing import Any, Protocol


class Waits(Protocol):
    """What the waits for transfers are charged to: a context that each of them runs in. asks:
    whether a wait is to find out first if it has to wait at all."""

    asks: bool

    def start(self) -> Any:
        """The time at which a transfer starts, as `landed` takes it."""

    def __enter__(self) -> None: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...

    def landed(self, started: Any, size: int, late: bool) -> None:
        """The wait that just ended was for `size` bytes. late: as far as is known, they were not
        there before it."""


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

    waits: what waits for the collectives are charged to. messages: the like for what is sent and
    received singly.
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
        """Add so many calls, which move `size` bytes together."""
        self.bytes += size
        self.calls += calls

    def latest(self) -> int:
        """Bytes of the call that was counted last; zero when asked again."""
        size, self._latest = self._latest, 0
        return size

    def take(self) -> tuple[int, int]:
        """(bytes, calls) so far; starts again from zero."""
        taken = self.bytes, self.calls
        self.bytes = self.calls = 0
        return taken
