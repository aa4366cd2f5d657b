"""Locks: one process at a time has a folder, and what a dead one leaves is taken over."""

import itertools
import json
import os
import shutil
import subprocess
import threading
import time
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given
from hypothesis import strategies as st
from patience import PATIENCE, wait_until
from rank_process import RankProcess

from megaframe.checkpoint import lock as module
from megaframe.checkpoint import parse_path
from megaframe.checkpoint.lock import LockHolder, RunLock
from megaframe.checkpoint.stores import object_store as remote_module
from megaframe.checkpoint.stores.store import LOCK, LOCK_BYTES, store_of
from megaframe.errors import UserError
from megaframe.io.process import has_ended, read_start_time

COUNT = itertools.count()
AHEAD = time.time() + 1e6
"""When a clock that is ahead renewed a lock: its lease is waited for, however late this test is."""


@pytest.fixture(autouse=True)
def soon(monkeypatch):
    """Use short leases."""
    monkeypatch.setattr(module, "LEASE_SECONDS", 1.0)
    monkeypatch.setattr(module, "RENEWAL_SECONDS", 0.05)
    monkeypatch.setattr(module, "_POLL_SECONDS", 0.02)
    monkeypatch.setattr(remote_module, "_SETTLE_SECONDS", 0.02)


@pytest.fixture(params=["folder", "memory"])
def home(request, tmp_path):
    return (
        tmp_path / "run" if request.param == "folder" else parse_path(f"memory://lock{next(COUNT)}")
    )


def read_content(home):
    return store_of(home).read_small_file(home / LOCK, LOCK_BYTES)


def leave(home, **changes):
    """Leave the lock of another process, by default on another host and renewed just now."""
    changes = {"host": "elsewhere", "process": 4242, "started": 7, **changes}
    text = LockHolder.from_this_process().model_copy(update=changes).model_dump_json().encode()
    assert store_of(home).compare_and_swap(home / LOCK, read_content(home), text)
    return text


@pytest.fixture
def take_lock():
    """take_lock(folder, key="run.dir") -> the lock and its lines; released at the end."""
    locks = []

    def take(folder, key="run.dir"):
        locks.append(RunLock({key: folder}))
        return locks[-1], locks[-1].take()

    yield take
    for lock in locks:
        lock.release()


def hold(*folders):
    """Have the locks of some folders until this process is killed."""
    RunLock(dict(zip(("run.dir", "checkpoint.folder"), map(Path, folders), strict=False))).take()
    (Path(folders[0]) / "held").touch()
    time.sleep(1000)


def test_a_folder_belongs_to_the_process_that_has_it_until_it_dies(take_lock, tmp_path):
    folders = [str(tmp_path / name) for name in ("run", "saves")]
    other = RankProcess(hold, *folders)
    number = other._process.pid
    try:
        wait_until((tmp_path / "run/held").exists, other)
        for key, folder in (("run.dir", "run"), ("checkpoint.folder", "saves")):
            with pytest.raises(UserError) as refused:
                take_lock(tmp_path / folder, key)
            host = os.uname().nodename
            for words in (f"{key}={tmp_path / folder}", f"process {number} on host {host}"):
                assert words in str(refused.value)
        other.kill()
        lock = RunLock({"run.dir": tmp_path / "run", "checkpoint.folder": tmp_path / "saves"})
        assert lock.take() == [
            f"took over run.dir={tmp_path}/run and checkpoint.folder={tmp_path}/saves from "
            f"process {number} on host {host}, which has ended"
        ]
        assert lock.take() == []  # as in-process restarts do
        lock.release()
    finally:
        other.kill()
    assert not (tmp_path / "run" / LOCK).exists() and not (tmp_path / "saves" / LOCK).exists()


def test_a_process_is_known_by_its_start_as_ids_are_reused(take_lock, tmp_path):
    holder = {"host": os.uname().nodename, "process": os.getppid()}
    leave(tmp_path, **holder, started=read_start_time(os.getppid()))
    with pytest.raises(UserError, match="is in use"):
        take_lock(tmp_path)
    leave(tmp_path, **holder, started=read_start_time(os.getppid()) - 1)
    _, (line,) = take_lock(tmp_path)
    assert "which has ended" in line


def test_a_process_whose_parent_has_not_noticed_its_end_has_ended():
    child = subprocess.Popen(["sleep", "1000"])
    start = read_start_time(child.pid)
    assert not has_ended(child.pid, start) and has_ended(child.pid, start - 1)
    child.kill()
    wait_until(lambda: has_ended(child.pid, start))
    assert Path(f"/proc/{child.pid}").exists()
    child.wait()
    assert has_ended(child.pid, start)


def test_a_lock_of_another_host_is_a_lease(take_lock, home, capsys):
    leave(home, since=0.0, renewed=AHEAD)
    began = time.monotonic()
    lock, (line,) = take_lock(home)
    assert time.monotonic() - began > 0.8 and "has not renewed its lock for 1 s" in line
    assert "waiting up to 1 s" in capsys.readouterr().err
    lock.release()
    leave(home, renewed=time.time() - 2)
    _, (line,) = take_lock(home)
    assert not capsys.readouterr().err


def test_a_process_in_another_container_of_this_host_cannot_be_seen(take_lock, tmp_path):
    """Its id means another process here, or none."""
    leave(tmp_path, host=os.uname().nodename, namespace="another pid:[1]", renewed=AHEAD)
    began = time.monotonic()
    take_lock(tmp_path)
    assert time.monotonic() - began > 0.8


def test_a_clock_that_is_ahead_delays_nobody_for_longer_than_a_lease(take_lock, tmp_path):
    leave(tmp_path, renewed=AHEAD)
    began = time.monotonic()
    take_lock(tmp_path)
    assert time.monotonic() - began < PATIENCE


