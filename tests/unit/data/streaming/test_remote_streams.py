"""Corpora under URLs: the same samples as from the folder, whatever the server does in between."""

import contextlib
import gzip
import time
import warnings

import fsspec
import gcp_storage_emulator.server
import numpy as np
import pytest
from file_server import FileServer
from hub_server import DATASET, HubServer
from s3_server import BUCKET, Server, use
from slow_cases import slow
from stream_runs import (
    configure,
    list_rows,
    make_texts,
    open_loader,
    take_rows,
    write_corpus,
    write_lines,
)
from token_files import make_counting_documents, write_token_file

from megaframe.data.preprocessing.corpus_files import CorpusFile, InputError
from megaframe.data.streaming.corpus import find_corpus
from megaframe.data.streaming.prepare_blocks import prepare_blocks
from megaframe.errors import UserError
from megaframe.io import remote_requests
from megaframe.io.remote_path import RemotePath
from megaframe.io.remote_reader import list_remote_files

STEPS = 40


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """Return a folder with a corpus in several formats, and what loaders read of it."""
    folder = tmp_path_factory.mktemp("served")
    texts = write_corpus(folder / "lines", files=3)
    (folder / "mixed" / "below").mkdir(parents=True)
    one, two, three = texts.values()
    write_lines(folder / "mixed" / "a.jsonl", one)
    write_lines(folder / "plain.jsonl", two)
    content = (folder / "plain.jsonl").read_bytes()
    (folder / "mixed" / "below" / "b.jsonl.gz").write_bytes(gzip.compress(content))
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.table({"text": three}), folder / "mixed" / "c.parquet")
    return folder


@pytest.fixture(scope="module")
def reference(served, tmp_path_factory):
    cache = tmp_path_factory.mktemp("local")
    return {
        name: take_rows(configure(cache / name, served / name), STEPS)[0]
        for name in ("lines", "mixed")
    }


@pytest.fixture
def server(served):
    started = FileServer(served)
    yield started
    started.close()
    remote_requests._open_filesystem.cache_clear()


class Faults:
    """Every third answer about a file fails in another way, at most `count` times."""

    def __init__(self, count=30):
        self.left, self.asked = count, 0

    def __call__(self, method, path):
        self.asked += 1
        if "." not in path or self.asked % 3 or not self.left:
            return None
        self.left -= 1
        return (503, "short", "reset", 500)[self.left % 4] if method == "GET" else 503


