"""BucketPartition: where the parameters of a bucket are on a rank, and which part the rank keeps.

It follows from the specs and the layout alone, so every rank knows it for all other ranks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from megaframe.architecture.spec import Box, iterate_row_major_runs


@dataclass(frozen=True)
class BucketPartition:
    """How one rank's boxes of parameters lie in the flat span of a bucket.

    Attributes:
        boxes: What the rank has of each parameter.
        starts: Where each box starts in the span.
        length: Elements of the span, padding included.
        owned_span: The part that no other rank of the same copy has.
        master_span: The part whose master weights the rank has.
    """

    boxes: tuple[Box, ...]
    starts: tuple[int, ...]
    length: int
    owned_span: slice
    master_span: slice

    @classmethod
    def divide(
        cls, boxes: Sequence[Box], alignment: int, ranks: int, index: int, *, divided: bool
    ) -> BucketPartition:
        """Return the partition of rank `index` among `ranks` ranks with the same boxes.

        Args:
            boxes: What these ranks have of each parameter.
            alignment: Every box and every rank's part start at a multiple of this many elements.
            ranks: Number of ranks among which the span is divided.
            index: The rank's place among them.
            divided: Each rank has the master weights of its own part only.
        """
        starts, end = [], 0
        for box in boxes:
            starts.append(end)
            end += alignment * math.ceil(box.size / alignment)
        # Equal parts, as all-gather and reduce-scatter require; the padding is at the end.
        share = alignment * math.ceil(end / (ranks * alignment))
        owned = slice(index * share, (index + 1) * share)
        length = ranks * share
        # ZeRO stage 0 updates all weights on each rank, but a rank still owns its part alone.
        master = owned if divided else slice(0, length)
        return cls(tuple(boxes), tuple(starts), length, owned, master)

    @property
    def spans(self) -> list[slice]:
        """The span of each parameter."""
        starts = zip(self.boxes, self.starts, strict=True)
        return [slice(start, start + box.size) for box, start in starts]

    def iterate_pieces(self, span: slice) -> Iterator[tuple[int, Box, slice]]:
        """Yield what `span` has of each parameter, in order: the parameter's number, a box, and the
        place of that box within the span."""
        for number, (box, box_span) in enumerate(zip(self.boxes, self.spans, strict=True)):
            low, high = max(span.start, box_span.start), min(span.stop, box_span.stop)
            at = low - span.start
            for piece in iterate_row_major_runs(box, low - box_span.start, high - box_span.start):
                yield number, piece, slice(at, at + piece.size)
                at += piece.size
