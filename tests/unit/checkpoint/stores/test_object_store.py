"""Checkpoints under URLs: they behave as in a folder."""

import contextlib
import json
import os
import sys
from pathlib import Path

import pytest
import torch
from checkpoint_helpers import cut_slice, draw_partition, load_all, make_slice, save, shapes
from entry_runs import read_losses
from hypothesis import given, settings
from hypothesis import strategies as st
from object_stores import (
    COUNT,
    FILE,
    list_named_files,
    list_names,
    make_weight,
    put,
    read_content,
    save_steps,
)
from s3_server import SECRET
from tolerances import promised
from torch.distributed import HashStore

from megaframe.checkpoint import (
    CheckpointWriter,
    Slice,
    find_checkpoint,
    open_checkpoint,
    parse_path,
)
from megaframe.checkpoint.inspect import find_damage
from megaframe.checkpoint.manifest import compute_checksum
from megaframe.checkpoint.stores import object_store as remote_module
from megaframe.errors import UserError
from megaframe.io import remote_requests as retry
from megaframe.training.rank_pool import RankFailure

ROOT = Path(__file__).resolve().parents[4]
sys.path.insert(0, str(ROOT))

import pretrain_gpt  # noqa: E402

pytestmark = pytest.mark.usefixtures("small_files")


def test_what_is_saved_is_found_and_loaded(home):
    assert find_checkpoint(home, "latest") is None
    path = save_steps(home, 1.0, 2.0)
    assert str(find_checkpoint(home, "latest")) == f"{home}/step-00000002" == str(path)
    assert torch.equal(load_all(path)["a"], make_weight(2.0).double())
    assert find_checkpoint(home, str(path)) == path
    with open_checkpoint(path) as checkpoint:
        assert (checkpoint.step, checkpoint.state) == (2, {"value": 2.0})
        assert len({piece.file for piece in checkpoint.tensors["a"].slices}) == 2 * 2
    sizes = [
        len(read_content(home / name)) for name in list_names(home) if name.endswith(".safetensors")
    ]
    assert len(sizes) == 8 and max(sizes) <= FILE + 4096  # plus a header


@settings(max_examples=15)
@given(st.data())
def test_any_partition_loads_as_any_other(data):
    home = parse_path(f"memory://random{next(COUNT)}/checkpoints")
    shape = data.draw(shapes)
    full = torch.randn(shape, dtype=torch.float64)
    ranks = [[], []]
    for box in data.draw(draw_partition(shape)):
        ranks[data.draw(st.integers(0, 1))].append(cut_slice("a", full, box))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(remote_module, "FILE_BYTES", data.draw(st.sampled_from([8, 64, 4096])))
        path = save(home, ranks)
        slices = [
            Slice("a", shape, offset, torch.full(size, torch.nan, dtype=torch.float64))
            for offset, size in data.draw(draw_partition(shape))
        ]
        with open_checkpoint(path) as checkpoint:
            checkpoint.load(slices)
    assert all(
        torch.equal(piece.tensor, cut_slice("a", full, piece.box).tensor) for piece in slices
    )


def test_the_newest_are_kept_and_a_step_is_replaced(home):
    put(home / "step-00000001.backup" / "notes", b"mine")
    save_steps(home, 1.0, 2.0, 3.0, keep=2)
    steps = {name.partition("/")[0] for name in list_names(home)}
    assert steps == {"latest", "step-00000001.backup", "step-00000002", "step-00000003"}
    before = list_names(home)
    replaced = save(home, [[make_slice("a", make_weight(9.0))]], step=3, keep=2)
    assert torch.equal(load_all(replaced)["a"], make_weight(9.0).double())
    old = [name for name in before if name.startswith("step-00000003/rank")]
    assert old and not set(old) & set(list_names(home))


def test_files_that_no_manifest_names_are_no_checkpoint_and_go_at_the_start(home):
    path = save_steps(home, 1.0)
    remaining = list_names(home)
    for stale in (
        "step-00000009/rank-00000.00000.0a1b2c3d.safetensors",
        "step-00000001/rank-00000.00000.0a1b2c3d.safetensors",
    ):
        put(home / stale, read_content(home / remaining[-1]))
    assert find_checkpoint(home, "latest") == path
    with pytest.raises(UserError, match=r"step-00000009 is not a checkpoint: manifest\.json"):
        open_checkpoint(find_checkpoint(home, f"{home}/step-00000009"))
    CheckpointWriter(home, rank=1, world=2, store=HashStore(), keep=1)
    assert len(list_names(home)) == len(remaining) + 2
    CheckpointWriter(home, rank=0, world=2, store=HashStore(), keep=1)
    assert list_names(home) == remaining


