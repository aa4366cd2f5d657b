"""Folders of torch.distributed.checkpoint: torch reads ours and megaframe reads torch's, bit for
bit, and hostile folders are refused.

Tests `megaframe.checkpoint.convert.dcp.payload`.
"""

import io
import json
import os
import pickle
import shutil
import tempfile
import warnings
import zipfile
from pathlib import Path

import pytest
import torch
from checkpoint_helpers import cut_slice, draw_partition, make_slice, save, shapes
from hypothesis import given, settings
from hypothesis import strategies as st

from megaframe.checkpoint import Slice, open_checkpoint, shard_file
from megaframe.checkpoint.convert import dcp
from megaframe.checkpoint.convert.dcp.dcp_folder import RUN_STATE_NAME
from megaframe.checkpoint.convert.dcp.metadata import read_metadata
from megaframe.checkpoint.convert.dcp.pickle_parser import parse_pickle
from megaframe.checkpoint.manifest import DTYPES
from megaframe.checkpoint.train_state import read_train_state
from megaframe.config import RunConfig
from megaframe.errors import UserError
from megaframe.model.model_chunk import list_model_specs

warnings.filterwarnings("ignore", module="torch.distributed.checkpoint")


def get_torch_dcp():
    """Return torch's library. Its import takes a second, so processes that only collect this file
    do not import it."""
    import torch.distributed.checkpoint

    return torch.distributed.checkpoint


def view_bits(tensor):
    return tensor.contiguous().view(-1).view(torch.uint8)


def load_saved(path):
    """Return all tensors of a checkpoint, in the types in which they are saved."""
    with open_checkpoint(path) as checkpoint:
        tensors = {
            name: torch.zeros(tensor.shape).to(DTYPES[tensor.dtype])
            for name, tensor in checkpoint.tensors.items()
        }
        checkpoint.load([make_slice(name, tensor) for name, tensor in tensors.items()])
        return tensors


def assert_same_tensors(actual, expected):
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        assert actual[name].dtype == tensor.dtype and actual[name].shape == tensor.shape, name
        assert torch.equal(view_bits(actual[name]), view_bits(tensor)), name


@settings(max_examples=6)
@given(st.data())
def test_what_is_exported_loads_in_torch_and_comes_back(data):
    dtypes = st.sampled_from(list(DTYPES.values()))
    tensors = {
        f"optimizer.{index}/é weight": torch.randn(shape, dtype=torch.float64).to(dtype)
        for index, (shape, dtype) in enumerate(
            data.draw(st.lists(st.tuples(shapes, dtypes), min_size=1, max_size=4))
        )
    }
    ranks = [
        [cut_slice(name, tensor, box) for box in data.draw(draw_partition(tensor.shape))]
        for name, tensor in tensors.items()
    ]
    state = {"loss": data.draw(st.floats(allow_nan=False)), "text": data.draw(st.text())}
    with tempfile.TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch:
        folder = Path(name)
        patch.setattr(shard_file, "MAX_ENTRY_BYTES", data.draw(st.sampled_from([8, 64, 1 << 20])))
        patch.setattr(dcp.dcp_folder, "FILE_BYTES", data.draw(st.sampled_from([16, 1 << 20])))
        with open_checkpoint(save(folder / "ours", ranks, step=7, state=state)) as source:
            dcp.export_checkpoint(source, folder / "dcp")
        loaded = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()} | {
            RUN_STATE_NAME: ""
        }
        get_torch_dcp().load(loaded, checkpoint_id=folder / "dcp", no_dist=True)
        assert json.loads(loaded.pop(RUN_STATE_NAME)) == {"step": 7, "state": state}
        assert_same_tensors(loaded, tensors)
        imported = dcp.import_checkpoint(folder / "dcp", folder / "back")
        assert (imported.left_out, imported.has_state) == ([], True)
        assert_same_tensors(load_saved(imported.path), tensors)
        with open_checkpoint(imported.path) as back:
            assert (back.step, dict(back.state)) == (7, state)


