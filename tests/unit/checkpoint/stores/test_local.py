"""Checkpoints in folders: reads past the page cache, and saves that are killed, that meet a full or
read-only disk, and that two processes do together."""

import os
import shutil
import subprocess
import sys
import tempfile
from datetime import timedelta
from pathlib import Path

import checkpoint_child
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from patience import PATIENCE
from rank_process import RankProcess
from slow_cases import slow
from tool_process import run_tool
from torch.distributed import TCPStore

from megaframe.checkpoint import CheckpointWriter, Slice, find_checkpoint, open_checkpoint
from megaframe.checkpoint.stores.direct_io import ALIGNMENT, allocate_aligned
from megaframe.checkpoint.stores.local import LOCAL_STORE

CHILD = [sys.executable, str(Path(__file__).parents[3] / "support" / "checkpoint_child.py")]
ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}


def run(command):
    process = subprocess.run(
        command, capture_output=True, text=True, env=ENVIRONMENT, timeout=PATIENCE
    )
    assert process.returncode == 0, process.stderr
    return process.stdout


@pytest.mark.parametrize("stride", [4, slow(1)])
def test_a_save_can_be_killed_at_any_moment(stride):
    """At every event, or at each fourth, and at random moments."""
    # In memory where possible: what a killed process has written survives there too, and hundreds
    # of flushes to a slow disk would take most of this test's time.
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=memory) as folder:
        done = run_tool("tests/support/checkpoint_child.py", "kill", folder, stride)
    assert done.returncode == 0, done.stderr
    times = int(done.stdout.split()[1])
    assert times > 20 // stride  # two saves, a replacement and two deletions have more events


def test_a_full_and_a_read_only_disk_are_named_and_survived(tmp_path):
    isolated = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c"]
    mount = f"mount -t tmpfs -o size=4m,nr_inodes=12 tmpfs {tmp_path}"
    if not shutil.which("unshare") or subprocess.run([*isolated, mount]).returncode:
        pytest.skip("this machine lets nobody mount a file system of his own")
    script = f'{mount} && exec "$@"'
    assert "all refused" in run([*isolated, script, "sh", *CHILD, "full_disk", str(tmp_path)])


def test_two_processes_save_through_a_real_store(tmp_path):
    store = TCPStore(
        "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=PATIENCE)
    )
    errors = tmp_path / "errors"
    child = RankProcess(checkpoint_child.second_rank, store.port, str(tmp_path), errors=errors)
    try:
        writer = CheckpointWriter(tmp_path, rank=0, world=2, store=store, keep=2, timeout=PATIENCE)
        full = torch.arange(12.0).view(4, 3)
        for step in (1, 2):
            rows = [Slice("a", (4, 3), (row, 0), full[row : row + 1] * step) for row in (0, 2)]
            writer.save(step, rows, {"rank": 0})
            writer.wait()
        target = torch.zeros(4, 2)
        with open_checkpoint(find_checkpoint(tmp_path, "latest")) as checkpoint:
            checkpoint.load([Slice("a", (4, 3), (0, 1), target)])
        assert torch.equal(target, 2 * full[:, 1:])
        assert child.wait(PATIENCE) == 0, errors.read_text()
    finally:
        child.kill()
    assert store.get("second rank") == b"loaded"


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(0, 20_000), st.integers(0, 20_000), st.booleans(), st.booleans())
def test_past_the_cache_or_not_the_same_is_read(tmp_path, start, size, fresh, sole_reader):
    """A read may start and end anywhere, also past the end of the file; memory is aligned alike."""
    path = tmp_path / "file"
    if not path.exists():
        path.write_bytes(os.urandom(15_000))
    buffer = allocate_aligned(size + ALIGNMENT)[start % ALIGNMENT :][:size]
    source = LOCAL_STORE.open(path, bypass_cache=fresh, sole_reader=sole_reader)
    count = source.read_into(start, buffer.data)
    source.close()
    assert buffer[:count].tobytes() == path.read_bytes()[start : start + size]
