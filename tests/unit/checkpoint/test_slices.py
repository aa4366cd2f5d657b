"""Boxes: pieces in row-major order, intersections, and the corner test against painting cells."""

from math import prod

import pytest
import torch
from checkpoint_helpers import draw_partition, shapes
from hypothesis import given
from hypothesis import strategies as st

from megaframe.checkpoint import Slice
from megaframe.checkpoint.slices import (
    find_tiling_problem,
    index_within,
    intersect,
    split_into_runs,
    split_into_tiles,
)


@st.composite
def draw_box(draw, shape):
    offset = tuple(draw(st.integers(0, size - 1)) for size in shape)
    return offset, tuple(
        draw(st.integers(1, size - start)) for start, size in zip(offset, shape, strict=True)
    )


def paint(shape, boxes):
    counts = torch.zeros(shape)
    for box in boxes:
        counts[index_within(((0,) * len(shape), shape), box)] += 1
    return counts


@given(st.data(), shapes)
def test_the_corner_test_agrees_with_painting(data, shape):
    boxes = data.draw(draw_partition(shape))
    change = data.draw(st.sampled_from(["none", "drop", "repeat", "swap"]))
    if change != "none":
        index = data.draw(st.integers(0, len(boxes) - 1))
        box = boxes[index] if change == "repeat" else boxes.pop(index)
        if change != "drop":
            boxes.append(box if change == "repeat" else data.draw(draw_box(shape)))
    covered_once = bool((paint(shape, boxes) == 1).all())
    assert (find_tiling_problem(shape, boxes) is None) == covered_once


@given(st.data(), shapes)
def test_intersection_is_where_both_are(data, shape):
    first, second = data.draw(draw_box(shape)), data.draw(draw_box(shape))
    both = paint(shape, [first, second]) == 2
    shared = intersect(first, second)
    assert torch.equal(paint(shape, [shared] if shared else []) == 1, both)


@given(st.data(), shapes, st.integers(1, 60))
def test_pieces_are_consecutive_runs(data, shape, limit):
    box = data.draw(draw_box(shape))
    values = torch.arange(prod(box[1])).view(box[1])
    cut = list(split_into_runs(box, limit))
    runs = [values[index_within(box, piece)].flatten() for piece in cut]
    assert torch.equal(torch.cat(runs), values.flatten())
    assert all(len(run) <= limit for run in runs)


@given(st.data(), shapes, st.integers(1, 60))
def test_tiles_cover_a_box_once(data, shape, limit):
    box = data.draw(draw_box(shape))
    cut = list(split_into_tiles(box, limit))
    assert (paint(shape, cut) == paint(shape, [box])).all()
    assert all(prod(size) <= limit for _, size in cut)


def test_half_of_the_rows_or_columns_is_half_of_the_tiles():
    cut = list(split_into_tiles(((8, 0), (8, 16)), 32))
    assert [size for _, size in cut] == [(4, 8)] * 4
    assert sum(intersect(box, ((0, 0), (16, 8))) is not None for box in cut) == 2
    assert [size for _, size in split_into_tiles(((0, 0, 0), (6, 4, 4)), 8)] == [(1, 2, 4)] * 12


def test_a_slice_lies_inside_its_tensor():
    Slice("a", (4, 2), (2, 0), torch.zeros(2, 2))
    for shape, offset in [((4, 2), (3, 0)), ((4, 2), (-1, 0)), ((4,), (2,)), ((0, 2), (0, 0))]:
        with pytest.raises(ValueError, match="a: box"):
            Slice("a", shape, offset, torch.zeros(2, 2))


def test_too_many_slices_are_refused_before_they_are_counted():
    box = ((0,) * 8, (1,) * 8)
    assert "too many" in find_tiling_problem((2,) * 8, [box] * (1 << 17))
