"""Division: where the parameters of a bucket are on a rank, and which part of them the rank keeps.

It follows from the specs and the layout alone, so every rank knows it for all other ranks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from megaframe.parameters.spec import Box, row_major_runs


@dataclass(frozen=True)
class Division:
    """Places of `boxes` (pieces of parameters), which start at `starts` in a span of `length`
    elements. own: the part that no other rank of the same copy has. kept: the part whose weights
    the rank keeps."""

    boxes: tuple[Box, ...]
    starts: tuple[int, ...]
    length: int
    own: slice
    kept: slice

    @classmethod
    def of(
        cls, boxes: Sequence[Box], step: int, ranks: int, index: int, *, divided: bool
    ) -> Division:
        """Return the division of rank `index` among `ranks` ranks with the same boxes. Every box
        and every rank's part start at a multiple of `step`. divided: each rank keeps only its own
        part of the span."""
        starts, end = [], 0
        for box in boxes:
            starts.append(end)
            end += step * math.ceil(box.size / step)
        share = step * math.ceil(end / (ranks * step))
        own = slice(index * share, (index + 1) * share)
        length = ranks * share
        return cls(tuple(boxes), tuple(starts), length, own, own if divided else slice(0, length))

    @property
    def spans(self) -> list[slice]:
        """The span of each parameter."""
        starts = zip(self.boxes, self.starts, strict=True)
        return [slice(start, start + box.size) for box, start in starts]

    def pieces(self, span: slice) -> Iterator[tuple[int, Box, slice]]:
        """Yield what `span` has of each parameter, in order: the parameter's number, a box, and the
        place of that box within the span."""
        for number, (box, whole) in enumerate(zip(self.boxes, self.spans, strict=True)):
            low, high = max(span.start, whole.start), min(span.stop, whole.stop)
            at = low - span.start
            for piece in row_major_runs(box, low - whole.start, high - whole.start):
                yield number, piece, slice(at, at + piece.size)
                at += piece.size
