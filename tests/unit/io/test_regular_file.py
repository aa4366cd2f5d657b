"""What lies in a folder of somebody else is written without following a link, and without waiting
for a pipe; what the user himself has linked goes on working."""

import os
import stat

import pytest

from megaframe.io.regular_file import (
    delete_file,
    list_folder,
    make_folder,
    open_append,
    open_fresh,
    open_regular,
    open_update,
    replace_file,
    write_file,
)
from megaframe.io.untrusted import read_file

OPENERS = {"append": open_append, "update": open_update}


@pytest.fixture
def planted(tmp_path):
    """A folder, reached through a link of the user, in which everything leads elsewhere."""
    (tmp_path / "disk").mkdir()
    (tmp_path / "run").symlink_to("disk")
    (tmp_path / "victim").mkdir()
    (tmp_path / "victim/file").write_text("precious")
    run = tmp_path / "run"
    (run / "link").symlink_to("../victim/file")
    (run / "dangling").symlink_to("../victim/new")
    (run / "loop").symlink_to("loop")
    (run / "folder").symlink_to("../victim")
    os.mkfifo(run / "pipe")
    yield run
    assert os.listdir(tmp_path / "victim") == ["file"]
    assert (tmp_path / "victim/file").read_text() == "precious"
    assert not [name for name in os.listdir(run) if name.endswith(".tmp")]


@pytest.mark.parametrize("name", ["link", "dangling", "loop"])
def test_a_link_is_replaced_and_never_written_through(planted, name):
    write_file(planted / name, "new", inside=planted)
    assert not (planted / name).is_symlink()
    assert (planted / name).read_text() == "new"


@pytest.mark.parametrize("name", ["link", "dangling", "loop"])
def test_a_log_is_no_link(planted, name):
    for open_file in OPENERS.values():
        with pytest.raises(OSError, match="symbolic link") as error:
            open_file(planted / name, inside=planted)
        assert error.value.filename == str(planted / name)
    with pytest.raises(OSError, match="symbolic link"):
        open_regular(planted / name, planted)
    with open_fresh(planted / name, inside=planted) as file:
        file.write(b"new")
    assert not (planted / name).is_symlink()


def test_no_folder_on_the_way_is_a_link(planted):
    for open_file in (*OPENERS.values(), open_fresh, replace_file, write_file):
        with pytest.raises(OSError, match="symbolic link"):
            arguments = (b"",) if open_file is write_file else ()
            opened = open_file(planted / "folder/deep/file", *arguments, inside=planted)
            opened.__enter__()
    for act in (make_folder, list_folder):
        with pytest.raises(OSError, match="symbolic link"):
            act(planted / "folder", inside=planted)
        with pytest.raises(OSError, match="symbolic link"):
            act(planted / "folder")
    for act in (delete_file, read_file):
        with pytest.raises(OSError, match="symbolic link"):
            act(planted / "folder/file", *((9,) if act is read_file else ()), inside=planted)
    with pytest.raises(OSError, match="Outside"):
        write_file(planted / "folder/../x/file", b"", inside=planted)


def test_pipes_devices_and_folders_are_refused_at_once(planted):
    (planted / "inner").mkdir()
    for path in (planted / "pipe", planted / "inner"):
        for inside in (None, planted):
            for open_file in OPENERS.values():
                with pytest.raises(OSError):
                    open_file(path, inside=inside)
            with pytest.raises(OSError):
                write_file(path, b"", inside=inside)
    for path in ("/dev/null", "/dev/stdout", "/", ".", "..", f"{planted}/nul\0"):
        with pytest.raises(OSError) as error:
            write_file(path, b"")
        assert error.value.strerror and "\0" not in str(error.value)
    assert stat.S_ISCHR(os.stat("/dev/null").st_mode)
    assert stat.S_ISFIFO(os.stat(planted / "pipe").st_mode)


def test_a_link_that_a_user_names_is_refused_as_it_would_be_lost(planted):
    with pytest.raises(OSError, match="symbolic link"):
        write_file(planted / "link", b"")
    assert (planted / "link").is_symlink()


def test_files_are_written_continued_and_deleted_below_linked_folders(planted):
    log, deep = planted / "faults/log", planted / "a/b/file"
    for line in (b"1\n", b"2\n"):
        with open_append(log, inside=planted) as file:
            file.write(line)
    assert log.read_bytes() == b"1\n2\n"
    with open_update(log, inside=planted) as file:
        file.truncate(2)
    assert read_file(log, 9, inside=planted) == b"1\n"
    write_file(deep, "text ☃", inside=planted, sync=True)
    assert deep.read_text(encoding="utf-8") == "text ☃"
    assert deep.stat().st_mode & 0o777 == 0o666 & ~_read_umask()
    make_folder(planted / "a/c", inside=planted)
    assert sorted(list_folder(planted / "a", inside=planted)) == ["b", "c"]
    for _ in range(2):
        delete_file(deep, inside=planted)
    assert not deep.exists()
    write_file(planted / ("x" * 255), b"")


def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(planted):
    write_file(planted / "file", "old")
    with pytest.raises(KeyError), replace_file(planted / "file") as file:
        file.write(b"half")
        raise KeyError
    assert (planted / "file").read_text() == "old"


def _read_umask():
    umask = os.umask(0)
    os.umask(umask)
    return umask
