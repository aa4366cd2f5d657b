"""What follows from a spec: slices that tile a tensor, and boxes of consecutive elements."""

from itertools import product
from math import prod

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from megaframe.architecture.spec import (
    Box,
    Constant,
    ParamSpec,
    iterate_row_major_runs,
    locate_shard,
)

AXES = ("tensor", "context", "data")


@given(st.integers(0, 1000), st.integers(1, 17))
def test_shares_tile_in_order_and_differ_by_at_most_one(total, parts):
    shares = [locate_shard(total, index, parts) for index in range(parts)]
    ends = [start + length for start, length in shares]
    assert [start for start, _ in shares] == [0, *ends[:-1]]
    assert ends[-1] == total
    lengths = [length for _, length in shares]
    assert max(lengths) - min(lengths) <= 1


@given(st.data())
def test_local_pieces_cover_every_element(data):
    shape = tuple(data.draw(st.lists(st.integers(1, 7), min_size=1, max_size=3)))
    split = data.draw(st.lists(st.sampled_from(AXES), max_size=len(shape), unique=True))
    sizes = {axis: data.draw(st.integers(1, 3)) for axis in AXES}
    spec = ParamSpec("a", shape, Constant(0), role="matrix", axes=dict(enumerate(split)))
    elements = set()
    for index in product(*(range(sizes[axis]) for axis in AXES)):
        box = spec.find_local_box(dict(zip(AXES, index, strict=True)), sizes)
        elements.update(
            product(*(range(o, o + n) for o, n in zip(box.offset, box.shape, strict=True)))
        )
    assert len(elements) == prod(shape) == spec.size


@given(st.lists(st.integers(1, 5), min_size=1, max_size=4), st.data())
def test_a_run_of_elements_is_few_boxes_in_order(shape, data):
    size = prod(shape)
    start = data.draw(st.integers(0, size))
    stop = data.draw(st.integers(start, size))
    offset = tuple(data.draw(st.integers(0, 3)) for _ in shape)
    numbers = np.arange(size).reshape(shape)
    boxes = list(iterate_row_major_runs(Box(offset, tuple(shape)), start, stop))
    pieces = [
        numbers[tuple(slice(o - base, o - base + n) for o, base, n in zip(*place, strict=True))]
        for place in ((box.offset, offset, box.shape) for box in boxes)
    ]
    assert [int(i) for piece in pieces for i in piece.ravel()] == list(range(start, stop))
    assert all(piece.shape == box.shape for piece, box in zip(pieces, boxes, strict=True))
    assert len(boxes) <= 2 * len(shape) - 1


def test_the_matrices_of_a_fused_weight_tile_it():
    spec = ParamSpec("a", (2, 5, 3, 4), Constant(0), role="matrix", fused={1: (3, 1, 1)})
    assert [box.shape for box in spec.matrices] == [(2, 3, 3, 4), (2, 1, 3, 4), (2, 1, 3, 4)]
    assert [box.offset[1] for box in spec.matrices] == [0, 3, 4]
    (whole,) = ParamSpec("a", (2, 5), Constant(0), role="matrix").matrices
    assert whole == Box((0, 0), (2, 5))


boxes = st.lists(st.tuples(st.integers(0, 5), st.integers(1, 5)), min_size=2, max_size=2).map(
    lambda spans: Box(*zip(*spans, strict=True))
)


@given(boxes, boxes)
def test_what_two_boxes_share_is_what_is_in_both(first, other):
    def elements(box):
        return set(product(*(range(o, o + n) for o, n in zip(box.offset, box.shape, strict=True))))

    shared = first.intersect(other)
    assert (elements(shared) if shared else set()) == elements(first) & elements(other)
    if shared:
        inner = shared.make_relative(first)
        assert inner.shape == shared.shape
        spans = zip(inner.offset, inner.shape, first.shape, strict=True)
        assert all(o >= 0 and o + n <= m for o, n, m in spans)