class TestTools:
    @pytest.mark.slow
    def test_inspect_verify_diff_and_reshard(self, s3, tmp_path, run_checkpoint_tool):
        path = save_steps(s3, 1.0)
        status, text = run_checkpoint_tool("inspect", s3, "--tensors")
        assert status == 0 and f"{path}: step 1, 4 files" in text
        status, text = run_checkpoint_tool("verify", path)
        assert (status, "1 tensors in" in text) == (0, True)
        local_copy, remote_copy = tmp_path / "here", s3.parent / "there"
        assert run_checkpoint_tool("reshard", s3, "--to", local_copy, "--files", 1)[0] == 0
        assert run_checkpoint_tool("reshard", local_copy, "--to", remote_copy, "--files", 3)[0] == 0
        assert [path.name for path in local_copy.glob("*/rank*")] == ["rank-00000.safetensors"]
        for first, other in (
            (local_copy, s3),
            (remote_copy, s3),
            (f"file://{local_copy}", remote_copy),
        ):
            status, text = run_checkpoint_tool("diff", first, other)
            assert status == 0 and "0 tensors differ, 1 are the same" in text
        status, text = run_checkpoint_tool("reshard", local_copy, "--to", remote_copy, "--files", 1)
        assert status == 2 and f"{remote_copy}/step-00000001 already exists" in text

    def test_every_flipped_byte_is_found_and_named(self, memory, run_checkpoint_tool):
        path = save_steps(memory, 1.0)
        for name in ("manifest.json", *{file.name for file in list_named_files(memory)}):
            before = read_content(path / name)
            for at in (0, len(before) // 2, len(before) - 1):
                put(path / name, before[:at] + bytes([before[at] ^ 1]) + before[at + 1 :])
                status, text = run_checkpoint_tool("verify", path)
                assert status == 1 and f"{path}/{name}" in text
            put(path / name, before[:-1])
            status, text = run_checkpoint_tool("verify", path)
            assert status == 1 and name in text
            put(path / name, before)
        one = next(list_named_files(memory))
        system, gone = retry.open_filesystem(one)
        system.rm_file(gone)
        status, text = run_checkpoint_tool("verify", path)
        assert status == 1 and f"{one}: No such file" in text

    def test_a_missing_bucket_or_object_is_named(self, s3, run_checkpoint_tool):
        status, text = run_checkpoint_tool("verify", "s3://nowhere/x")
        assert status == 2 and "path=s3://nowhere/x: there is no such folder" in text
        status, text = run_checkpoint_tool("verify", "nostore://x/y")
        assert status == 2 and "no store is known for nostore://" in text


@given(st.binary(max_size=80) | st.sampled_from([b"../../x", b"step-00000002", b"latest"]))
def test_a_pointer_of_any_content_leads_nowhere_else(pointer):
    home = parse_path(f"memory://pointer{next(COUNT)}/checkpoints")
    path = save_steps(home, 1.0)
    put(home / "latest", pointer)
    assert find_checkpoint(home, "latest", lambda note: None) == path


@pytest.mark.slow
@given(st.data())
def test_a_manifest_of_any_content_is_refused_or_means_the_same(data):
    home = parse_path(f"memory://manifest{next(COUNT)}/checkpoints")
    path = save_steps(home, 1.0)
    manifest = json.loads(read_content(path / "manifest.json"))
    del manifest["checksum"]
    wrong_names = st.sampled_from(
        ["../../step-00000001/rank-00000.safetensors", "/etc/passwd", "s3://b/x", "manifest.json"]
    )
    wrong = data.draw(
        st.integers(-(10**30), 10**30) | wrong_names | st.text(max_size=9) | st.none()
    )
    inner = manifest
    while True:
        key = data.draw(
            st.sampled_from(sorted(inner) if isinstance(inner, dict) else range(len(inner)))
        )
        if not isinstance(inner[key], dict | list) or not inner[key] or data.draw(st.booleans()):
            inner[key] = wrong
            break
        inner = inner[key]
    body = json.dumps(manifest, separators=(",", ":"))[1:].encode()
    put(path / "manifest.json", b'{"checksum":"%s",' % compute_checksum(body).encode() + body)
    with contextlib.suppress(UserError):
        assert torch.equal(load_all(path)["a"], make_weight(1.0).double())


def train(environment, arguments):
    """Run the entry in a worker that is a client of the server."""
    os.environ.update(environment)
    sys.argv = ["pretrain_gpt.py", *arguments]
    pretrain_gpt.main()


@pytest.mark.slow
def test_a_run_saves_resumes_and_starts_warm_from_urls(server, s3, pool, overrides, tmp_path):
    keys = {"checkpoint__folder": s3, "checkpoint__every": 4, "checkpoint__keep": 3}

    def run(name, ranks=1, after=0, **changes):
        folder = tmp_path / name
        options = overrides(run__dir=folder, **{**keys, **changes})
        pool.run(ranks, train, server.environment, options)
        assert not (folder / "checkpoints").exists()
        return read_losses(folder, after + 1)

    first = run("first")
    with pytest.raises(RankFailure, match="SystemExit"):  # it would delete those of the first
        run("second")
    put(s3 / "latest", b"step-00000008\n")
    latest = run("latest", 2, after=8, checkpoint__resume="latest", parallel__zero=3)
    given = {"checkpoint__resume": s3 / "step-00000004", "checkpoint__every": 0}
    assert latest == promised(first[8:]) and run("given", after=4, **given) == promised(first[4:])
    assert list(find_damage(find_checkpoint(s3, "latest"))) == []
    weights = {"checkpoint__weights": s3 / "step-00000012", "checkpoint__every": 0}
    assert len(run("warm", train__steps=2, **weights)) == 2
    for file in tmp_path.rglob("*"):
        assert not file.is_file() or SECRET.encode() not in file.read_bytes()
    assert all(SECRET.encode() not in read_content(s3 / name) for name in list_names(s3))
