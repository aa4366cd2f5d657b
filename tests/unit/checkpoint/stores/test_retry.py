"""Interrupted connections to object stores, and writers that die: what is saved stays whole."""

import contextlib
import itertools
import sys
import threading
import warnings
from pathlib import Path

import fsspec
import pytest
import torch
from checkpoint_helpers import cut_slice, load_all, make_slice, save
from object_stores import COUNT, FILE, list_named_files, list_names, make_weight, save_steps
from patience import PATIENCE
from slow_cases import slow
from torch.distributed import HashStore

from megaframe.checkpoint import CheckpointWriter, find_checkpoint, open_checkpoint, parse_path
from megaframe.checkpoint.inspect import find_damage
from megaframe.checkpoint.stores import object_store as remote_module
from megaframe.errors import UserError
from megaframe.io import remote_requests as retry

ROOT = Path(__file__).resolve().parents[4]
sys.path[:0] = [str(ROOT), str(ROOT / "tools")]


pytestmark = pytest.mark.usefixtures("small_files")


class TestInterruptions:
    """Faults that outlast the client library's retries: it makes one attempt here."""

    FILES = 8
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

    @pytest.mark.parametrize("what", [slow(500), slow(503), "reset"])
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

    @pytest.mark.slow
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

    @pytest.mark.slow
    def test_one_that_fails_for_good_is_named_and_the_last_one_stays(self, server, s3, monkeypatch):
        monkeypatch.setattr(retry, "RETRY_SECONDS", 0.3)
        good = save_steps(s3, 1.0)
        store = HashStore()
        writers = [
            CheckpointWriter(s3, rank=rank, world=2, store=store, keep=1, timeout=PATIENCE)
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


@pytest.mark.parametrize("stride", [4, slow(1)])
def test_a_writer_can_die_before_any_request(stride, monkeypatch):
    monkeypatch.setattr(threading, "excepthook", lambda arguments: None)
    for number in itertools.count(1, stride):
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
        expected_names = {f"{file.parent.name}/{file.name}" for file in list_named_files(home)}
        assert {name for name in list_names(home) if "rank-" in name} == expected_names
        if not dead:
            break
    assert number > 10
