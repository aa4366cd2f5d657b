"""Programs that the tests run in separate processes: `checkpoint_child.py NAME ARGUMENTS`."""

from __future__ import annotations

import itertools
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
import warnings
from datetime import timedelta
from pathlib import Path

import torch
from checkpoint_helpers import load_all, make_slice
from patience import PATIENCE
from torch.distributed import HashStore, TCPStore

from megaframe.checkpoint import CheckpointWriter, Slice, find_checkpoint, open_checkpoint
from megaframe.errors import UserError


def values(step, size):
    return torch.full((size,), float(step))


def load_newest_step(folder):
    """Load the newest checkpoint, check its content, and return its step (0 if there is none)."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        path = find_checkpoint(folder, "latest")
    if path is None:
        return 0
    with open_checkpoint(path) as checkpoint:
        step = checkpoint.step
        assert checkpoint.state == {"step": step}
    assert bool((load_all(path)["a"] == step).all())
    return step


def save_steps(folder, steps, size):
    writer = CheckpointWriter(folder, rank=0, world=1, store=HashStore(), keep=2)
    for step in steps:
        writer.save(step, [make_slice("a", values(step, size))], {"step": step})
        writer.wait()


def die_at_event(folder, number):
    """Kill this process at the `number`-th file-system event below `folder`, in any thread."""
    events = itertools.count(1)

    def hook(event, arguments):
        if event == "open" or event.startswith(("os.", "shutil.")):
            paths = [str(x) for x in arguments if isinstance(x, (str, os.PathLike))]
            below = any(path.startswith(str(folder)) for path in paths)
            if below and event != "os.kill" and next(events) == number:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)


def forked(act):
    """Run `act` in a fork, which starts with a single thread; return its process id."""
    process = os.fork()
    if process == 0:
        status = 1
        try:
            act()
            status = 0
        finally:
            os._exit(status)
    return process


def kill_at_events(root, stride):
    """Replace step 2 and save step 3 in a folder that has steps 1 and 2, killed at event 1, then at
    one that is `stride` later, ...

    Each number of an event gets a new copy of the folder, until a save ends before it is killed.
    """
    base = root / "base"
    os.waitpid(forked(lambda: save_steps(base, (1, 2), 64)), 0)
    for number in itertools.count(1, stride):
        folder = root / f"run{number}"
        shutil.copytree(base, folder)

        def act(folder=folder, number=number):
            die_at_event(folder, number)
            save_steps(folder, (2, 3), 64)

        _, status = os.waitpid(forked(act), 0)
        reached = load_newest_step(folder)
        assert reached >= 2, (number, reached)
        assert load_newest_step(folder) == reached
        os.waitpid(forked(lambda folder=folder: save_steps(folder, (5,), 64)), 0)
        assert load_newest_step(folder) == 5
        assert not list(folder.glob("*.tmp"))
        assert len(list(folder.glob("step-*"))) == 2  # as `keep` says
        if status == 0:
            break
        assert os.WIFSIGNALED(status), (number, status)
        shutil.rmtree(folder)
    print(f"killed {number // stride} times")


def kill_at_random_moments(root, times):
    """Kill saves and loads at random moments; no lock of a killed load may remain. The first save
    is whole, because on a busy machine all others may be killed before they have begun."""
    folder, generator, reached = root / "random", random.Random(1), 1

    def load_again():
        while True:
            load_newest_step(folder)

    os.waitpid(forked(lambda: save_steps(folder, (reached,), 1 << 20)), 0)
    for _ in range(times):
        first = reached + 1
        kill_soon(lambda first=first: save_steps(folder, range(first, 999), 1 << 20), generator)
        newest = load_newest_step(folder)
        assert newest >= reached, (newest, reached)
        reached = newest
        kill_soon(load_again, generator)
        assert load_newest_step(folder) == reached
    # Each that was killed between its last two acts has left one more than are kept.
    os.waitpid(forked(lambda: save_steps(folder, (reached + 1,), 64)), 0)
    assert len(list(folder.glob("step-*[0-9]"))) == 2  # as `keep` says


def kill_soon(act, generator):
    process = forked(act)
    time.sleep(generator.uniform(0.01, 0.12))
    os.kill(process, signal.SIGKILL)
    os.waitpid(process, 0)


def kill(root, stride):
    kill_at_events(Path(root), int(stride))
    kill_at_random_moments(Path(root), 20 // int(stride))


def full_disk(root):
    """Save to a disk without space, without inodes, and read-only; each save must be refused.

    root: a file system of its own, with 4 MiB and a few inodes.
    """
    folder = Path(root) / "checkpoints"
    writer = CheckpointWriter(folder, rank=0, world=1, store=HashStore(), keep=1)
    writer.save(1, [make_slice("a", torch.ones(1 << 18))], {})
    writer.wait()

    def refused(words, tensor):
        writer.save(2, [make_slice("a", tensor)], {})
        try:
            writer.wait()
        except UserError as error:
            assert all(word in str(error) for word in words), error
        else:
            raise AssertionError("was saved")
        assert sorted(path.name for path in folder.iterdir()) == ["latest", "step-00000001"]
        assert is_newest_one(folder)

    refused(["needs 8,388,608 bytes", "bytes free", "checkpoint.keep"], torch.ones(1 << 21))
    free = shutil.disk_usage(folder).free
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, resource.RLIM_INFINITY))
    refused(["File too large", f"needs 2,097,152 bytes and {free:,} bytes"], torch.ones(1 << 19))
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    blocker = [Path(root) / f"blocker{index}" for index in range(99)]
    for path in blocker:
        try:
            path.touch()
        except OSError:
            break
    refused(["No space left on device", "it needs 4 bytes", str(folder)], torch.ones(1))
    for path in blocker:
        path.unlink(missing_ok=True)
    subprocess.run(["mount", "-o", "remount,ro", str(root)], check=True)
    refused(["Read-only file system", str(folder)], torch.ones(1))
    try:
        CheckpointWriter(Path(root) / "other", rank=0, world=1, store=HashStore(), keep=1)
    except UserError as error:
        assert "Read-only file system" in str(error)
    else:
        raise AssertionError("a read-only folder was taken")
    print("all refused")


def is_newest_one(folder):
    return bool((load_all(find_checkpoint(folder, "latest"))["a"] == 1).all())


def extra_memory(folder):
    """Load half of a tensor's columns; print their bytes and the growth of peak memory."""
    torch.set_num_threads(1)
    shape = (8000, 16000)

    def save_rows():
        rows = torch.ones(shape)
        shared_arguments = {"world": 2, "store": HashStore(), "keep": 1}
        writers = [
            CheckpointWriter(Path(folder), rank=rank, **shared_arguments) for rank in range(2)
        ]
        for rank, writer in enumerate(writers):
            half = rows[4000 * rank : 4000 * (rank + 1)]
            writer.save(1, [Slice("a", shape, (4000 * rank, 0), half)], {})
        for writer in writers:
            writer.wait()

    assert os.waitpid(forked(save_rows), 0)[1] == 0
    columns = torch.zeros(8000, 8000)
    columns.fill_(0.5)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with open_checkpoint(find_checkpoint(Path(folder), "latest")) as checkpoint:
        checkpoint.load([Slice("a", shape, (0, 4000), columns)])
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert bool((columns == 1).all())
    print(columns.nbytes, (after - before) * 1024)


def second_rank(port, folder):
    """Act as rank 1 of 2: save the odd rows, then load rows 1 and 2."""
    store = TCPStore("127.0.0.1", int(port), is_master=False, timeout=timedelta(seconds=PATIENCE))
    writer = CheckpointWriter(Path(folder), rank=1, world=2, store=store, keep=2, timeout=PATIENCE)
    full = torch.arange(12.0).view(4, 3)
    for step in (1, 2):
        rows = [Slice("a", (4, 3), (row, 0), full[row : row + 1] * step) for row in (1, 3)]
        writer.save(step, rows, {"rank": 1})
        writer.wait()
    target = torch.zeros(2, 3, dtype=torch.float64)
    with open_checkpoint(find_checkpoint(Path(folder), "latest")) as checkpoint:
        checkpoint.load([Slice("a", (4, 3), (1, 0), target)])
        assert checkpoint.state == {"rank": 0}
    assert torch.equal(target, 2 * full[1:3].double())
    store.set("second rank", "loaded")


if __name__ == "__main__":
    {
        "kill": kill,
        "extra_memory": extra_memory,
        "full_disk": full_disk,
        "second_rank": second_rank,
    }[sys.argv[1]](*sys.argv[2:])
