"""tools/checkpoint.py: what it prints for intact, damaged, equal and different checkpoints, and
that resharding into another number of files keeps the content."""

import os
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from checkpoint_helpers import cut_slice, load_all, make_slice, save
from hypothesis import given, settings
from hypothesis import strategies as st

from megaframe.checkpoint import open_checkpoint
from megaframe.checkpoint.inspect import find_damage
from megaframe.checkpoint.reshard import reshard_checkpoint

WEIGHT = torch.arange(60, dtype=torch.float64).view(6, 10)
MOMENT = torch.linspace(-1, 1, 7).to(torch.bfloat16)


@pytest.fixture
def saved(tmp_path):
    """Save two ranks' halves of a matrix and, on one rank, optimizer state in low precision."""
    halves = [cut_slice("a.weight", WEIGHT, ((row, 0), (3, 10))) for row in (0, 3)]
    moment = make_slice("optimizer.moment/a.weight", MOMENT)
    state = {"config": {"model": {"layers": 3}, "parallel": {"tensor": 2}}}
    return save(tmp_path / "checkpoints", [[halves[0]], [halves[1], moment]], state=state)


def test_inspect_counts_weights_and_state(saved, run_checkpoint_tool):
    for path in (saved, saved.parent):
        status, text = run_checkpoint_tool("inspect", path, "--tensors")
        assert status == 0
        assert "step 1, 2 files" in text and "layers=3" in text and "tensor=2" in text
        words = [line.split() for line in text.splitlines()]
        assert ["weights", "1", "60", "0.000"] in words
        assert ["optimizer", "moment", "1", "7", "0.000"] in words
        assert ["a.weight", "[6,", "10]", "F64", "2"] in words


def test_a_whole_checkpoint_is_verified(saved, run_checkpoint_tool):
    status, text = run_checkpoint_tool("verify", saved)
    assert (status, "2 tensors in 3 slices are whole" in text) == (0, True)