class TestHttp:
    @pytest.mark.parametrize("name", [slow("mixed"), slow("lines")])
    def test_a_folder_is_read_as_it_is(self, name, server, reference, tmp_path):
        config = configure(tmp_path, f"{server.url}/{name}")
        assert take_rows(config, STEPS)[0] == reference[name]

    @pytest.mark.parametrize("name", ["mixed", slow("lines")])
    def test_faults_in_between_change_nothing(self, name, server, reference, tmp_path, capfd):
        faults = server.fault = Faults()
        config = configure(tmp_path, f"{server.url}/{name}")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            assert take_rows(config, STEPS)[0] == reference[name]
        assert faults.left < 30
        assert "trying again for 1800 s" in capfd.readouterr().err

    @pytest.mark.parametrize(("ending", "fault"), [("lines/part0.jsonl", 503), ("below", "reset")])
    def test_what_cannot_be_asked_for_is_not_missing(self, ending, fault, server, served):
        left = [fault] * 4

        def fail_first(method, path):
            return left.pop() if path.rstrip("/").endswith(ending) and left else None

        server.fault = fail_first
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = list_remote_files(RemotePath(server.url))
        local = {path.relative_to(served) for path in served.rglob("*") if path.is_file()}
        assert {each.url.removeprefix(f"{server.url}/") for each in found} == set(map(str, local))
        assert not left

    def test_an_outage_is_waited_out(self, server, reference, tmp_path):
        with open_loader(configure(tmp_path, f"{server.url}/lines")) as loader:
            rows = list_rows(loader.next())
            server.stop_for(2.0)
            rows += [row for _ in range(STEPS - 1) for row in list_rows(loader.next())]
        assert rows == reference["lines"]

    @pytest.mark.slow
    def test_files_can_be_named_where_no_server_lists_them(self, served, reference, tmp_path):
        server = FileServer(served, lists=False)
        try:
            names = sorted(path.name for path in (served / "lines").iterdir())
            source = {"path": f"{server.url}/lines", "files": names}
            assert take_rows(configure(tmp_path, source), STEPS)[0] == reference["lines"]
        finally:
            server.close()

    @pytest.mark.slow
    def test_a_file_that_changes_is_refused(self, served, tmp_path):
        folder = tmp_path / "served" / "lines"
        write_corpus(folder, files=3)
        server = FileServer(folder.parent)
        try:
            config = configure(tmp_path, f"{server.url}/lines")
            with open_loader(config) as loader:
                for path in folder.iterdir():
                    path.write_bytes(path.read_bytes() + b"\n")
                with pytest.raises(UserError, match=r"bytes now, and [0-9,]+ when it was listed"):
                    for _ in range(1000):
                        loader.next()
        finally:
            server.close()

    @pytest.mark.slow
    def test_a_server_without_ranges_says_so(self, server, tmp_path):
        server.fault = lambda method, path: "whole"
        config = configure(tmp_path, f"{server.url}/lines")
        with pytest.raises(UserError, match="gives whole files where a range is asked for"):
            take_rows(config, 200)

    def test_what_is_not_there_is_named(self, server, tmp_path):
        for path in (f"{server.url}/nothing", f"{server.url}/nothing.jsonl"):
            with pytest.raises(UserError, match=f"cannot read {path}"):
                take_rows(configure(tmp_path, path), 1)

    def test_a_broken_row_is_named_with_its_url_and_line(self, served, server, tmp_path):
        write_lines(served / "rows" / "a.jsonl", make_texts(9))
        with open(served / "rows" / "a.jsonl", "a") as file:
            file.write("{\n")
        with pytest.raises(UserError, match=f"{server.url}/rows/a.jsonl:10: not JSON"):
            take_rows(configure(tmp_path, f"{server.url}/rows"), 1)


class TestTokensUnderUrls:
    @pytest.mark.slow
    def test_blocks_made_beforehand(self, served, server, reference, tmp_path):
        config = configure(tmp_path / "a", served / "lines")
        found = find_corpus(config.data.sources[0], config.data)
        prepare_blocks(found, str(served / "blocks"), workers=1)
        server.fault = Faults()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            config = configure(tmp_path, f"{server.url}/blocks")
            assert take_rows(config, STEPS)[0] == reference["lines"]

    @pytest.mark.slow
    def test_a_folder_of_token_files_with_weights(self, served, server, tmp_path):
        folder = served / "tokens"
        folder.mkdir()
        for number in range(3):
            documents = make_counting_documents([50] * 40, 5000 * number)
            write_token_file(folder / f"part{number}", documents)
            if number:
                ones = [[[number / 2] * 50] for _ in documents]
                write_token_file(folder / f"part{number}.weights", ones, dtype="f4")
        given = {"tokenizer": None, "label_weights": True}
        configs = [
            configure(tmp_path / str(n), path, **given)
            for n, path in enumerate((folder, f"{server.url}/tokens"))
        ]
        configs = [c.replace(model={"vocab": 65536}) for c in configs]
        local, remote = (take_rows(config, STEPS)[0] for config in configs)
        assert local == remote
        with open_loader(configs[1]) as loader:
            for step in (loader.next() for _ in range(STEPS)):
                for batch in step.microbatches:
                    of_file = batch.tokens_BS[0, 0].item() // 5000
                    weight = np.float32((1.0, 0.5, 1.0)[of_file])
                    assert (batch.weights_BS.numpy() == weight).all()

    @pytest.mark.slow
    def test_a_damaged_one_is_named(self, served, server, tmp_path):
        folder = served / "damaged"
        folder.mkdir()
        write_token_file(folder / "a", make_counting_documents([50] * 40))
        (folder / "a.bin").write_bytes((folder / "a.bin").read_bytes()[:-2])
        with pytest.raises(UserError, match="truncated or belongs to another index"):
            take_rows(configure(tmp_path, f"{server.url}/damaged", tokenizer=None), 1)


