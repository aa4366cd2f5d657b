"""Division: where the parameters of a bucket lie on a rank, and which part of them it keeps.

It follows from the specs and the layout alone, so that every rank knows those of all others.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from megaframe.spec import Box, runs


@dataclass(frozen=True)
class Division:
    """Of pieces of parameters, `boxes`, which start at `starts` of `length` elements. own: the part
    that no other rank of the copy has. kept: of which the rank keeps the weights."""

    boxes: tuple[Box, ...]
    starts: tuple[int, ...]
    length: int
    own: slice
    kept: slice

    @classmethod
    def of(
        cls, boxes: Sequence[Box], step: int, ranks: int, index: int, *, divided: bool
    ) -> Division:
        """That of rank `index` of so many that have the same boxes, each of which starts at a
        multiple of `step`, as does each rank's part. divided: whether a rank keeps only its own."""
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
        """Where each parameter lies."""
        starts = zip(self.boxes, self.starts, strict=True)
        return [slice(start, start + box.size) for box, start in starts]

    def pieces(self, span: slice) -> Iterator[tuple[int, Box, slice]]:
        """What `span` has of each parameter, in order: its number, a box, and where in the span
        that lies."""
        for number, (box, whole) in enumerate(zip(self.boxes, self.spans, strict=True)):
            low, high = max(span.start, whole.start), min(span.stop, whole.stop)
            at = low - span.start
            for piece in runs(box, low - whole.start, high - whole.start):
                yield number, piece, slice(at, at + piece.size)
                at += piece.size
