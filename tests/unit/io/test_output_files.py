"""Files of a run while its disk is full and its folder is deleted: what is in them in the end."""

import resource
import shutil
from contextlib import contextmanager

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megaframe.io.output_files import OutputFiles


@contextmanager
def limit_files(size):
    """Let no file grow beyond a size, as on a full disk; None for no limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft if size is None else size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def delete_file(folder):
    (folder / "log").unlink(missing_ok=True)


def move_file(folder):
    if (folder / "log").exists():
        (folder / "log").rename(folder.parent / "moved")


def replace_file(folder):
    delete_file(folder)
    folder.mkdir(exist_ok=True)
    (folder / "log").write_text("of somebody else")


EVENTS = st.sampled_from([delete_file, move_file, replace_file, shutil.rmtree, None, None])


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(st.binary(max_size=20), st.none() | st.integers(0, 60), EVENTS)))
def test_records_arrive_once_and_in_order_whatever_happens(tmp_path, steps):
    folder = tmp_path / "run"
    shutil.rmtree(folder, ignore_errors=True)
    files, expected = OutputFiles(folder), b""
    file = files.open_growing("log")
    files.write("config", "x: 1\n")
    for number, (record, limit, happens) in enumerate(steps):
        if happens is not None and (happens is not shutil.rmtree or folder.exists()):
            happens(folder)
        record = b"%d %s\n" % (number, record.hex().encode())
        with limit_files(limit):
            file.append(record)
        expected += record
    files.close()
    assert (folder / "log").read_bytes() == expected and not files.list_missing()
    assert (folder / "config").read_text() == "x: 1\n"
    assert sorted(path.name for path in folder.iterdir()) == ["config", "log"]


def test_what_does_not_fit_into_memory_is_counted(tmp_path):
    files = OutputFiles(tmp_path, room=100)
    file, record = files.open_growing("log"), b"x" * 30
    with limit_files(0):
        for _ in range(5):
            file.append(record)
        files.write("config", "x: 1")
        file.retry()
        first, second = files.list_missing()
        assert "log: 90 bytes could not be written (File too large), and 2 records" in first
        assert second == f"{tmp_path / 'config'} (File too large)"
        messages = files.take_messages()
        assert [f"cannot write {tmp_path / name}" in text for name, text in
                zip(("config", "log"), messages, strict=True)] == [True, True]  # fmt: skip
        assert not files.take_messages()
    files.close()
    assert (tmp_path / "log").read_bytes() == record * 3
    assert files.list_missing() == [f"{tmp_path / 'log'}: 2 records did not fit into memory"]
    assert f"{tmp_path / 'log'} is written again; 2 records are missing" in files.take_messages()


def test_a_link_that_takes_the_place_of_a_file_is_not_followed(tmp_path):
    folder, outside = tmp_path / "run", tmp_path / "outside"
    outside.write_text("kept")
    files = OutputFiles(folder)
    file = files.open_growing("log")
    file.append(b"1\n")
    delete_file(folder)
    (folder / "log").symlink_to(outside)
    file.append(b"2\n")
    assert (folder / "log").read_bytes() == b"1\n2\n" and not (folder / "log").is_symlink()
    assert outside.read_text() == "kept"