@pytest.fixture
def stores():
    """Give servers to close, and forget the clients of stores that are served no more."""
    with contextlib.ExitStack() as servers:
        yield servers
    remote_requests._open_filesystem.cache_clear()
    for scheme in ("s3", "gs", "hf"):
        fsspec.get_filesystem_class(scheme).clear_instance_cache()


@pytest.mark.slow
class TestStores:
    def test_a_bucket_of_s3_is_read_through_faults(
        self, served, reference, tmp_path, stores, monkeypatch
    ):
        server = stores.enter_context(contextlib.closing(Server()))
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
        use(server.environment)
        put_lines(served, "s3")
        begin = time.monotonic()
        server.fault = lambda method, path: 503 if time.monotonic() - begin < 2 else None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            config = configure(tmp_path, f"s3://{BUCKET}/texts/lines")
            assert take_rows(config, STEPS)[0] == reference["lines"]

    def test_a_bucket_of_google_is_read(self, served, reference, tmp_path, stores, monkeypatch):
        server = gcp_storage_emulator.server.create_server(
            "127.0.0.1", 0, in_memory=True, default_bucket=BUCKET
        )
        server.start()
        stores.callback(server.stop)
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", f"http://127.0.0.1:{find_port(server)}")
        put_lines(served, "gs")
        config = configure(tmp_path / "a", f"gs://{BUCKET}/texts/lines")
        assert take_rows(config, STEPS)[0] == reference["lines"]
        with pytest.raises(UserError, match=f"cannot read gs://{BUCKET}/nothing: there is no"):
            take_rows(configure(tmp_path / "b", f"gs://{BUCKET}/nothing"), 1)

    def test_a_dataset_of_hugging_face_is_read_through_faults(
        self, served, reference, tmp_path, stores, monkeypatch
    ):
        server = stores.enter_context(contextlib.closing(HubServer(served)))
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", server.url)
        server.fault = Faults(count=6)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            config = configure(tmp_path, f"hf://datasets/{DATASET}/mixed")
            assert take_rows(config, STEPS)[0] == reference["mixed"]
        assert server.fault.left < 6
        with pytest.raises(UserError, match="cannot read hf://datasets/owner/other"):
            take_rows(configure(tmp_path / "b", "hf://datasets/owner/other"), 1)

    def test_what_may_not_be_read_is_not_waited_for(self, served, tmp_path, stores, monkeypatch):
        server = stores.enter_context(contextlib.closing(HubServer(served)))
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", server.url)
        server.fault = lambda method, path: 403
        with pytest.raises(UserError, match="403 Forbidden"):
            take_rows(configure(tmp_path, f"hf://datasets/{DATASET}/lines"), 1)


def put_lines(served, scheme):
    system = fsspec.filesystem(scheme)
    for path in (served / "lines").iterdir():
        system.put_file(str(path), f"{BUCKET}/texts/lines/{path.name}")


def find_port(server):
    """Return the port that a server of Google's storage was given."""
    return server._api._httpd.server_address[1]


def test_urls_that_are_refused():
    for url, text in {
        "ftq://host/a": "no store is known for ftq://",
        "s3://bucket/../a": "has . or .. in it",
        "https://host/a?token=abcdefgh": "has a [?] or #",
    }.items():
        with pytest.raises(InputError, match=text):
            from megaframe.data.preprocessing.corpus_files import list_corpus_files

            list_corpus_files([CorpusFile(url)])
