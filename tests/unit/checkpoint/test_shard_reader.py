"""Untrusted manifests and shard files: bad content is refused, never executed, and allocates little
memory."""

import copy as copies
import json
import os
import pickle
import resource
import shutil
import subprocess
import sys
import tempfile
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from checkpoint_helpers import FILES, load_all, make_slice, reheaded, save, write_sealed
from hypothesis import given
from hypothesis import strategies as st

from megaframe.checkpoint import Slice, open_checkpoint
from megaframe.checkpoint.manifest import compute_checksum
from megaframe.errors import UserError

ROOM = 256 << 20
"""Bytes of new address space that one example may use: threads reserve that much for heaps."""
HUGE = [-(1 << 63), -1, 0, 1, 3, 4, 7, 1 << 31, (1 << 48) - 1, 1 << 48, 1 << 60, 10**40]
ODD = [None, True, 1.5, 1e308, "", [], {}, "0" * 16, "rank-00001.safetensors", "F64", "I64"]
PATHS = ["../../etc/passwd", "/etc/passwd", "rank-00000.safetensors/../x", "rank-0\x00.safetensors"]


def deep(levels):
    nested_lists = []
    for _ in range(levels):
        nested_lists = [nested_lists]
    return nested_lists


values = st.one_of(
    st.sampled_from(HUGE),
    st.sampled_from([*ODD, *PATHS]),
    st.integers(),
    st.lists(st.sampled_from(HUGE), max_size=12),
    st.integers(1, 300).map(deep),
    st.text(max_size=40),
)


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    full = torch.randn(4, 3)
    halves = [
        [
            Slice("a", (4, 3), (2 * rank, 0), full[2 * rank :][:2]),
            make_slice(f"b{rank}", torch.randn(2)),
        ]
        for rank in range(2)
    ]
    return save(tmp_path_factory.mktemp("run"), halves, step=10, state={"loss": [2.5, {"x": "y"}]})


@contextmanager
def little_memory():
    """Limit the address space to `ROOM` more than now, so that large allocations fail."""
    size = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (size + ROOM, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def mutate(data, root):
    """Change, remove, add or repeat one entry somewhere in a JSON value."""
    at, parents = root, []
    while isinstance(at, dict | list) and at and (not parents or data.draw(st.integers(0, 4))):
        keys = list(at) if isinstance(at, dict) else range(len(at))
        parents.append((at, data.draw(st.sampled_from([*keys]))))
        at = at[parents[-1][1]]
    parent, key = data.draw(st.sampled_from(parents))
    mutation = data.draw(st.sampled_from(["set", "remove", "add", "repeat"]))
    if mutation == "set":
        parent[key] = data.draw(values)
    elif mutation == "remove":
        del parent[key]
    elif isinstance(parent, list):
        parent.append(copies.deepcopy(parent[key]) if mutation == "repeat" else data.draw(values))
    else:
        parent[data.draw(st.text(max_size=9))] = copies.deepcopy(parent[key])


def attempt(path):
    """Open a checkpoint and load everything; no error but `UserError` may be raised."""
    with little_memory():
        try:
            load_all(path)
        except UserError as error:
            assert str(path) in str(error)


@given(st.data())
def test_changed_manifests_and_headers_are_refused_or_harmless(good, data):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(shutil.copytree(good, Path(folder) / "x"))
        if data.draw(st.booleans()):
            manifest = json.loads((path / "manifest.json").read_bytes())
            del manifest["checksum"]
            for _ in range(data.draw(st.integers(1, 3))):
                if manifest:
                    mutate(data, manifest)
            write_sealed(path / "manifest.json", manifest)
        else:

            def edit(header):
                for _ in range(data.draw(st.integers(1, 3))):
                    if header:
                        mutate(data, header)

            reheaded(path / data.draw(st.sampled_from(FILES[1:])), edit)
        attempt(path)
        assert sorted(file.name for file in path.iterdir()) == FILES


def test_a_slice_of_a_file_with_holes_takes_no_memory(good, tmp_path):
    """The file is a sparse terabyte, and so is the slice in it."""
    path = Path(shutil.copytree(good, tmp_path / "x"))
    size = 1 << 40
    os.truncate(path / FILES[1], size)
    manifest = json.loads((path / "manifest.json").read_bytes())
    del manifest["checksum"]
    slice_entry = {"file": FILES[1], "offset": [0], "shape": [1 << 38], "checksum": "0" * 16}
    manifest["files"][FILES[1]]["bytes"] = size
    manifest["tensors"] = {"a": {"shape": [1 << 38], "dtype": "F32", "slices": [slice_entry]}}
    write_sealed(path / "manifest.json", manifest)
    with (
        little_memory(),
        pytest.raises(UserError, match="larger than any"),
        open_checkpoint(path) as checkpoint,
    ):
        checkpoint.load([Slice("a", (1 << 38,), (5,), torch.zeros(2))])


def test_names_that_come_twice_are_read_once(good, tmp_path):
    path = Path(shutil.copytree(good, tmp_path / "x"))
    content = (path / "manifest.json").read_bytes()
    twice = content[content.index(b",") + 1 : -1] + b',"step":11,"tensors":{}}'
    (path / "manifest.json").write_bytes(
        b'{"checksum":"%s",' % compute_checksum(twice).encode() + twice
    )
    with open_checkpoint(path) as checkpoint:
        assert (checkpoint.step, dict(checkpoint.tensors)) == (11, {})


class Bomb:
    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return os.mkdir, (self.path,)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("as_torch", [False, True])
def test_a_pickle_runs_nothing(good, tmp_path, name, as_torch):
    path = Path(shutil.copytree(good, tmp_path / "x"))
    if as_torch:
        torch.save(Bomb(tmp_path / "harm"), path / name)
    else:
        (path / name).write_bytes(pickle.dumps(Bomb(tmp_path / "harm")))
    with pytest.raises(UserError, match=name):
        load_all(path)
    assert not (tmp_path / "harm").exists()


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("target", ["/etc/passwd", "/dev/zero", "/proc/self/mem", "/", "nowhere"])
def test_links_out_of_the_folder_are_refused(good, tmp_path, name, target):
    path = Path(shutil.copytree(good, tmp_path / "x"))
    (path / name).unlink()
    (path / name).symlink_to(target)
    with little_memory(), pytest.raises(UserError, match=name):
        load_all(path)


@pytest.mark.slow
def test_a_load_takes_little_more_than_what_is_loaded():
    """A load uses less than a tenth of the rank's own part in addition, so never a whole tensor."""
    child = Path(__file__).parents[2] / "support" / "checkpoint_child.py"
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=memory) as folder:
        process = subprocess.run(
            [sys.executable, child, "extra_memory", folder],
            capture_output=True,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )
    assert process.returncode == 0, process.stderr
    part, extra = map(int, process.stdout.split())
    assert extra < part / 10
