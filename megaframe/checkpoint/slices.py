"""Boxes of logical tensors: the unit that checkpoints save and load, under any layout.

Whether a set of boxes covers a tensor exactly once is decided from their corners alone. The sum of
the boxes' indicator functions equals that of the whole tensor if and only if their mixed
differences are equal, and a mixed difference is a signed count of corners. So boxes are never
compared pairwise.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from operator import add

from torch import Tensor

Shape = tuple[int, ...]
Box = tuple[Shape, Shape]
"""Offset and shape of a box within a tensor."""

MAX_CORNERS = 1 << 24
"""Most corners that `find_tiling_problem` counts: those of four million boxes that split two
dims."""


@dataclass(frozen=True, eq=False)
class Slice:
    """One box of a logical tensor, and the memory that holds it on this rank.

    Attributes:
        name: Name of the logical tensor, the same on every rank.
        shape: Shape of the whole logical tensor; every size is at least 1.
        offset: Where the box starts in the logical tensor.
        tensor: The contents of the box, contiguous or not, on any device. It may be empty.
    """

    name: str
    shape: Shape
    offset: Shape
    tensor: Tensor

    def __post_init__(self) -> None:
        if not is_inside(self.shape, self.box):
            raise ValueError(f"{self.name}: box {self.box} is not inside shape {self.shape}")

    @property
    def box(self) -> Box:
        """Offset and shape within the tensor."""
        return self.offset, tuple(self.tensor.shape)


def is_inside(shape: Shape, box: Box) -> bool:
    """Return whether a box (offset and shape) lies within a tensor of this shape."""
    offset, size = box
    return len(shape) == len(offset) == len(size) and all(
        extent >= 1 and start >= 0 and length >= 0 and start + length <= extent
        for extent, start, length in zip(shape, offset, size, strict=True)
    )


def intersect(first: Box, second: Box) -> Box | None:
    """Return the box that two boxes of one tensor share, or None."""
    offset = tuple(map(max, first[0], second[0]))
    ends = [
        min(a + length_a, b + length_b)
        for a, length_a, b, length_b in zip(*first, *second, strict=True)
    ]
    shape = tuple(end - start for start, end in zip(offset, ends, strict=True))
    return (offset, shape) if all(length > 0 for length in shape) else None


def index_within(outer: Box, inner: Box) -> tuple[slice, ...]:
    """Return the index that selects box `inner` from a tensor that holds box `outer`."""
    return tuple(
        slice(start - base, start - base + length)
        for base, start, length in zip(outer[0], *inner, strict=True)
    )


def split_into_runs(box: Box, limit: int) -> Iterator[Box]:
    """Cut a box into boxes of at most `limit` elements, each a contiguous run in row-major order.

    The runs are yielded in row-major order.
    """
    offset, shape = box
    inner, dim = 1, len(shape)
    while dim > 0 and inner * shape[dim - 1] <= limit:
        dim -= 1
        inner *= shape[dim]
    if dim == 0:
        yield box
        return
    dim -= 1
    rows = limit // inner
    for prefix in product(*(range(length) for length in shape[:dim])):
        for row in range(0, shape[dim], rows):
            start = (*prefix, row, *(0 for _ in shape[dim + 1 :]))
            size = (*(1 for _ in prefix), min(rows, shape[dim] - row), *shape[dim + 1 :])
            yield tuple(a + b for a, b in zip(offset, start, strict=True)), size


def split_into_tiles(box: Box, limit: int) -> Iterator[Box]:
    """Cut a box into tiles of at most `limit` elements, so that a reader that needs other boxes
    reads few unneeded elements.

    All dims but the last two (or the only dim of a vector) are cut as far as needed. Then the
    longer of the last two is halved until a tile is small enough.
    """
    offset, shape = box
    tile = list(shape)
    for dim in range(len(shape) - 2 if len(shape) > 1 else len(shape)):
        tile[dim] = min(shape[dim], max(1, limit // max(1, prod(shape[dim + 1 :]))))
    while prod(tile) > limit:
        longest = max(range(len(shape))[-2:], key=lambda dim: tile[dim])
        tile[longest] = -(-tile[longest] // 2)
    for start in product(
        *(range(0, extent, size) for extent, size in zip(shape, tile, strict=True))
    ):
        size = tuple(map(min, tile, (a - b for a, b in zip(shape, start, strict=True))))
        yield tuple(map(add, offset, start)), size


def find_tiling_problem(shape: Shape, boxes: Sequence[Box]) -> str | None:
    """Return why the boxes (each inside `shape`) do not cover it exactly once, or None if they do.

    If there are too many boxes to check (see `MAX_CORNERS`), that is the reason returned.
    """
    full_box: Box = (tuple(0 for _ in shape), shape)
    split_dims = [
        dim for dim in range(len(shape)) if any(size[dim] != shape[dim] for _, size in boxes)
    ]
    if len(boxes) << len(split_dims) > MAX_CORNERS:
        return f"{len(boxes)} slices over {len(split_dims)} dims are too many to check"
    if boxes and _count_corners(boxes, split_dims) == _count_corners([full_box], split_dims):
        return None
    covered, needed = sum(prod(size) for _, size in boxes), prod(shape)
    if covered == needed:
        return "some slices overlap and others are missing"
    return f"its slices hold {covered} elements instead of {needed}: " + (
        "some are missing" if covered < needed else "some overlap"
    )


def _count_corners(boxes: Sequence[Box], dims: Sequence[int]) -> dict[Shape, int]:
    """Count the boxes' corners, each with the sign given by the parity of its upper ends.

    Corners whose counts cancel are left out.

    Args:
        boxes: The boxes, of one tensor.
        dims: The dims to look at.
    """
    counts: Counter[Shape] = Counter()
    signs = [-1 if sum(ends) % 2 else 1 for ends in product((0, 1), repeat=len(dims))]
    for offset, size in boxes:
        spans = [(offset[dim], offset[dim] + size[dim]) for dim in dims]
        for sign, corner in zip(signs, product(*spans), strict=True):
            counts[corner] += sign
    return {corner: count for corner, count in counts.items() if count}
