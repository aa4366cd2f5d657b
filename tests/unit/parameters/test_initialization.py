"""Initial weights do not depend on how a tensor is divided."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from megaframe.architecture.spec import Box, Constant, Normal, ParamSpec
from megaframe.parameters import initialization
from megaframe.parameters.initialization import fill_initial_values


def draw_whole(spec, seed=7, dtype=torch.float64):
    out = torch.empty(spec.shape, dtype=dtype)
    fill_initial_values(out, spec, Box((0,) * len(spec.shape), spec.shape), seed)
    return out


@given(st.data())
def test_any_piece_equals_that_piece_of_the_whole(data):
    shape = tuple(data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=3)))
    spec = ParamSpec("a.weight", shape, Normal(0.02), role="matrix")
    offset = tuple(data.draw(st.integers(0, n - 1)) for n in shape)
    size = tuple(data.draw(st.integers(1, n - o)) for n, o in zip(shape, offset, strict=True))
    box = Box(offset, size)
    rows = initialization._BLOCK_ELEMENTS
    try:
        initialization._BLOCK_ELEMENTS = 8  # so that small tensors have many blocks
        piece = torch.empty(size, dtype=torch.float64)
        fill_initial_values(piece, spec, box, 7)
        assert torch.equal(piece, draw_whole(spec)[box.slices])
    finally:
        initialization._BLOCK_ELEMENTS = rows


def test_name_and_seed_are_the_key_and_blocks_differ():
    shape = (2048, 1024)  # two blocks
    drawn = draw_whole(ParamSpec("a", shape, Normal(1.0), role="matrix"))
    assert torch.equal(drawn, draw_whole(ParamSpec("a", shape, Normal(1.0), role="matrix")))
    assert not torch.equal(drawn, draw_whole(ParamSpec("b", shape, Normal(1.0), role="matrix")))
    assert not torch.equal(
        drawn, draw_whole(ParamSpec("a", shape, Normal(1.0), role="matrix"), seed=8)
    )
    assert not torch.equal(drawn[:1024], drawn[1024:])
    assert abs(float(drawn.mean())) < 5 / drawn.numel() ** 0.5
    assert abs(float(drawn.std()) - 1) < 5 / (2 * drawn.numel()) ** 0.5


def test_precisions_start_from_the_same_draw():
    spec = ParamSpec("a", (5, 3), Normal(0.02), role="matrix")
    assert torch.equal(draw_whole(spec, dtype=torch.float32).double(), draw_whole(spec))


def test_constant_initialization():
    spec = ParamSpec("gain", (4,), Constant(1.5), role="gain")
    assert draw_whole(spec).tolist() == [1.5] * 4
