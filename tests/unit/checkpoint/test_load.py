"""Damaged and hostile checkpoints: each is refused with a message that names the fault."""

import json
import os
import shutil
import tempfile
from pathlib import Path

import pytest
import torch
from checkpoint_helpers import FILES, load_all, make_slice, reheaded, save, write_sealed
from hypothesis import given
from hypothesis import strategies as st

from megaframe.checkpoint import Slice, find_checkpoint, open_checkpoint
from megaframe.checkpoint.manifest import MAX_MANIFEST_BYTES, compute_checksum
from megaframe.checkpoint.reshard import reshard_checkpoint
from megaframe.checkpoint.train_state import (
    SpikeHistory,
    TrainState,
    check_same_run,
    read_train_state,
)
from megaframe.config import RunConfig
from megaframe.errors import UserError
from megaframe.optim.optimizer import OptimizerState


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    halves = [
        [
            Slice("a", (4, 3), (2 * rank, 0), torch.randn(2, 3)),
            make_slice(f"b{rank}", torch.randn(2)),
        ]
        for rank in range(2)
    ]
    return save(tmp_path_factory.mktemp("run"), halves, step=10, state={"loss": 2.5})


@pytest.fixture
def copy(good, tmp_path):
    return Path(shutil.copytree(good, tmp_path / good.name))


@given(st.data())
def test_every_flipped_bit_and_every_truncation_is_refused(good, data):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(shutil.copytree(good, Path(folder) / "x"))
        file = path / data.draw(st.sampled_from(FILES))
        content = bytearray(file.read_bytes())
        place = data.draw(st.integers(0, len(content) - 1))
        if data.draw(st.booleans()):
            content[place] ^= 1 << data.draw(st.integers(0, 7))
        else:
            del content[place:]
        file.write_bytes(content)
        with pytest.raises(UserError, match=file.name):
            load_all(path)


def test_a_damaged_tensor_is_named(copy):
    file = copy / FILES[1]
    content = bytearray(file.read_bytes())
    content[-1] ^= 1  # the file ends with the bytes of b0
    file.write_bytes(content)
    with pytest.raises(UserError, match=r"rank-00000.safetensors is damaged: tensor b0 at \(0,\)"):
        load_all(copy)
    with open_checkpoint(copy) as checkpoint:
        checkpoint.load([make_slice("b1", torch.zeros(2))])  # only what is read is checked


@pytest.mark.parametrize("name", FILES)
def test_a_missing_file_is_named(copy, name):
    (copy / name).unlink()
    with pytest.raises(UserError, match=f"{name}.*No such file"):
        open_checkpoint(copy)


def test_a_file_that_is_a_folder_is_named(copy):
    (copy / FILES[1]).unlink()
    (copy / FILES[1]).mkdir()
    with pytest.raises(UserError, match=f"{FILES[1]}.*Not a regular file"):
        open_checkpoint(copy)


def test_a_pipe_in_place_of_a_file_does_not_hang(copy):
    for name in FILES:
        content = (copy / name).read_bytes()
        (copy / name).unlink()
        os.mkfifo(copy / name)
        with pytest.raises(UserError, match=f"{name}.*Not a regular file"):
            open_checkpoint(copy)
        (copy / name).unlink()
        (copy / name).write_bytes(content)


def change(path, *, to):
    """Return an edit that sets the entry at `path` of a manifest."""

    def edit(manifest):
        *parents, last = path
        for key in parents:
            manifest = manifest[key]
        manifest[last] = to

    return edit


