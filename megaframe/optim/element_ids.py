"""ElementIds: identifies the elements of parameters in a flat span by one number each.

An element has the same id wherever a layout puts it, so random draws that depend on ids are the
same under all layouts. Ids are computed a chunk at a time and never stored.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor

from megaframe.architecture.spec import Box, ParamSpec
from megaframe.data_parallel.partition import BucketPartition


class ElementIds:
    """The ids of the elements whose master weights a rank has. An element's id is a hash of (seed,
    name of the parameter) plus its place in the whole parameter, in row-major order.

    Args:
        specs: The parameters of a bucket.
        partition: Which of their elements this rank has.
        seed: Of the run.
    """

    def __init__(self, specs: Sequence[ParamSpec], partition: BucketPartition, seed: int) -> None:
        self._shapes = [spec.shape for spec in specs]
        self._first_ids = [_hash(f"{seed}/{spec.name}") for spec in specs]
        self._partition = partition

    def __call__(self, span: slice, device: torch.device) -> Tensor:
        """Return the ids of the elements of `span`, int64; 0 for padding."""
        # `span` counts from the first weight of this rank, `pieces` from the start of the bucket.
        start = self._partition.master_span.start
        # Padding keeps 0: it holds no element of a parameter.
        ids = torch.zeros(span.stop - span.start, dtype=torch.int64, device=device)
        for index, box, place in self._partition.iterate_pieces(
            slice(start + span.start, start + span.stop)
        ):
            _count(ids[place].view(box.shape), self._first_ids[index], box, self._shapes[index])
        return ids


def compute_positions(span: slice, device: torch.device) -> Tensor:
    """Return the positions of a span as its ids, for a span that is not part of a bucket."""
    return torch.arange(span.start, span.stop, device=device)


def _count(out: Tensor, first: int, box: Box, shape: Sequence[int]) -> None:
    """Write to `out` the places of a box's elements in the tensor of this shape, plus `first`."""
    rows = torch.zeros((), dtype=torch.int64, device=out.device)
    *outer, last = [
        torch.arange(start, start + count, device=out.device)
        for start, count in zip(box.offset, box.shape, strict=True)
    ]
    # Row-major place by Horner's rule; broadcasting keeps all but the last dim small.
    for places, size in zip(outer, shape, strict=False):
        rows = rows[..., None] * size + places
    torch.add(rows[..., None] * shape[-1] + first, last, out=out)


def _hash(text: str) -> int:
    # 32 bits, so that adding a place to it does not overflow int64.
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "little")
