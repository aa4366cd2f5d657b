"""Numbers of elements: they count in the whole parameter, whichever part of it a rank has."""

import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from megaframe.architecture.spec import Box, Constant, ParamSpec
from megaframe.data_parallel.partition import BucketPartition
from megaframe.optim.element_ids import ElementIds

CPU = torch.device("cpu")
SEED = 7


def make_spec(name, shape):
    return ParamSpec(name, shape, Constant(0.0), role="matrix")


def list_ids(spec):
    """Return the numbers of a whole parameter, in its shape."""
    box = Box((0,) * len(spec.shape), spec.shape)
    partition = BucketPartition.divide([box], 1, 1, 0, divided=False)
    return ElementIds([spec], partition, SEED)(slice(0, box.size), CPU).view(spec.shape)


@st.composite
def draw_piece(draw):
    """Draw the shape of a parameter and a box of it."""
    shape = draw(st.lists(st.integers(1, 6), min_size=1, max_size=4))
    offset = [draw(st.integers(0, size - 1)) for size in shape]
    sizes = [draw(st.integers(1, size - start)) for size, start in zip(shape, offset, strict=True)]
    return tuple(shape), Box(tuple(offset), tuple(sizes))


@given(st.lists(draw_piece(), min_size=1, max_size=4), st.integers(1, 4), st.integers(1, 40))
def test_every_piece_has_the_numbers_of_its_place_in_the_whole(parts, ranks, chunk):
    """Checks every rank that shares the bucket, a chunk at a time."""
    specs = [make_spec(f"p{index}", shape) for index, (shape, _) in enumerate(parts)]
    boxes = [box for _, box in parts]
    for rank in range(ranks):
        partition = BucketPartition.divide(boxes, 8, ranks, rank, divided=True)
        element_ids, length = ElementIds(specs, partition, SEED), partition.master_span.stop
        length -= partition.master_span.start
        chunks = [slice(i, min(i + chunk, length)) for i in range(0, length, chunk)]
        ids = torch.cat([element_ids(span, CPU) for span in chunks])
        for index, box, place in partition.iterate_pieces(partition.master_span):
            assert torch.equal(ids[place].view(box.shape), list_ids(specs[index])[box.slices])
            ids[place] = 0
        assert not ids.any()


def test_places_count_from_one_to_the_next_and_parameters_begin_elsewhere():
    first, other = list_ids(make_spec("a", (3, 5))), list_ids(make_spec("b", (3, 5)))
    assert torch.equal(first.flatten().diff(), torch.ones(14, dtype=torch.int64))
    assert first[0, 0] != other[0, 0]
    assert math.log2(int(first[0, 0])) < 32
