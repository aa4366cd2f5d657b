"""Checkpoints under URLs: they behave as in a folder, whatever happens to the connection."""

import contextlib
import itertools
import json
import os
import sys
import threading
import warnings
from pathlib import Path

import fsspec
import pytest
import torch
from checkpoint_helpers import cut_slice, draw_partition, load_all, make_slice, save, shapes
from hypothesis import example, given, settings
from hypothesis import strategies as st
from s3_server import BUCKET, SECRET, Server, use
from tolerances import promised
from torch.distributed import HashStore

from megaframe.checkpoint import (
    CheckpointWriter,
    Slice,
    find_checkpoint,
    open_checkpoint,
    parse_path,
    shard_file,
)
from megaframe.checkpoint.inspect import find_damage
from megaframe.checkpoint.manifest import checksum
from megaframe.checkpoint.stores import object_store as remote_module
from megaframe.checkpoint.stores import retry
from megaframe.errors import UserError

ROOT = Path(__file__).resolve().parents[3]
sys.path[:0] = [str(ROOT), str(ROOT / "tools")]

import checkpoint as tool  # noqa: E402

import pretrain_gpt  # noqa: E402

PIECE, FILE = 256, 1024
COUNT = itertools.count()


@pytest.fixture(scope="module")
def server():
    started = Server()
    with pytest.MonkeyPatch.context() as patch:
        for name, value in started.environment.items():
            patch.setenv(name, value)
        use(started.environment)
        yield started
    started.close()


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Use small pieces and files, and short retries."""
    monkeypatch.setattr(shard_file, "MAX_ENTRY_BYTES", PIECE)
    monkeypatch.setattr(remote_module, "FILE_BYTES", FILE)
    monkeypatch.setattr(retry, "RETRY_SECONDS", 20.0)
    monkeypatch.setattr(retry, "FIRST_PAUSE", 0.02)


@pytest.fixture
def s3(server):
    yield parse_path(f"s3://{BUCKET}/run{next(COUNT)}/checkpoints")
    server.clear()


@pytest.fixture
def memory():
    return parse_path(f"memory://run{next(COUNT)}/checkpoints")


@pytest.fixture(params=["s3", "memory"])
def home(request):
    return request.getfixturevalue(request.param)


def list_names(home):
    """Return the names of all objects below a URL."""
    system, path = retry.open_filesystem(home)
    system.invalidate_cache()
    return sorted(paths.partition("/checkpoints/")[2] for paths in system.find(path))


def read_content(file):
    system, path = retry.open_filesystem(file)
    return system.cat_file(path)


def put(file, data):
    system, path = retry.open_filesystem(file)
    system.pipe_file(path, data)


def make_weight(value=1.0, size=1000):
    return torch.arange(float(size)) + value


def save_steps(home, *values, **options):
    """Save a checkpoint of two ranks for each value, at steps 1, 2, ...; return the last one."""
    for step, value in enumerate(values, 1):
        full = make_weight(value)
        ranks = [[cut_slice("a", full, ((start,), (500,)))] for start in (0, 500)]
        path = save(home, ranks, step=step, state={"value": value}, **options)
    return path


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


@settings(deadline=None, max_examples=15)
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


class TestInterruptions:
    """Faults that outlast the client library's retries: it makes one attempt here."""

    FILES = 12
    SIZE = FILES * FILE // 4

    def bytes_of(self, server):
        """Return the size of each object: the bytes sent divided by the number of PUTs."""
        return {path: size / server.puts[path] for path, size in server.sent.items()}

    def saved_with(self, server, home, fault):
        server.clear()
        server.fault = fault
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            path = save(home, [[make_slice("a", make_weight(5.0, self.SIZE))]])
        assert torch.equal(load_all(path)["a"], make_weight(5.0, self.SIZE).double())
        files = [name for name in server.puts if name.endswith(".safetensors")]
        assert len(files) == self.FILES
        return files

    def test_without_any_everything_is_sent_once(self, server, s3):
        self.saved_with(server, s3, lambda method, path: None)
        assert set(server.puts.values()) == {1}

    @pytest.mark.parametrize("what", [500, 503, "reset"])
    def test_only_the_part_that_broke_is_sent_again(self, server, s3, what):
        times = itertools.count()
        broken = "rank-00000.00005."

        def fault(method, path):
            return what if method == "PUT" and broken in path and next(times) < 3 else None

        files = self.saved_with(server, s3, fault)
        repeated_paths = [path for path in files if server.puts[path] > 1]
        assert len(repeated_paths) == 1 and broken in repeated_paths[0]
        assert all(server.puts[path] == 1 for path in files if path not in repeated_paths)
        largest = max(server.sent[path] for path in files if path not in repeated_paths)
        assert server.sent[repeated_paths[0]] <= 4 * largest  # three failures and a success

    def test_a_server_that_stops_for_a_while_costs_what_was_on_its_way(self, server, s3):
        requests = itertools.count()

        def fault(method, path):
            if method == "PUT" and next(requests) == self.FILES // 2:
                server.stop_for(1.0)
                return "reset"
            return None

        files = self.saved_with(server, s3, fault)
        repeats = sum(server.puts[path] - 1 for path in files)
        assert 1 <= repeats <= remote_module._PARALLEL_REQUESTS

    def test_reading_goes_on_after_a_break(self, server, s3):
        path = save_steps(s3, 1.0)
        times = itertools.count()
        server.fault = lambda method, path: 500 if next(times) % 2 == 0 else None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            assert torch.equal(load_all(path)["a"], make_weight(1.0).double())

    def test_one_that_fails_for_good_is_named_and_the_last_one_stays(self, server, s3, monkeypatch):
        monkeypatch.setattr(retry, "RETRY_SECONDS", 0.3)
        good = save_steps(s3, 1.0)
        store = HashStore()
        writers = [
            CheckpointWriter(s3, rank=rank, world=2, store=store, keep=1, timeout=20)
            for rank in range(2)
        ]
        half = [[cut_slice("a", make_weight(2.0), ((at,), (500,)))] for at in (0, 500)]
        server.fault = lambda method, path: 500 if "2/rank-00001.00001." in path else None
        for writer, slices in zip(writers, half, strict=True):
            writer.save(2, slices, {})
        for writer in writers:
            with warnings.catch_warnings(), pytest.raises(UserError) as error:
                warnings.simplefilter("ignore")
                writer.wait()
            text = str(error.value)
            assert "rank 1: cannot write" in text and f"{s3}/step-00000002/rank-00001.00001" in text
        assert find_checkpoint(s3, "latest") == good and list(find_damage(good)) == []
        assert {name.partition("/")[0] for name in list_names(s3)} == {"latest", "step-00000001"}
        server.clear()
        for writer, slices in zip(writers, half, strict=True):
            writer.save(3, slices, {})
        for writer in writers:
            writer.wait()
        assert torch.equal(load_all(find_checkpoint(s3, "latest"))["a"], make_weight(2.0).double())

    def test_an_answer_that_is_lost_after_the_commit_loses_no_checkpoint(
        self, server, s3, monkeypatch
    ):
        """The manifest is stored, but its answer is lost: what it names must not be deleted."""
        monkeypatch.setattr(retry, "RETRY_SECONDS", 0.3)
        save_steps(s3, 1.0)
        inner = server._application
        monkeypatch.setattr(server, "_application", lose_answer(inner, "manifest.json"))
        with warnings.catch_warnings(), pytest.raises(UserError):
            warnings.simplefilter("ignore")
            save(s3, [[make_slice("a", make_weight(3.0))]], step=1)
        monkeypatch.setattr(server, "_application", inner)
        assert torch.equal(load_all(find_checkpoint(s3, "latest"))["a"], make_weight(3.0).double())


