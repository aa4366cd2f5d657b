"""A run whose folder has no room, or is deleted: it trains to its end, saves, and says so."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from bitwise import assert_same_losses
from entry_runs import read_losses
from fault_runs import main

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_a_full_disk_under_the_run_folder_alone_does_not_end_the_run(overrides, tmp_path):
    run, saved = tmp_path / "run", tmp_path / "saved"
    run.mkdir()
    isolated = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c"]
    mount = f"mount -t tmpfs -o size=48k tmpfs {run}"
    if not shutil.which("unshare") or subprocess.run([*isolated, mount]).returncode:
        pytest.skip("this machine lets nobody mount a file system of his own")
    keys = overrides(train__steps=60, checkpoint__every=20, checkpoint__folder=saved)
    show = f"cat {run}/metrics.jsonl > {tmp_path}/metrics.jsonl"
    script = f'{mount} && "$@"; status=$?; {show}; exit $status'
    process = subprocess.run(
        [*isolated, script, "sh", sys.executable, "pretrain_gpt.py", *keys],
        cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True,
        timeout=300, check=False,
    )  # fmt: skip
    assert process.returncode == 2, process.stdout + process.stderr
    assert process.stdout.count(f"warning: cannot write {run}/metrics.jsonl: No space left") == 1
    assert "60/60" in process.stdout and "Traceback" not in process.stderr
    message = process.stderr
    assert (
        f"error: training is done, but its files are not complete: {run}/metrics.jsonl: " in message
    )
    assert (saved / "latest").read_text() == "step-00000060\n"
    lines = (tmp_path / "metrics.jsonl").read_text().split("\n")[:-1]
    assert 0 < len(lines) < 60
    assert [json.loads(line)["step"] for line in lines] == list(range(1, len(lines) + 1))


def list_files(run):
    paths = (path.relative_to(run) for path in run.rglob("*"))
    return {str(path) for path in paths if path.parts[0] != "tensorboard"}


def delete_run(trainer, steps):
    """Delete the run folder before some steps."""
    if trainer.step in steps:
        trainer.checkpointer.wait_for_saves(trainer.metrics.note)
        shutil.rmtree(trainer.folder)


def test_a_folder_that_is_deleted_is_made_again_with_all_its_files(pool, overrides, tmp_path):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    run, whole = tmp_path / "run", tmp_path / "whole"
    keys = {"checkpoint__every": 4, "metrics__tensorboard": True, "metrics__trace": "[2]"}
    assert pool.run(2, main, overrides(**keys, run__dir=whole)) == [0, 0]
    assert pool.run(2, main, overrides(**keys), delete_run, 0, (5, 9)) == [0, 0]
    same = "nothing that computes reads these files"
    assert_same_losses(read_losses(run), read_losses(whole), because=same)
    expected = {name for name in list_files(whole) if "step-00000008" not in name}
    assert list_files(run) == expected
    events = accumulator.EventAccumulator(str(run / "tensorboard")).Reload()
    assert [event.step for event in events.Scalars("loss")] == list(range(1, 13))
    log = (run / "run.log").read_text()
    assert log.count(f"in {run} were deleted or moved, and have been made again, with all") == 2
    assert log.startswith((whole / "run.log").read_text().splitlines()[0])


def delete_last_checkpoint(trainer):
    """Delete the checkpoints when the last one is complete."""
    if trainer.step == 11:
        finish = trainer.checkpointer.finish

        def finish_and_delete(*arguments, **keys):
            finish(*arguments, **keys)
            shutil.rmtree(trainer.checkpointer.root)

        trainer.checkpointer.finish = finish_and_delete


def test_a_checkpoint_that_is_gone_at_the_end_is_an_error(overrides, capsys, tmp_path):
    keys = overrides(checkpoint__every=6)
    assert main(keys, delete_last_checkpoint) == 2
    run = tmp_path / "run"
    assert f"the checkpoint of step 12 is gone from {run}/checkpoints" in capsys.readouterr().err
