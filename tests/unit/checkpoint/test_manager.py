"""Saves that run beside training: they hold the state of their step, however long the copy takes,
and a failed one does not end the run.
"""

import itertools
import re
import resource
import shutil
import threading
import time

import pytest
from bitwise import assert_bitwise_equal
from checkpoint_helpers import load_all
from entry_runs import make_trainer

from megaframe.checkpoint import CheckpointWriter
from megaframe.checkpoint.background import BackgroundCopier
from megaframe.config import load

KEYS = {
    "train__steps": 4,
    "train__microbatch": 1,
    "checkpoint__every": 1,
    "checkpoint__keep": 9,
    "optim__lr": 0.1,
    "parallel__zero": 2,
    "metrics__every": 1,
}


def train(keys, seconds=0.0, after=None):
    """Run training with copies that take `seconds` longer. after: called with the trainer after
    each step."""
    trainer = make_trainer(load(None, keys))
    step, copy = trainer._train_step, BackgroundCopier._copy

    def train_step():
        step()
        if after is not None:
            after(trainer)

    def slow(background, *arguments):
        time.sleep(seconds)
        copy(background, *arguments)

    trainer._train_step = train_step
    BackgroundCopier._copy = slow
    try:
        trainer.run()
    finally:
        BackgroundCopier._copy = copy
        trainer.mesh.close()


@pytest.mark.slow
def test_the_update_waits_for_a_copy_that_takes_longer_than_a_step(pool, overrides, tmp_path):
    for name, extra, seconds in (
        ("serial", {"parallel__serial": True}, 0.0),
        ("slow", {}, 0.2),
        ("sent later", {"parallel__compress": "int8"}, 0.2),
        ("sent later, serial", {"parallel__compress": "int8", "parallel__serial": True}, 0.0),
    ):
        pool.run(2, train, overrides(**KEYS, **extra, run__dir=tmp_path / name), seconds)
    for first, other in (("serial", "slow"), ("sent later, serial", "sent later")):
        for step in range(1, 5):
            expected, actual = (
                load_all(tmp_path / name / f"checkpoints/step-{step:08d}")
                for name in (first, other)
            )
            assert [*expected] == [*actual]
            why = f"step {step} is copied before the next step changes it"
            assert_bitwise_equal(actual.values(), expected.values(), because=why)
    assert "unsent" in " ".join(actual)


def fill_disk(trainer):
    """Limit the size of files so that the save of step 2 fails, and lift the limit after it."""
    hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    if trainer.step == 2:
        trainer.checkpointer._writer._thread.join()  # the save of step 1
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, hard))
    if trainer.step == 3:
        trainer.checkpointer._writer._thread.join()
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))


def test_a_save_that_fails_is_said_and_the_run_goes_on(pool, overrides, tmp_path):
    pool.run(1, train, overrides(**KEYS), 0.0, fill_disk)
    log = (tmp_path / "run/run.log").read_text()
    assert log.count("warning: ") == 1 and "checkpoint of step 2" in log and "run continues" in log
    saved = sorted(path.name for path in (tmp_path / "run/checkpoints").glob("step-*"))
    assert saved == [f"step-{step:08d}" for step in (1, 3, 4)]


def delete_home(trainer):
    """Delete the folder of checkpoints between two saves."""
    if trainer.step == 3:
        trainer.checkpointer._writer.wait()
        shutil.rmtree(trainer.checkpointer.root)


def test_a_folder_that_was_deleted_is_made_again_by_the_next_save(pool, overrides, tmp_path):
    pool.run(1, train, overrides(**KEYS), 0.0, delete_home)
    assert "warning: " not in (tmp_path / "run/run.log").read_text()
    saved = sorted(path.name for path in (tmp_path / "run/checkpoints").iterdir())
    assert saved == ["latest", "step-00000003", "step-00000004"]


def delete_again_and_again(trainer):
    """Delete the folder all the time, also during saves, until the last step."""
    if trainer.step == 1:
        trainer.over = threading.Event()

        def delete():
            while not trainer.over.wait(0.002):
                shutil.rmtree(trainer.checkpointer.root, ignore_errors=True)

        trainer.deleting = threading.Thread(target=delete)
        trainer.deleting.start()
    if trainer.step == 10:
        trainer.over.set()
        trainer.deleting.join()
        trainer.checkpointer.wait_for_saves(trainer.metrics.note)


def test_a_folder_that_is_deleted_during_saves_does_not_end_the_run(pool, overrides, tmp_path):
    keys = {**KEYS, "train__steps": 10, "checkpoint__keep": 1}
    pool.run(2, train, overrides(**keys), 0.0, delete_again_and_again)
    saved = sorted(path.name for path in (tmp_path / "run/checkpoints").iterdir())
    assert saved == ["latest", "step-00000010"]
    assert len(load_all(tmp_path / "run/checkpoints/step-00000010")) > 9


def delay_save(trainer):
    """Let the first save begin only after the second one has waited for it for over a second."""
    if trainer.step > 1:
        return
    lead, wait, waits = CheckpointWriter._lead_save, CheckpointWriter.wait, threading.Event()
    waited = itertools.count()

    def wait_and_tell(writer):
        if next(waited):  # the first save has nothing to wait for
            CheckpointWriter.wait = wait
            waits.set()
        wait(writer)

    def lead_late(*arguments):
        CheckpointWriter._lead_save = lead
        waits.wait()
        time.sleep(1.1)
        lead(*arguments)

    CheckpointWriter._lead_save, CheckpointWriter.wait = lead_late, wait_and_tell


def test_waiting_for_the_save_before_is_said_and_in_the_metrics(pool, overrides, tmp_path):
    keys = overrides(**{**KEYS, "train__steps": 2})
    pool.run(1, train, keys, 0.0, delay_save)
    log = (tmp_path / "run/run.log").read_text()
    assert re.search(r"step 2 waited [1-9]", log) and "checkpoint.every=1 saves more often" in log