def test_every_flipped_byte_is_found_and_named(saved, run_checkpoint_tool):
    for path in saved.iterdir():
        before = path.read_bytes()
        for place in (0, len(before) // 2, len(before) - 1):
            flipped = bytearray(before)
            flipped[place] ^= 1
            path.write_bytes(flipped)
            status, text = run_checkpoint_tool("verify", saved)
            assert status == 1 and path.name in text
            assert "a.weight" in text or path.name == "manifest.json"
        path.write_bytes(before)


def test_all_that_is_damaged_is_named_at_once(saved, run_checkpoint_tool):
    (saved / "rank-00000.safetensors").unlink()
    other = saved / "rank-00001.safetensors"
    other.write_bytes(other.read_bytes()[:-1])
    status, text = run_checkpoint_tool("verify", saved)
    assert status == 1
    assert "rank-00000.safetensors: No such file or directory; it holds a.weight" in text
    assert "it holds a.weight, optimizer.moment/a.weight" in text
    status, text = run_checkpoint_tool("verify", saved / "nowhere")
    assert status == 2 and "nowhere: there is no such folder" in text


@pytest.fixture
def half_written(saved):
    """The newest of two checkpoints has lost the end of a file, as by a full disk."""
    newest = save(saved.parent, [[make_slice("a.weight", WEIGHT + 1)]], step=2)
    os.truncate(newest / "rank-00000.safetensors", 99)
    return newest


def test_an_older_checkpoint_does_not_hide_that_the_latest_is_damaged(
    half_written, saved, run_checkpoint_tool
):
    folder = saved.parent
    status, text = run_checkpoint_tool("verify", folder)
    assert status == 1
    assert f"{half_written} is damaged:" in text and "99 bytes instead of" in text
    assert f"{saved}: step 1, 2 tensors in 3 slices are whole" in text
    for command in (
        ["inspect", folder],
        ["diff", folder, saved],
        ["diff", saved, folder],
        ["reshard", folder, "--to", folder.parent / "new", "--files", 1],
        ["export-dcp", folder, "--to", folder.parent / "new"],
        ["export-hf", folder, "--to", folder.parent / "new"],
    ):
        status, text = run_checkpoint_tool(*command)
        assert status == 2, command
        assert "99 bytes instead of" in text and f"give {saved}" in text
    assert not (folder.parent / "new").exists()
    assert run_checkpoint_tool("inspect", saved)[0] == 0


def test_damage_that_opening_does_not_show_is_found_and_an_older_one_is_named(
    saved, run_checkpoint_tool
):
    newest = save(saved.parent, [[make_slice("a.weight", WEIGHT + 1)]], step=2)
    assert run_checkpoint_tool("verify", saved.parent)[0] == 0
    file = newest / "rank-00000.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"?")
    status, text = run_checkpoint_tool("verify", saved.parent)
    assert (status, f"{newest} is damaged:" in text, f"{saved}: step 1" in text) == (1, True, True)
    (saved / "manifest.json").unlink()
    status, text = run_checkpoint_tool("verify", saved.parent)
    assert status == 1 and "no checkpoint is whole" in text


def test_a_latest_checkpoint_that_is_gone_is_told_and_a_pointer_that_never_was_is_not_damage(
    saved, run_checkpoint_tool
):
    pointer = saved.parent / "latest"
    pointer.write_text("step-00000009\n")
    status, text = run_checkpoint_tool("verify", saved.parent)
    assert status == 1 and "names 'step-00000009', which is not there" in text
    assert f"{saved}: step 1" in text
    status, text = run_checkpoint_tool("inspect", saved.parent)
    assert status == 2 and f"give {saved}" in text
    (saved.parent.parent / "elsewhere").write_text("root:secret:1\n")
    pointer.unlink()
    pointer.symlink_to("../elsewhere")
    status, text = run_checkpoint_tool("verify", saved.parent)
    assert status == 1 and f"{pointer} names no checkpoint" in text and "secret" not in text
    pointer.unlink()
    assert run_checkpoint_tool("verify", saved.parent)[0] == 0
    status, text = run_checkpoint_tool("inspect", saved.parent)
    assert status == 0 and "latest is missing" in text


def test_differences_are_told_whatever_the_slices(saved, tmp_path, run_checkpoint_tool):
    changed = WEIGHT.clone()
    changed[4, 7] += 0.59
    columns = [cut_slice("a.weight", changed, ((0, column), (6, 5))) for column in (0, 5)]
    other = save(tmp_path / "other", [columns, [make_slice("b", torch.ones(3))]])
    status, text = run_checkpoint_tool("diff", saved, other)
    assert status == 1 and "3 tensors differ, 0 are the same" in text
    words = [line.split() for line in text.splitlines()]
    assert ["a.weight", "0.59", "0.01"] in words
    assert any(line[:3] == ["b", "only", "in"] for line in words)
    same = save(tmp_path / "same", [[make_slice("a.weight", WEIGHT)], [make_slice("c", MOMENT)]])
    status, text = run_checkpoint_tool("diff", saved, same, "--tolerance", "0.02")
    assert "2 tensors differ, 1 are the same within 0.02" in text
    assert run_checkpoint_tool("diff", saved, saved.parent)[0] == 0


def test_numbers_that_are_none_are_not_the_same_as_numbers(tmp_path, run_checkpoint_tool):
    values = torch.tensor([1.0, torch.nan, torch.inf])
    path = save(tmp_path / "one", [[make_slice("a", values)]])
    assert run_checkpoint_tool("diff", path, path)[0] == 0
    other = save(tmp_path / "other", [[make_slice("a", torch.tensor([torch.nan, torch.nan, 2.0]))]])
    status, text = run_checkpoint_tool("diff", path, other, "--tolerance", "1e9")
    assert status == 1 and "inf" in text


@settings(max_examples=15)
@given(st.integers(1, 6))
def test_resharding_writes_the_same_tensors_into_other_files(files):
    with TemporaryDirectory() as name:
        folder = Path(name)
        rows = [cut_slice("a", WEIGHT, ((row, 0), (1, 10))) for row in range(6)]
        source = save(folder / "source", [rows[:1], [*rows[1:], make_slice("b", MOMENT)]])
        with open_checkpoint(source) as opened:
            resharded = reshard_checkpoint(opened, folder / "made", files)
        assert 1 <= len(list(resharded.glob("*.safetensors"))) <= files
        assert not list((folder / "made").glob("*.tmp"))
        actual, expected = load_all(resharded), load_all(source)
        assert actual.keys() == expected.keys()
        assert all(torch.equal(actual[name], expected[name]) for name in expected)
        assert list(find_damage(resharded)) == []


def test_a_checkpoint_that_is_there_is_not_written_over(saved, run_checkpoint_tool):
    folder = saved.parent
    status, text = run_checkpoint_tool("reshard", saved, "--to", folder, "--files", 1)
    assert status == 2 and "already exists" in text
    status, text = run_checkpoint_tool("reshard", saved, "--to", folder, "--files", 0)
    assert status == 2 and "use 1 or more" in text
