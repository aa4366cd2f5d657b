"""What a writer of checkpoints needs of what exports them; `convert/` has it."""

from __future__ import annotations

from typing import Protocol


class Exports(Protocol):
    """Writes saved checkpoints in another format, each rank a part. A failure of it, a `UserError`
    or an `OSError`, is no failure of a save."""

    def is_due(self, step: int) -> bool:
        """Return whether the checkpoint of a step is exported."""

    def begin(self, step: int, attempt: str) -> None:
        """On rank 0, before any rank writes."""

    def write_part(self, step: int, attempt: str) -> None:
        """On each rank, write its part."""

    def publish(self, step: int, attempt: str) -> None:
        """On rank 0, when all ranks have written."""

    def discard(self, step: int, attempt: str) -> None:
        """On rank 0 at the end, remove what was not published."""
