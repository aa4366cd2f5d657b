"""Tensors saved under one partition load under any other, in any dtype."""

import math
import tempfile
from pathlib import Path

import pytest
import torch
from checkpoint_helpers import cut_slice, draw_partition, load_all, make_slice, save, shapes
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from torch.distributed import HashStore

from megaframe.checkpoint import (
    CheckpointWriter,
    Slice,
    find_checkpoint,
    open_checkpoint,
    shard_file,
)
from megaframe.checkpoint.manifest import DTYPES

FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16]


@given(st.data())
def test_any_partition_loads_as_any_other(data):
    tensors = {
        f"blocks.{index}/é weight": torch.randn(shape, dtype=torch.float64).to(dtype)
        for index, (shape, dtype) in enumerate(
            data.draw(st.lists(st.tuples(shapes, st.sampled_from(FLOATS)), max_size=4))
        )
    }
    world = data.draw(st.integers(1, 3))
    ranks = [[] for _ in range(world)]
    for name, tensor in tensors.items():
        for box in data.draw(draw_partition(tensor.shape)):
            ranks[data.draw(st.integers(0, world - 1))].append(cut_slice(name, tensor, box))
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(shard_file, "MAX_ENTRY_BYTES", data.draw(st.sampled_from([8, 64, 1 << 20])))
        path = save(Path(folder), ranks)
        assert find_checkpoint(Path(folder), "latest") == path
        slices = []
        for name, tensor in tensors.items():
            for box in data.draw(draw_partition(tensor.shape)):
                # The target has reversed strides, like a transposed view.
                memory = torch.full(box[1][::-1], torch.nan, dtype=tensor.dtype)
                memory = memory.permute(tuple(reversed(range(memory.dim()))))
                slices.append(Slice(name, tuple(tensor.shape), box[0], memory))
        with open_checkpoint(path) as checkpoint:
            assert set(checkpoint.tensors) == set(tensors)
            checkpoint.load(slices)
        for loaded in slices:
            assert torch.equal(
                loaded.tensor, cut_slice(loaded.name, tensors[loaded.name], loaded.box).tensor
            )


@pytest.mark.parametrize("saved", DTYPES.values(), ids=DTYPES.keys())
def test_every_dtype_loads_as_every_other(tmp_path, saved):
    source = torch.randn(5, 3, dtype=torch.float64).to(saved)
    path = save(tmp_path, [[make_slice("a", source)]])
    for dtype in DTYPES.values():
        target = torch.zeros(5, 3).to(dtype)
        with open_checkpoint(path) as checkpoint:
            checkpoint.load([make_slice("a", target)])
        assert target.dtype == dtype
        assert torch.equal(target.double(), source.to(dtype).double())


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


def same(a, b):
    if isinstance(a, float) and isinstance(b, float) and math.isnan(a):
        return math.isnan(b)
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list):
        return isinstance(b, list) and len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and a == b


@given(st.dictionaries(st.text(), JSON, max_size=4))
def test_state_comes_back_bit_for_bit(state):
    with tempfile.TemporaryDirectory() as folder:
        path = save(Path(folder), [[]], step=7, state=state)
        with open_checkpoint(path) as checkpoint:
            assert checkpoint.step == 7
            assert same(dict(checkpoint.state), state)


def test_files_are_what_the_safetensors_library_reads(tmp_path):
    tensors = {"a": torch.randn(5, 3), "b": torch.randn(3).bfloat16(), "c": torch.randn(2).double()}
    path = save(tmp_path, [[make_slice(name, tensor) for name, tensor in tensors.items()]])
    with safe_open(path / "rank-00000.safetensors", "pt") as file:
        assert set(file.keys()) == {"a[0:5,0:3]", "b[0:3]", "c[0:2]"}
        for key in file.keys():  # noqa: SIM118 (not a dict)
            assert torch.equal(file.get_tensor(key), tensors[key[0]])


def test_a_save_holds_what_was_there_when_it_was_asked_for(tmp_path):
    weight = torch.zeros(1 << 20)
    writer = CheckpointWriter(tmp_path, rank=0, world=1, store=HashStore(), keep=9)
    state = {"losses": [0.0]}
    for step in range(1, 4):
        weight.fill_(step)
        state["losses"][0] = float(step)
        writer.save(step, [make_slice("a", weight)], state)
        writer.wait_for_copy()
        weight.fill_(-1)
        state["losses"][0] = -1.0
    writer.wait()
    assert writer.poll()
    for step in range(1, 4):
        path = tmp_path / f"step-{step:08d}"
        assert bool((load_all(path)["a"] == step).all())
        with open_checkpoint(path) as checkpoint:
            assert checkpoint.state["losses"] == [float(step)]


def test_empty_slices_and_ranks_with_nothing_are_fine(tmp_path):
    full = torch.randn(3, 2)
    nothing = Slice("a", (3, 2), (3, 0), torch.zeros(0, 2))
    path = save(tmp_path, [[nothing], [make_slice("a", full)], []])
    assert [file.name for file in path.glob("rank-*")] == ["rank-00001.safetensors"]
    with open_checkpoint(path) as checkpoint:
        checkpoint.load([nothing])
    assert torch.equal(load_all(path)["a"], full.double())


def test_a_tensor_that_requires_grad_is_filled_in_place(tmp_path):
    path = save(tmp_path, [[make_slice("a", torch.ones(3))]])
    weight = torch.nn.Parameter(torch.zeros(3))
    with open_checkpoint(path) as checkpoint:
        checkpoint.load([make_slice("a", weight)])
    assert weight.tolist() == [1, 1, 1]
    assert weight.grad_fn is None


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_gpu_tensors_are_saved_and_loaded(tmp_path):
    weight = torch.randn(64, 33, device="cuda")
    expected = weight.t().cpu().double()
    writer = CheckpointWriter(tmp_path, rank=0, world=1, store=HashStore(), keep=1)
    for step in (1, 2):  # the second save reuses the first one's pinned memory
        writer.save(step, [make_slice("a", weight.t())], {})
    weight.zero_()
    writer.wait()
    with open_checkpoint(tmp_path / "step-00000002") as checkpoint:
        checkpoint.load([make_slice("a", weight.t())])
    assert torch.equal(weight.t().cpu().double(), expected)