def test_a_lock_that_is_renewed_is_not_waited_for(take_lock, home, monkeypatch):
    monkeypatch.setattr(module, "LEASE_SECONDS", 1000.0)
    leave(home)
    over = threading.Event()

    def renew():
        while not over.wait(0.1):
            leave(home)

    renewing = threading.Thread(target=renew)
    renewing.start()
    with pytest.raises(UserError, match="process 4242 on host elsewhere"):
        take_lock(home)
    over.set()
    renewing.join()
    freeing = threading.Timer(
        0.2, lambda: store_of(home).compare_and_swap(home / LOCK, read_content(home), None)
    )
    freeing.start()
    assert take_lock(home)[1] == []
    freeing.join()


def test_a_lock_is_renewed_and_returns_with_a_folder_that_was_deleted(take_lock, tmp_path):
    home = tmp_path / "run"
    home.mkdir()
    lock, _ = take_lock(home)
    first = read_content(home)
    wait_until(lambda: read_content(home) not in (None, first))
    shutil.rmtree(home)
    time.sleep(0.3)
    assert not home.exists()
    home.mkdir()
    wait_until(lambda: read_content(home) is not None)
    lock.release()
    assert list(home.iterdir()) == []


def test_a_folder_that_was_only_made_for_its_lock_goes_with_it(take_lock, tmp_path):
    take_lock(tmp_path / "run")[0].release()
    assert not (tmp_path / "run").exists()
    lock, _ = take_lock(tmp_path / "run")
    (tmp_path / "run/metrics.jsonl").touch()
    lock.release()
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["metrics.jsonl"]


def test_a_run_that_lost_its_lock_is_told_and_leaves_the_folder_alone(take_lock, home):
    lock, _ = take_lock(home)
    lock.check()
    other = leave(home)

    def lost():
        # A store without exchanges in one request may have lost this to a renewal.
        store_of(home).compare_and_swap(home / LOCK, read_content(home), other)
        return lock._lost_message

    wait_until(lost)
    with pytest.raises(UserError, match="taken over by process 4242 on host elsewhere"):
        lock.check()
    lock.release()
    assert read_content(home) == other


def test_what_was_locked_is_unlocked_if_the_rest_is_not_free(tmp_path):
    leave(tmp_path / "saves", host=os.uname().nodename, process=os.getppid(),
          started=read_start_time(os.getppid()))  # fmt: skip
    lock = RunLock({"run.dir": tmp_path / "run", "checkpoint.folder": tmp_path / "saves"})
    with pytest.raises(UserError, match=r"checkpoint\.folder"):
        lock.take()
    lock.release()
    assert not (tmp_path / "run").exists() and (tmp_path / "saves" / LOCK).exists()


def attempt(folder):
    """Try to lock the folder, and unlock it when all four have tried."""
    lock, has_it = RunLock({"run.dir": Path(folder)}), True
    try:
        lock.take()
    except UserError:
        has_it = False
    (Path(folder) / f"tried-{os.getpid()}").touch()
    wait_until(lambda: len(list(Path(folder).glob("tried-*"))) == 4)
    lock.release()
    return has_it


def test_of_several_that_find_a_dead_lock_one_has_it(pool, tmp_path):
    for number in range(2):
        folder = tmp_path / str(number)
        leave(folder, host=os.uname().nodename, process=2**22 + 1)  # more than any id
        assert sum(pool.run(4, attempt, folder)) == 1


def test_no_exchange_in_a_folder_is_lost(tmp_path):
    """Each one adds 1, so as many succeed as the number says."""
    store, file, succeeded = store_of(tmp_path), tmp_path / LOCK, []

    def add():
        for _ in range(50):
            before = read_content(tmp_path)
            if store.compare_and_swap(file, before, b"%d" % (int(before or b"0") + 1)):
                succeeded.append(1)

    threads = [threading.Thread(target=add) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert int(read_content(tmp_path)) == len(succeeded) > 0


NUMBERS = st.integers() | st.floats() | st.text(max_size=9) | st.none()
NAMES = ["host", "namespace", "process", "started", "since", "renewed"]


@given(st.binary(max_size=99) | st.dictionaries(st.sampled_from(NAMES), NUMBERS))
def test_a_file_that_is_no_lock_is_refused_and_stays(damage):
    with TemporaryDirectory() as name:
        folder = Path(name)
        if isinstance(damage, bytes):
            (folder / LOCK).write_bytes(damage)
        else:
            leave(folder, renewed=0.0)
            known = LockHolder.model_validate_json(read_content(folder)).model_dump() | damage
            (folder / LOCK).write_text(json.dumps(known))
        before = read_content(folder)
        lock = RunLock({"run.dir": folder})
        try:
            lock.take()
        except UserError as error:
            assert str(folder / LOCK) in str(error) or "is in use" in str(error)
            assert str(error).isprintable()
            assert read_content(folder) == before
        finally:
            lock.release()


def test_what_is_not_a_file_or_endless_is_refused(tmp_path):
    endless = partial(os.symlink, "/dev/zero")
    for number, make in enumerate((os.mkfifo, os.mkdir, endless)):
        folder = tmp_path / str(number)
        folder.mkdir()
        make(folder / LOCK)
        with pytest.raises(UserError, match=r"Not a regular file|Is a directory"):
            RunLock({"run.dir": folder}).take()
    (tmp_path / LOCK).write_bytes(b" " * 2 * LOCK_BYTES)
    with pytest.raises(UserError, match="is not the lock of a run"):
        RunLock({"run.dir": tmp_path}).take()