def make_tensors():
    generator = torch.Generator().manual_seed(0)
    return {
        "rows": torch.randn(7, 5, generator=generator),
        "columns": torch.randn(4, 9, generator=generator).bfloat16(),
        "both": torch.randn(3, 6, 2, generator=generator, dtype=torch.float64),
        "same": torch.randn(11, generator=generator).half(),
        "turned": torch.randn(6, 4, generator=generator).t(),
        "eight": torch.randn(8, 4, generator=generator).to(torch.float8_e4m3fn),
        "scalar": torch.tensor(2.5),
    }


def save_as_rank(folder, threads):
    """Save, on each of two ranks, tensors as FSDP and tensor-parallel modules shard them."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    rank, meeting = int(os.environ["RANK"]), f"file://{folder}-ranks"
    torch.distributed.init_process_group("gloo", init_method=meeting, rank=rank, world_size=2)
    try:
        mesh = init_device_mesh("cpu", (2,))
        full = make_tensors()
        state = {
            "rows": distribute_tensor(full["rows"], mesh, [Shard(0)]),
            "nested": {"columns": distribute_tensor(full["columns"], mesh, [Shard(1)])},
            "both": distribute_tensor(full["both"], mesh, [Shard(1)]),
            "same": distribute_tensor(full["same"], mesh, [Replicate()]),
            "turned": full["turned"],
            "eight": full["eight"],
            "list": [full["scalar"], {"lr": 0.1, "steps": torch.tensor(3)}],
            "nothing": torch.zeros(0, 3),
        }
        torch_dcp = get_torch_dcp()
        writer = torch_dcp.FileSystemWriter(
            folder, thread_count=threads, single_file_per_rank=threads == 1
        )
        torch_dcp.save(state, storage_writer=writer)
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize("threads", [1, 2])
def test_what_ranks_of_torch_saved_is_imported(pool, tmp_path, threads):
    pool.run(2, save_as_rank, str(tmp_path / "dcp"), threads)
    assert len(list((tmp_path / "dcp").glob("*.distcp"))) >= 2
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shard_file, "MAX_ENTRY_BYTES", 64)
        imported = dcp.import_checkpoint(tmp_path / "dcp", tmp_path / "ours")
    full = make_tensors()
    full["nested.columns"] = full.pop("columns")
    full["list.0"] = full.pop("scalar")
    assert_same_tensors(load_saved(imported.path), full)
    assert imported.left_out == ["list.1.lr", "list.1.steps", "nothing"] and not imported.has_state


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    folder = tmp_path_factory.mktemp("dcp") / "good"
    tensors = {"a": torch.arange(24.0).view(4, 6), "b": torch.ones(3).bfloat16()}
    get_torch_dcp().save(tensors, checkpoint_id=folder, no_dist=True)
    return folder


@pytest.fixture
def copy(good, tmp_path):
    return Path(shutil.copytree(good, tmp_path / "copy"))


def read_refusal(folder, match, to=None):
    before = sorted(os.listdir(folder))
    target = to or folder.parent / "made"
    with pytest.raises(UserError, match=match) as error:
        dcp.import_checkpoint(folder, target)
    assert sorted(os.listdir(folder)) == before
    assert not list(target.glob("*")) if target.exists() else True
    return str(error.value)


def edit(folder, change):
    """Apply `change` to the metadata that torch unpickles."""
    path = folder / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    change(metadata)
    path.write_bytes(pickle.dumps(metadata))


def find_index(metadata):
    """Return what names the only chunk of the tensor."""
    (index,) = (index for index in metadata.storage_data if index.fqn == "a")
    return index


def change_storage(**changes):
    return lambda metadata: vars(metadata.storage_data[find_index(metadata)]).update(changes)


def tensor(**changes):
    return lambda metadata: vars(metadata.state_dict_metadata["a"]).update(changes)


def chunk(**changes):
    return lambda metadata: vars(metadata.state_dict_metadata["a"].chunks[0]).update(changes)


HUGE = torch.Size([1 << 40, 6])
HOSTILE = {
    "traversal": (
        change_storage(relative_path="../../etc/passwd"),
        "etc/passwd', which is not a file name",
    ),
    "absolute": (
        change_storage(relative_path="/etc/passwd"),
        "etc/passwd', which is not a file name",
    ),
    "hidden": (change_storage(relative_path=".metadata"), "not a file name"),
    "no file": (change_storage(relative_path="__9_9.distcp"), "__9_9.distcp: No such file"),
    "behind the end": (change_storage(offset=1 << 40), "and that has"),
    "negative": (change_storage(offset=-1), "no part of"),
    "short": (change_storage(length=5), "needs 96 bytes, which should be in 5 from"),
    "in the middle": (change_storage(offset=77), "tensor a"),
    "compressed": (
        change_storage(transform_descriptors=["stream.zstd"]),
        "save without extensions",
    ),
    "huge": (tensor(size=HUGE), "its slices hold 24 elements instead of 6597069766656"),
    "huge everywhere": (
        lambda metadata: (tensor(size=HUGE)(metadata), chunk(sizes=HUGE)(metadata)),
        "needs 26388279066624 bytes",
    ),
    "over another": (
        lambda metadata: [
            vars(info).update(offset=0, length=3000) for info in metadata.storage_data.values()
        ],
        "should hold",
    ),
    "absurd": (tensor(size=torch.Size([1 << 62, 6])), "an invalid size"),
    "twice": (
        lambda metadata: metadata.state_dict_metadata["a"].chunks.append(
            metadata.state_dict_metadata["a"].chunks[0]
        ),
        "some overlap",
    ),
    "outside": (chunk(sizes=torch.Size([5, 6])), "a chunk outside it"),
    "unstored": (
        lambda metadata: metadata.storage_data.pop(find_index(metadata)),
        "stored nowhere",
    ),
    "no chunks": (tensor(chunks=[]), "hold 0 elements"),
    "no list": (tensor(chunks=5), "is not a list"),
    "another type": (
        lambda metadata: setattr(
            metadata.state_dict_metadata["a"].properties, "dtype", torch.float64
        ),
        "'a' at|tensor a",
    ),
    "number as name": (
        lambda metadata: metadata.state_dict_metadata.update({5: 5}),
        "a name that is not text",
    ),
    "another thing": (
        lambda metadata: metadata.state_dict_metadata.update(a=torch.Size([1])),
        "in place of a TensorStorageMetadata",
    ),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_metadata_are_refused(copy, name):
    change, match = HOSTILE[name]
    edit(copy, lambda metadata: None)
    assert_same_tensors(
        load_saved(dcp.import_checkpoint(copy, copy.parent / "fine").path), make_good_tensors()
    )
    edit(copy, change)
    read_refusal(copy, match)


def make_good_tensors():
    return {"a": torch.arange(24.0).view(4, 6), "b": torch.ones(3).bfloat16()}


class Evil:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def test_a_pickle_that_calls_is_named_and_not_followed(copy, tmp_path):
    target = tmp_path / "harm"
    edit(copy, lambda metadata: metadata.state_dict_metadata.update(evil=Evil(target)))
    assert "posix.mkdir" in read_refusal(copy, r"\.metadata cannot be read: it names 'posix.mkdir'")
    assert not target.exists()
    (copy / ".metadata").write_bytes(b"cos\nsystem\n(S'true'\ntR.")
    read_refusal(copy, r"names 'os.system'")


def test_a_tensor_that_calls_or_expands_is_named_and_not_followed(copy, tmp_path):
    target = tmp_path / "harm"

    def replaced(content):
        start = (copy / "__0_0.distcp").stat().st_size
        with open(copy / "__0_0.distcp", "ab") as file:
            file.write(content)
        edit(copy, change_storage(offset=start, length=len(content)))

    buffer = io.BytesIO()
    torch.save(Evil(target), buffer)
    replaced(buffer.getvalue())
    read_refusal(copy, "tensor a .*posix.mkdir")
    buffer = io.BytesIO()
    torch.save(make_good_tensors()["a"], buffer)
    for compressed, where in (("data/0", 1 << 24), ("data.pkl", 1 << 24)):
        bomb = io.BytesIO()
        with zipfile.ZipFile(buffer) as source, zipfile.ZipFile(bomb, "w") as bomb_file:
            for entry in source.infolist():
                content, kind = source.read(entry), zipfile.ZIP_STORED
                if entry.filename.endswith(compressed):
                    content, kind = bytes(where), zipfile.ZIP_DEFLATED
                bomb_file.writestr(entry.filename, content, kind)
        replaced(bomb.getvalue())
        read_refusal(copy, f"tensor a .*{compressed} is compressed")
    assert not target.exists()


@pytest.mark.slow
@given(st.data())
def test_every_flipped_bit_and_truncation_is_refused_or_changes_nothing_else(good, data):
    with tempfile.TemporaryDirectory() as name:
        folder = Path(shutil.copytree(good, Path(name) / "dcp"))
        file = folder / data.draw(st.sampled_from([".metadata", "__0_0.distcp"]))
        content = bytearray(file.read_bytes())
        for _ in range(data.draw(st.integers(1, 3))):
            content[data.draw(st.integers(0, len(content) - 1))] ^= 1 << data.draw(
                st.integers(0, 7)
            )
        if data.draw(st.booleans()):
            del content[data.draw(st.integers(0, len(content) - 1)) :]
        file.write_bytes(content)
        try:
            imported = dcp.import_checkpoint(folder, Path(name) / "ours")
        except UserError as error:
            assert str(folder) in str(error)
        else:
            for name, tensor in load_saved(imported.path).items():
                if file.name == ".metadata" and name in make_good_tensors():
                    assert tensor.numel() == make_good_tensors()[name].numel()


OPCODES = st.sampled_from(
    [bytes([code]) for code in b"\x80\x95(.)NIJKM]}ael t0q\x85\x86\x87\x88\x89RbuhQ2\x8c\x8a\x94"]
)


@given(st.lists(OPCODES | st.binary(max_size=3), max_size=60).map(b"".join))
def test_any_bytes_are_a_description_or_no_pickle(program):
    try:
        parse_pickle(program, ())
    except ValueError:
        return


def test_deep_and_endless_pickles_end(copy):
    for program in (
        b"(" * 10**5 + b".",
        b"]" * 10**5 + b"\x85" * 10**5 + b".",
        b")" + b"\x85" * 10**5 + b".",
        b"}N" + b"\x85" * 10**5 + b"Ns.",
    ):
        (copy / ".metadata").write_bytes(program)
        read_refusal(copy, r"\.metadata cannot be read")
    os.truncate(copy / ".metadata", 1 << 40)
    read_refusal(copy, "larger than")


def test_a_flipped_bit_of_a_tensor_is_noticed(copy):
    stored = next(iter(read_metadata(copy).tensors.values()))
    extent = stored.chunks[0].extent
    data = bytearray((copy / extent.file).read_bytes())
    with zipfile.ZipFile(io.BytesIO(data[extent.start :][: extent.length])) as archive:
        entry = next(info for info in archive.infolist() if "/data/" in info.filename)
    at = extent.start + entry.header_offset
    names, extra = (int.from_bytes(data[at + n : at + n + 2], "little") for n in (26, 28))
    data[at + 30 + names + extra] ^= 1
    (copy / extent.file).write_bytes(data)
    read_refusal(copy, "does not match its checksum")


@pytest.fixture
def config():
    shape = {"layers": 1, "hidden": 16, "heads": 2, "vocab": 31}
    return RunConfig(model=shape, train={"seq": 8, "precision": "fp32"})


def test_a_config_makes_foreign_weights_those_of_a_run(config, tmp_path):
    weights = {
        spec.name: torch.randn(spec.shape) for spec in list_model_specs(config.model, config.train)
    }
    get_torch_dcp().save(weights, checkpoint_id=tmp_path / "dcp", no_dist=True)
    imported = dcp.import_checkpoint(tmp_path / "dcp", tmp_path / "ours", config)
    assert_same_tensors(load_saved(imported.path), weights)
    with open_checkpoint(imported.path) as checkpoint:
        assert checkpoint.step == 0
        assert read_train_state(checkpoint).config.model.hidden == 16
    name, weight = weights.popitem()
    weights["other"] = weights.pop(next(iter(weights)))
    get_torch_dcp().save(weights, checkpoint_id=tmp_path / "less", no_dist=True)
    with pytest.raises(UserError) as error:
        dcp.import_checkpoint(tmp_path / "less", tmp_path / "more", config)
    assert f"{name} {tuple(weight.shape)} is missing" in str(error.value)


@pytest.mark.parametrize("where", ["state", "name"])
def test_no_secret_of_a_foreign_state_is_copied(where, tmp_path):
    secret = "s3://me:hunter22@host/x"
    state = {"config": {"data": {"mask_eod": secret}}} if where == "state" else {}
    name = secret if where == "name" else "a"
    source = save(tmp_path / "ours", [[make_slice(name, torch.ones(2, 3))]], state=state)
    with open_checkpoint(source) as checkpoint, pytest.raises(UserError, match="not copied") as it:
        dcp.export_checkpoint(checkpoint, tmp_path / "dcp")
    assert "hunter22" not in str(it.value) and not (tmp_path / "dcp").exists()

    foreign_state = {
        name: torch.ones(2, 3),
        dcp.dcp_folder.RUN_STATE_NAME: json.dumps({"step": 1, "state": state}),
    }
    get_torch_dcp().save(foreign_state, checkpoint_id=tmp_path / "theirs", no_dist=True)
    with pytest.raises(UserError, match="not copied") as it:
        dcp.import_checkpoint(tmp_path / "theirs", tmp_path / "back")
    assert "hunter22" not in str(it.value) and not (tmp_path / "back").exists()


def test_the_tool_exports_and_imports(tmp_path, run_checkpoint_tool):
    tensors = {"a": torch.randn(6, 4), "optimizer.moment/a": torch.randn(6, 4)}
    source = save(
        tmp_path / "ours", [[make_slice(*entry) for entry in tensors.items()]], state={"x": 1}
    )

    run = run_checkpoint_tool
    assert run("export-dcp", tmp_path / "ours", "--to", tmp_path / "dcp")[0] == 0
    status, text = run("import-dcp", tmp_path / "dcp", "--to", tmp_path / "back")
    assert status == 0 and "left out" not in text and "no run state" not in text
    assert run("diff", source, tmp_path / "back")[0] == 0
    status, text = run("export-dcp", source, "--to", tmp_path / "dcp")
    assert status == 2 and "already exists" in text
    status, text = run("import-dcp", tmp_path / "nowhere", "--to", tmp_path / "x")
    assert status == 2 and "not a torch.distributed.checkpoint folder" in text
    get_torch_dcp().save(
        {"a": tensors["a"], "n": 3}, checkpoint_id=tmp_path / "plain", no_dist=True
    )
    status, text = run("import-dcp", tmp_path / "plain", "--to", tmp_path / "stateless")
    assert status == 0 and "left out" in text and ": n" in text and "give --config" in text


def test_pieces_of_a_large_chunk_are_read_one_by_one(tmp_path, monkeypatch):
    monkeypatch.setattr(shard_file, "MAX_ENTRY_BYTES", 1 << 16)
    monkeypatch.setattr(dcp.dcp_folder, "MAX_ENTRY_BYTES", 1 << 16)
    full = torch.randn(1 << 9, 1 << 10)
    get_torch_dcp().save({"a": full}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    sizes = []
    read = dcp.dcp_folder.DCPDataFile.read

    def counted(*arguments):
        content = read(*arguments)
        sizes.append(len(content))
        return content

    monkeypatch.setattr(dcp.dcp_folder.DCPDataFile, "read", counted)
    imported = dcp.import_checkpoint(tmp_path / "dcp", tmp_path / "ours")
    assert (len(sizes), max(sizes)) == (32, 1 << 16)
    target = torch.zeros(3, 5)
    with open_checkpoint(imported.path) as checkpoint:
        checkpoint.load([Slice("a", tuple(full.shape), (100, 200), target)])
    assert torch.equal(target, full[100:103, 200:205])
