"""Limits: for which sizes a schedule exists, known without making it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ScheduleLimits:
    """The sizes that a schedule supports.

    Attributes:
        min_chunks, max_chunks: Chunks per rank; no upper limit if `max_chunks` is None.
        needs_full_pipeline: Whether it needs at least as many microbatches as ranks.
    """

    min_chunks: int = 1
    max_chunks: int | None = 1
    needs_full_pipeline: bool = False

    def find_nearest_chunks(self, chunks: int) -> int:
        """Return the supported number of chunks that is closest to `chunks`."""
        return max(
            self.min_chunks, chunks if self.max_chunks is None else min(chunks, self.max_chunks)
        )

    def allow_any_microbatches(self, chunks: int) -> bool:
        """Return whether so many chunks run with however few microbatches."""
        return self.find_nearest_chunks(chunks) == chunks and not self.needs_full_pipeline