def lose_answer(application, name):
    """Wrap an application: it executes a PUT of `name`, and then answers with an error."""

    def answer(environ, start_response):
        if environ["REQUEST_METHOD"] != "PUT" or name not in environ["PATH_INFO"]:
            return application(environ, start_response)
        list(application(environ, lambda *arguments: None))
        start_response("500 Lost", [("Content-Length", "0")])
        return [b""]

    return answer


class Died(BaseException):
    """Stands for the death of a process: nothing after it is executed."""


@contextlib.contextmanager
def fail_from(number):
    """Let all writing requests to memory:// fail from the `number`-th on, as in a dead process.

    Yields a list that is not empty once a request has failed.
    """
    system = fsspec.filesystem("memory")
    done = itertools.count(1)
    dead = []

    def mortal(act):
        def call(*arguments, **options):
            if dead or next(done) == number:
                dead.append(True)
                raise Died
            return act(*arguments, **options)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for name in ("pipe_file", "rm_file", "makedirs"):
            patch.setattr(system, name, mortal(getattr(system, name)))
        yield dead


def test_a_writer_can_die_before_any_request(monkeypatch):
    monkeypatch.setattr(threading, "excepthook", lambda arguments: None)
    for number in itertools.count(1):
        home = parse_path(f"memory://dying{next(COUNT)}/checkpoints")
        save_steps(home, 1.0, 2.0, keep=2)
        with fail_from(number) as dead, contextlib.suppress(Died):
            writer = CheckpointWriter(home, rank=0, world=1, store=HashStore(), keep=2)
            for step in (2, 3):  # replaces step 2, then makes step 1 superfluous
                writer.save(
                    step, [make_slice("a", make_weight(10.0 + step))], {"value": 10.0 + step}
                )
                writer.wait()
                if dead:
                    break
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            path = find_checkpoint(home, "latest")
        with open_checkpoint(path) as checkpoint:
            value = checkpoint.state["value"]
        assert value >= 2.0 and list(find_damage(path)) == []
        assert torch.equal(load_all(path)["a"], make_weight(value).double())
        save(home, [[make_slice("a", make_weight(20.0))]], step=5, keep=2)
        assert torch.equal(
            load_all(find_checkpoint(home, "latest"))["a"], make_weight(20.0).double()
        )
        expected_names = {f"{path_.parent.name}/{path_.name}" for path_ in list_named_files(home)}
        assert {name for name in list_names(home) if "rank-" in name} == expected_names
        if not dead:
            break
    assert number > 10