FIRST = ("tensors", "a", "slices", 0)
HOSTILE = {
    "traversal": (change((*FIRST, "file"), to="../../etc/passwd"), "file"),
    "absolute": (change((*FIRST, "file"), to="/etc/passwd"), "file"),
    "unlisted": (change((*FIRST, "file"), to="rank-00009.safetensors"), "rank-00009"),
    "outside": (change((*FIRST, "offset"), to=[3, 0]), "outside"),
    "negative": (change((*FIRST, "offset"), to=[-1, 0]), "offset"),
    "rank of box": (change((*FIRST, "offset"), to=[0]), "outside"),
    "overlap": (change((*FIRST, "offset"), to=[2, 0]), "overlap and others are missing"),
    "missing": (change(("tensors", "a", "shape"), to=[5, 3]), "hold 12 elements instead of 15"),
    "no slices": (change(("tensors", "a", "slices"), to=[]), "hold 0 elements instead of 12"),
    "absurd": (change(("tensors", "a", "shape"), to=[1 << 60, 3]), "tensors.a.shape"),
    "huge integer": (change(("tensors", "a", "shape"), to=[10**400, 3]), "tensors.a.shape"),
    "empty dim": (change(("tensors", "a", "shape"), to=[0, 3]), "tensors.a.shape"),
    "many dims": (change(("tensors", "a", "shape"), to=[1] * 9), "tensors.a.shape"),
    "dtype": (change(("tensors", "a", "dtype"), to="I64"), "dtype"),
    "wide dtype": (change(("tensors", "a", "dtype"), to="F64"), "instead of F64"),
    "string step": (change(("step",), to="10"), "step"),
    "bool step": (change(("step",), to=True), "step"),
    "version": (change(("version",), to=2), "version"),
    "unknown key": (change(("extra",), to=1), "extra"),
    "state": (change(("state",), to=[]), "state"),
    "checksum": (change((*FIRST, "checksum"), to="xyz"), "checksum"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_manifests_are_refused(copy, name):
    edit, message = HOSTILE[name]
    manifest = json.loads((copy / "manifest.json").read_bytes())
    del manifest["checksum"]
    write_sealed(copy / "manifest.json", manifest)
    load_all(copy)
    edit(manifest)
    write_sealed(copy / "manifest.json", manifest)
    with pytest.raises(UserError, match=message):
        load_all(copy)


def test_absurd_tensors_are_refused_before_anything_is_allocated(copy):
    manifest = json.loads((copy / "manifest.json").read_bytes())
    del manifest["checksum"]
    manifest["tensors"] = {
        "a": {
            "shape": [1 << 40],
            "dtype": "F32",
            "slices": [{"file": FILES[1], "offset": [0], "shape": [1 << 40], "checksum": "0" * 16}],
        }
    }
    write_sealed(copy / "manifest.json", manifest)
    with pytest.raises(UserError, match=f"a slice of {4 << 40} bytes, larger than any"):
        open_checkpoint(copy)


@pytest.mark.parametrize(
    "content", [b"", b"{", b"not JSON", b"[]", b"\xff" * 99, b'{"step":' + b"[" * 9999]
)
def test_what_is_no_manifest_is_refused(copy, content):
    (copy / "manifest.json").write_bytes(content)
    with pytest.raises(UserError, match="manifest"):
        open_checkpoint(copy)
    body = content[1:]
    sealed = b'{"checksum":"%s",' % compute_checksum(body).encode() + body
    (copy / "manifest.json").write_bytes(sealed)
    with pytest.raises(UserError, match="not a valid manifest"):
        open_checkpoint(copy)


def test_a_huge_manifest_is_not_read(copy):
    os.truncate(copy / "manifest.json", MAX_MANIFEST_BYTES + 1)
    with pytest.raises(UserError, match=f"larger than the {MAX_MANIFEST_BYTES} bytes"):
        open_checkpoint(copy)


@pytest.mark.parametrize(
    "edit",
    [
        change(("a[0:2,0:3]", "data_offsets"), to=[1 << 50, (1 << 50) + 24]),
        change(("a[0:2,0:3]", "data_offsets"), to=[-24, 0]),
        change(("a[0:2,0:3]", "data_offsets"), to=[24, 0]),
        change(("a[0:2,0:3]", "data_offsets"), to=[0]),
        change(("a[0:2,0:3]", "data_offsets"), to=[16, 40]),
        change(("a[0:2,0:3]", "shape"), to=[3, 2]),
        change(("a[0:2,0:3]", "dtype"), to="I32"),
        change(("a[0:2,0:3]",), to=5),
        lambda header: header.pop("a[0:2,0:3]"),
    ],
)
def test_hostile_headers_are_refused(copy, edit):
    reheaded(copy / FILES[1], lambda header: None)
    load_all(copy)
    reheaded(copy / FILES[1], edit)
    with pytest.raises(UserError, match=rf"{FILES[1]} is damaged: .*tensor a"):
        load_all(copy)


def test_another_model_is_refused_with_both_shapes(good):
    slices = [make_slice("a", torch.zeros(4, 2)), make_slice("head", torch.zeros(9))]
    slices += [make_slice(f"x{index}", torch.zeros(1)) for index in range(8)]
    with open_checkpoint(good) as checkpoint, pytest.raises(UserError) as error:
        checkpoint.load(slices)
    text = str(error.value)
    assert "10 tensors differ" in text and "and 5 more" in text
    assert "a is (4, 3) in it, and (4, 2) here" in text
    assert "head (9,) is not in it" in text


class TestFind:
    def test_nothing_yet_is_none_and_only_then(self, tmp_path):
        assert find_checkpoint(tmp_path / "not there", "latest") is None
        (tmp_path / "step-00000003.0a1b2c3d.tmp").mkdir()
        assert find_checkpoint(tmp_path, "latest") is None
        (tmp_path / "latest").write_text("step-00000003\n")
        with pytest.raises(UserError, match="no intact checkpoint is left"):
            find_checkpoint(tmp_path, "latest")

    @pytest.mark.parametrize(
        "pointer", [None, b"", b"step-00000009", b"../step-00000001", b"\xff\xfe", b"x" * 5000]
    )
    def test_a_damaged_pointer_falls_back_to_the_newest(self, tmp_path, pointer):
        for step in (1, 2):
            save(tmp_path, [[make_slice("a", torch.ones(2))]], step=step)
        (tmp_path / "latest").unlink()
        if pointer is not None:
            (tmp_path / "latest").write_bytes(pointer)
        notes = []
        assert find_checkpoint(tmp_path, "latest", notes.append) == tmp_path / "step-00000002"
        assert len(notes) == 1 and f"{tmp_path}/latest" in notes[0]

    def test_the_pointer_wins_over_a_higher_step(self, tmp_path):
        for step in (1, 2):
            save(tmp_path, [[make_slice("a", torch.ones(2))]], step=step)
        (tmp_path / "latest").write_text("step-00000001\n")
        assert find_checkpoint(tmp_path, "latest") == tmp_path / "step-00000001"

    def test_a_damaged_newest_falls_back_with_a_note_until_none_is_left(self, tmp_path):
        for step in (1, 2):
            save(tmp_path, [[make_slice("a", torch.ones(2))]], step=step)
        os.truncate(tmp_path / "step-00000002" / FILES[1], 20)
        notes = []
        assert find_checkpoint(tmp_path, "latest", notes.append) == tmp_path / "step-00000001"
        assert len(notes) == 1 and "20 bytes instead of" in notes[0]
        (tmp_path / "step-00000001" / "manifest.json").unlink()
        with pytest.raises(UserError, match="no intact checkpoint is left"):
            find_checkpoint(tmp_path, "latest")

    def test_a_path_is_a_checkpoint_or_has_one(self, good, tmp_path):
        assert (
            find_checkpoint(tmp_path, str(good))
            == find_checkpoint(tmp_path, str(good.parent))
            == good
        )
        with pytest.raises(UserError, match="no such folder; it takes a checkpoint, or a folder"):
            find_checkpoint(tmp_path, str(tmp_path / "nowhere"))
        empty = tmp_path / "empty"
        empty.mkdir()
        with pytest.raises(UserError, match="there is no checkpoint in it; it takes a checkpoint"):
            find_checkpoint(tmp_path, str(empty))
        unfinished = shutil.copytree(good, tmp_path / "step-00000001.00112233.tmp")
        with pytest.raises(UserError, match="never finished"):
            find_checkpoint(tmp_path, str(unfinished))


def resealed(path, **changes):
    manifest = json.loads((path / "manifest.json").read_bytes())
    del manifest["checksum"]
    write_sealed(path / "manifest.json", {**manifest, **changes})


def test_a_step_other_than_that_of_the_name_is_refused(copy):
    resealed(copy, step=11)
    with pytest.raises(UserError, match="is of step 11 by its manifest, and its name says 10"):
        open_checkpoint(copy)
    copy.rename(copy.with_name("best"))
    open_checkpoint(copy.with_name("best")).close()


def test_a_secret_in_a_state_is_not_copied(copy, tmp_path):
    resealed(copy, state={"config": {"data": {"tokenizer": "s3://key:Zq8-secret@bucket/x"}}})
    with open_checkpoint(copy) as checkpoint, pytest.raises(UserError, match="not copied"):
        reshard_checkpoint(checkpoint, tmp_path / "to", 1)
    assert not (tmp_path / "to").exists()


def test_a_tensor_whose_name_drives_a_terminal_is_refused(copy):
    tensors = json.loads((copy / "manifest.json").read_bytes())["tensors"]
    resealed(copy, tensors={f"\x1b[31m{name}": tensor for name, tensor in tensors.items()})
    with pytest.raises(UserError, match=r"tensor \\x1b\[31ma has characters in its name") as error:
        open_checkpoint(copy)
    assert str(error.value).isprintable()


@pytest.mark.parametrize(
    ("section", "key", "value"),
    [
        ("optimizer", "updates", 11),
        ("optimizer", "updates", -1),
        ("optimizer", "updates_before", {"head.weight": 11}),
        ("optimizer", "good_steps", -1),
        ("optimizer", "good_steps", 10**30),
        ("optimizer", "loss_scale", 0.0),
        ("optimizer", "loss_scale", float("inf")),
        ("optimizer", "loss_scale", float("nan")),
        ("history", "left_out", [-1]),
        ("history", "failed", [2**60]),
        ("optimizer", "updates", "x" * 1000),
    ],
)
def test_a_state_that_no_run_has_is_refused_though_its_checksum_is_right(copy, section, key, value):
    state = TrainState(
        config=RunConfig(),
        data={},
        optimizer=OptimizerState(10, 1.0, 0),
        loss=2.5,
        grad_norm=1.0,
        history=SpikeHistory((2.5,), (8,), ()),
    ).model_dump(mode="json")
    resealed(copy, state=state)
    with open_checkpoint(copy) as checkpoint:
        assert read_train_state(checkpoint).optimizer.updates == 10
    state[section][key] = value
    resealed(copy, state=state)
    with open_checkpoint(copy) as checkpoint, pytest.raises(UserError, match=key) as error:
        read_train_state(checkpoint)
    assert len(str(error.value).splitlines()) == 1 and len(str(error.value)) < 400


@pytest.mark.parametrize(
    ("split", "refused"),
    [([0.8, 0.1, 0.1], False), ([0.8, 0.0, 0.2], False), ([0.7, 0.3, 0], True)],
)
def test_what_is_held_out_may_be_divided_otherwise_but_not_what_is_trained_on(split, refused):
    def make(split):
        return RunConfig(data={"sources": [{"path": "a"}], "split": split})

    path = Path("runs/a")
    if not refused:
        check_same_run(make([0.8, 0.2, 0]), make(split), path)
        return
    with pytest.raises(UserError, match=r"data.split: \[0.8, 0.2, 0.0\] there"):
        check_same_run(make([0.8, 0.2, 0]), make(split), path)
