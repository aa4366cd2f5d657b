"""Programs that the tests run in processes of their own: `checkpoint_child.py NAME ARGUMENTS`."""

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
from checkpoint_helpers import load_all, whole
from torch.distributed import HashStore, TCPStore

from megaframe.checkpoint import Slice, Writer, find, open_checkpoint
from megaframe.errors import UserError


def values(step, size):
    return torch.full((size,), float(step))


def newest_step(folder):
    """Load the newest checkpoint and check that its content is that of its step."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        path = find(folder, "latest")
    if path is None:
        return 0
    with open_checkpoint(path) as checkpoint:
        step = checkpoint.step
        assert checkpoint.state == {"step": step}
    assert bool((load_all(path)["a"] == step).all())
    return step


def save_steps(folder, steps, size):
    writer = Writer(folder, rank=0, world=1, store=HashStore(), keep=2)
    for step in steps:
        writer.save(step, [whole("a", values(step, size))], {"step": step})
        writer.wait()


def die_at_event(folder, number):
    """Kill this process at the given file-system event below a folder (any thread)."""
    events = itertools.count(1)

    def hook(event, arguments):
        if event == "open" or event.startswith(("os.", "shutil.")):
            paths = [str(x) for x in arguments if isinstance(x, (str, os.PathLike))]
            below = any(path.startswith(str(folder)) for path in paths)
            if below and event != "os.kill" and next(events) == number:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)


def forked(act):
    """Run `act` in a fork that has not run any thread yet; returns its process id."""
    process = os.fork()
    if process == 0:
        status = 1
        try:
            act()
            status = 0
        finally:
            os._exit(status)
    return process


def kill_at_every_event(root):
    """Save step 2 again, then 3, in a folder of 1 and 2, dying at event 1, 2, 3 ... of all."""
    base = root / "base"
    os.waitpid(forked(lambda: save_steps(base, (1, 2), 64)), 0)
    for number in itertools.count(1):
        folder = root / f"run{number}"
        shutil.copytree(base, folder)

        def act(folder=folder, number=number):
            die_at_event(folder, number)
            save_steps(folder, (2, 3), 64)

        _, status = os.waitpid(forked(act), 0)
        reached = newest_step(folder)
        assert reached >= 2, (number, reached)
        assert newest_step(folder) == reached
        os.waitpid(forked(lambda folder=folder: save_steps(folder, (5,), 64)), 0)
        assert newest_step(folder) == 5
        assert not list(folder.glob("*.tmp"))
        assert len(list(folder.glob("step-*"))) == 2  # as many as are to be kept
        if status == 0:
            break
        assert os.WIFSIGNALED(status), (number, status)
        shutil.rmtree(folder)
    print(f"killed {number - 1} times")


def kill_at_random_moments(root):
    folder, generator, reached = root / "random", random.Random(1), 0
    for _ in range(12):
        first = reached + 1
        process = forked(lambda first=first: save_steps(folder, range(first, 999), 1 << 20))
        time.sleep(generator.uniform(0.01, 0.15))
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)
        now = newest_step(folder)
        assert now >= reached, (now, reached)
        reached = now
    assert reached > 0


def kill(root):
    kill_at_every_event(Path(root))
    kill_at_random_moments(Path(root))


def full_disk(root):
    """With `root` a file system of 4 MiB and few files of its own."""
    folder = Path(root) / "checkpoints"
    writer = Writer(folder, rank=0, world=1, store=HashStore(), keep=1)
    writer.save(1, [whole("a", torch.ones(1 << 18))], {})
    writer.wait()

    def refused(words, tensor):
        writer.save(2, [whole("a", tensor)], {})
        try:
            writer.wait()
        except UserError as error:
            assert all(word in str(error) for word in words), error
        else:
            raise AssertionError("was saved")
        assert sorted(path.name for path in folder.iterdir()) == ["latest", "step-00000001"]
        assert newest_is_one(folder)

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
        Writer(Path(root) / "other", rank=0, world=1, store=HashStore(), keep=1)
    except UserError as error:
        assert "Read-only file system" in str(error)
    else:
        raise AssertionError("a read-only folder was taken")
    print("all refused")


def newest_is_one(folder):
    return bool((load_all(find(folder, "latest"))["a"] == 1).all())


def second_rank(port, folder):
    """Rank 1 of 2: saves the odd rows, and loads rows 1 and 2 as columns."""
    store = TCPStore("127.0.0.1", int(port), is_master=False, timeout=timedelta(seconds=60))
    writer = Writer(Path(folder), rank=1, world=2, store=store, keep=2, timeout=60)
    full = torch.arange(12.0).view(4, 3)
    for step in (1, 2):
        rows = [Slice("a", (4, 3), (row, 0), full[row : row + 1] * step) for row in (1, 3)]
        writer.save(step, rows, {"rank": 1})
        writer.wait()
    target = torch.zeros(2, 3, dtype=torch.float64)
    with open_checkpoint(find(Path(folder), "latest")) as checkpoint:
        checkpoint.load([Slice("a", (4, 3), (1, 0), target)])
        assert checkpoint.state == {"rank": 0}
    assert torch.equal(target, 2 * full[1:3].double())
    store.set("second rank", "loaded")


if __name__ == "__main__":
    {
        "kill": kill,
        "full_disk": full_disk,
        "second_rank": second_rank,
    }[sys.argv[1]](*sys.argv[2:])