def list_named_files(home):
    for step in ("step-00000001", "step-00000002", "step-00000003", "step-00000005"):
        with contextlib.suppress(UserError), open_checkpoint(home / step) as checkpoint:
            for tensor in checkpoint.tensors.values():
                yield from (home / step / piece.file for piece in tensor.slices)


class TestTools:
    def run(self, capsys, monkeypatch, *arguments):
        monkeypatch.setattr(sys, "argv", ["checkpoint.py", *map(str, arguments)])
        with pytest.raises(SystemExit) as exited:
            tool.main()
        printed = capsys.readouterr()
        return exited.value.code, printed.out + printed.err

    @pytest.mark.slow
    def test_inspect_verify_diff_and_reshard(self, s3, tmp_path, capsys, monkeypatch):
        path = save_steps(s3, 1.0)
        status, text = self.run(capsys, monkeypatch, "inspect", s3, "--tensors")
        assert status == 0 and f"{path}: step 1, 4 files" in text
        status, text = self.run(capsys, monkeypatch, "verify", path)
        assert (status, "1 tensors in" in text) == (0, True)
        local_copy, remote_copy = tmp_path / "here", s3.parent / "there"
        assert (
            self.run(capsys, monkeypatch, "reshard", s3, "--to", local_copy, "--files", 1)[0] == 0
        )
        assert (
            self.run(capsys, monkeypatch, "reshard", local_copy, "--to", remote_copy, "--files", 3)[
                0
            ]
            == 0
        )
        assert [path.name for path in local_copy.glob("*/rank*")] == ["rank-00000.safetensors"]
        for first, other in (
            (local_copy, s3),
            (remote_copy, s3),
            (f"file://{local_copy}", remote_copy),
        ):
            status, text = self.run(capsys, monkeypatch, "diff", first, other)
            assert status == 0 and "0 tensors differ, 1 are the same" in text
        status, text = self.run(
            capsys, monkeypatch, "reshard", local_copy, "--to", remote_copy, "--files", 1
        )
        assert status == 2 and f"{remote_copy}/step-00000001 already exists" in text

    def test_every_flipped_byte_is_found_and_named(self, memory, capsys, monkeypatch):
        path = save_steps(memory, 1.0)
        for name in ("manifest.json", *{path_.name for path_ in list_named_files(memory)}):
            before = read_content(path / name)
            for at in (0, len(before) // 2, len(before) - 1):
                put(path / name, before[:at] + bytes([before[at] ^ 1]) + before[at + 1 :])
                status, text = self.run(capsys, monkeypatch, "verify", path)
                assert status == 1 and f"{path}/{name}" in text
            put(path / name, before[:-1])
            status, text = self.run(capsys, monkeypatch, "verify", path)
            assert status == 1 and name in text
            put(path / name, before)
        one = next(list_named_files(memory))
        system, gone = retry.open_filesystem(one)
        system.rm_file(gone)
        status, text = self.run(capsys, monkeypatch, "verify", path)
        assert status == 1 and f"{one}: No such file" in text

    def test_a_missing_bucket_or_object_is_named(self, s3, capsys, monkeypatch):
        status, text = self.run(capsys, monkeypatch, "verify", "s3://nowhere/x")
        assert status == 2 and "path=s3://nowhere/x: there is no such folder" in text
        status, text = self.run(capsys, monkeypatch, "verify", "nostore://x/y")
        assert status == 2 and "no store is known for nostore://" in text


@settings(deadline=None, max_examples=40)
@given(st.binary(max_size=80) | st.sampled_from([b"../../x", b"step-00000002", b"latest"]))
def test_a_pointer_of_any_content_leads_nowhere_else(pointer):
    home = parse_path(f"memory://pointer{next(COUNT)}/checkpoints")
    path = save_steps(home, 1.0)
    put(home / "latest", pointer)
    assert find_checkpoint(home, "latest", lambda note: None) == path


@pytest.mark.slow
@settings(deadline=None, max_examples=100)
@given(st.data())
def test_a_manifest_of_any_content_is_refused_or_means_the_same(data):
    home = parse_path(f"memory://manifest{next(COUNT)}/checkpoints")
    path = save_steps(home, 1.0)
    manifest = json.loads(read_content(path / "manifest.json"))
    del manifest["checksum"]
    names_ = st.sampled_from(
        ["../../step-00000001/rank-00000.safetensors", "/etc/passwd", "s3://b/x", "manifest.json"]
    )
    wrong = data.draw(st.integers(-(10**30), 10**30) | names_ | st.text(max_size=9) | st.none())
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
    put(path / "manifest.json", b'{"checksum":"%s",' % checksum(body).encode() + body)
    with contextlib.suppress(UserError):
        assert torch.equal(load_all(path)["a"], make_weight(1.0).double())


class TestSecrets:
    @settings(deadline=None, max_examples=200)
    @given(
        st.text(max_size=30)
        | st.builds("{}://{}:{}@{}".format, *[st.text(min_size=1, max_size=8)] * 4)
    )
    @example("s3://@[")  # urllib cannot parse its host
    def test_any_text_is_a_place_or_refused_with_a_message(self, text):
        with contextlib.suppress(UserError):
            parsed = parse_path(text)
            assert isinstance(parsed, Path) == (
                "://" not in text or text.startswith(("file", "local"))
            )

    @pytest.mark.parametrize(
        "url",
        [
            f"s3://key:{SECRET}@bucket/x",
            f"https://host/x?token={SECRET}",
            f"abfs://box/x#{SECRET}",
            f"sftp://user:{SECRET}@host:22/x",
            f"https://{SECRET}@host/../x",
            f"https://{SECRET}@host/x",
        ],
    )
    def test_a_url_with_a_secret_is_refused_and_not_repeated(
        self, url, overrides, capsys, monkeypatch, tmp_path
    ):
        with pytest.raises(UserError) as error:
            parse_path(url)
        assert SECRET not in str(error.value)
        monkeypatch.chdir(tmp_path)
        folders = ("folder", "resume", "weights", "memory_dir")
        for key in (*(f"checkpoint__{name}" for name in folders), "run__dir", "meter__wandb"):
            for options in ([], ["--dry-run"]):
                argv = ["pretrain_gpt.py", *overrides(**{key: url}), *options]
                monkeypatch.setattr(sys, "argv", argv)
                with pytest.raises(SystemExit) as stopped:
                    pretrain_gpt.main()
                printed = capsys.readouterr()
                assert stopped.value.code == 2 and key.replace("__", ".") in printed.err
                assert SECRET not in printed.out + printed.err
        assert not [*tmp_path.iterdir()]

    def test_what_a_library_says_is_told_without_secrets(self, s3, monkeypatch):
        system, _ = retry.open_filesystem(s3)

        def leak(*arguments, **options):
            raise OSError(f"cannot sign with {SECRET} (AKIAABCDEFGHIJKLMNOP), Signature=abc%2F1")

        monkeypatch.setattr(system, "info", leak)
        monkeypatch.setattr(retry, "RETRY_SECONDS", 0.1)
        with (
            pytest.warns(UserWarning, match="trying again") as caught_warnings,
            pytest.raises(UserError) as error,
        ):
            open_checkpoint(s3 / "step-00000001")
        for text in (str(error.value), *(str(warning.message) for warning in caught_warnings)):
            assert "cannot sign with ***" in text and "Signature=***" in text
            assert SECRET not in text and "AKIA" not in text and "abc%2F1" not in text


def train(environment, arguments):
    """Run the entry in a worker that is a client of the server."""
    os.environ.update(environment)
    sys.argv = ["pretrain_gpt.py", *arguments]
    pretrain_gpt.main()


@pytest.mark.slow
def test_a_run_saves_resumes_and_starts_warm_from_urls(server, s3, pool, overrides, tmp_path):
    keys = {"checkpoint__folder": s3, "checkpoint__every": 4, "checkpoint__keep": 3}

    def run(name, ranks=1, **changes):
        folder = tmp_path / name
        options = overrides(run__dir=folder, **{**keys, **changes})
        pool.run(ranks, train, server.environment, options)
        assert not (folder / "checkpoints").exists()
        lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
        return {line["step"]: line["loss"] for line in lines}

    first = run("first")
    with pytest.raises(AssertionError, match="SystemExit"):  # it would delete those of the first
        run("second")
    put(s3 / "latest", b"step-00000008\n")
    latest = run("latest", 2, checkpoint__resume="latest", parallel__zero=3)
    explicit = run("given", checkpoint__resume=s3 / "step-00000004", checkpoint__every=0)
    assert list(latest) == [9, 10, 11, 12] and list(explicit) == list(range(5, 13))
    for losses in (latest, explicit):
        assert losses == promised({step: first[step] for step in losses})
    assert list(find_damage(find_checkpoint(s3, "latest"))) == []
    weights = {"checkpoint__weights": s3 / "step-00000012", "checkpoint__every": 0}
    assert list(run("warm", train__steps=2, **weights)) == [1, 2]
    for file in tmp_path.rglob("*"):
        assert not file.is_file() or SECRET.encode() not in file.read_bytes()
    assert all(SECRET.encode() not in read_content(s3 / name) for name in list_names(s3))
