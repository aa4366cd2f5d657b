"""Files under URLs, read a range at a time: the bytes of the file or an error. Modules:
megaframe.io.remote_reader, megaframe.io.remote_requests, megaframe.io.remote_path.
"""

import random
import warnings

import pytest
from file_server import FileServer

from megaframe.io import remote_reader, remote_requests
from megaframe.io.remote_path import RemotePath


@pytest.fixture
def server(tmp_path):
    (tmp_path / "a.bin").write_bytes(random.Random(1).randbytes(300_000))
    started = FileServer(tmp_path)
    yield started
    started.close()
    remote_requests._open_filesystem.cache_clear()


@pytest.fixture(autouse=True)
def quiet():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def test_any_range_is_that_of_the_file(server, tmp_path, monkeypatch):
    monkeypatch.setattr(remote_reader, "_READ", 10_000)
    monkeypatch.setattr(remote_requests, "FIRST_PAUSE", 0.01)
    content, draw = (tmp_path / "a.bin").read_bytes(), random.Random(2)
    asked = 0

    def fault(method, path):
        nonlocal asked
        asked += 1
        return (503, "short", "reset")[asked % 3] if asked % 2 else None

    path = RemotePath(f"{server.url}/a.bin")
    with remote_reader.open_remote_file(path, 4000) as file:
        server.fault = fault
        for _ in range(20):
            start = draw.randint(0, 310_000)
            length = draw.choice([1, 100, 5000, 30_000])
            file.seek(start)
            assert file.read(length) == content[start : start + length]
            assert file.tell() == max(start, min(start + length, len(content)))
    with remote_reader.open_remote_file(path) as file:
        assert file.read() == content


def test_waiting_ends(server, monkeypatch):
    monkeypatch.setattr(remote_reader, "OUTAGE_SECONDS", 0.3)
    path = RemotePath(f"{server.url}/a.bin")
    file = remote_reader.open_remote_file(path)
    server.fault = lambda method, path: "short"
    with pytest.raises(OSError, match="150,000 of 300,000 bytes answered"):
        file.read()


def test_what_is_permanent_is_not_tried_again(server):
    for status, name in ((404, "nothing"), (403, "a.bin")):
        server.fault = lambda method, path, status=status: status
        with pytest.raises(OSError):
            remote_reader.measure_remote_file(RemotePath(f"{server.url}/{name}"))
    assert sum(server.requests.values()) < 10


def test_another_size_is_refused(server):
    path = RemotePath(f"{server.url}/a.bin")
    assert remote_reader.measure_remote_file(path) == 300_000
    with pytest.raises(OSError, match="it has 300,000 bytes now, and 299,999 when it was listed"):
        remote_reader.open_remote_file(path, size=299_999)


def test_files_below_a_url_are_listed_in_the_order_of_their_names(server, tmp_path):
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "c.bin").write_bytes(b"12")
    (tmp_path / "b" / "a.bin").write_bytes(b"1")
    found = remote_reader.list_remote_files(RemotePath(f"{server.url}/b"))
    assert [(entry.url, entry.size) for entry in found] == [
        (f"{server.url}/b/a.bin", 1),
        (f"{server.url}/b/c.bin", 2),
    ]
    alone = remote_reader.list_remote_files(RemotePath(f"{server.url}/a.bin"))
    assert [entry.size for entry in alone] == [300_000]
