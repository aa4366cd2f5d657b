"""Two runs never write the same folder; killed runs, restarts and readers are not in the way."""

import signal
import time

import pytest
from bitwise import assert_same_losses
from entry_runs import read_losses
from fault_runs import log, main
from patience import PATIENCE, count_lines, wait_until
from rank_process import RankProcess, hang_after, list_rank_environments

from megaframe.checkpoint import open_checkpoint
from megaframe.checkpoint.folder import locate_checkpoint
from megaframe.checkpoint.stores.store import LOCK

SAVES = {"checkpoint__every": 1, "checkpoint__resume": "latest"}


def wait_for_step(folder, step, *runs):
    wait_until(lambda: count_lines(folder / "metrics.jsonl") >= step, *runs)


def read_refusal(overrides, tmp_path, **changes):
    """Return the message of a run that is refused, on two ranks that end alike, however late the
    second one, whose store is the first one's, comes to read it."""
    ranks = [
        RankProcess(
            [run_entry, run_entry_late][rank],
            words=overrides(**changes),
            environment=environment,
            errors=tmp_path / f"errors-{rank}",
        )
        for rank, environment in enumerate(list_rank_environments(2))
    ]
    try:
        assert [rank.wait(PATIENCE) for rank in ranks] == [2, 2]
    finally:
        for rank in ranks:
            rank.kill()
    return (tmp_path / "errors-0").read_text()


def run_entry():
    import pretrain_gpt

    pretrain_gpt.main()


def run_entry_late():
    """Reads a second after the others whether a run has the lock."""
    from megaframe.training import restart

    wait_for_all = restart.barrier

    def barrier(group):
        wait_for_all(group)
        time.sleep(1)

    restart.barrier = barrier
    run_entry()


def test_a_second_run_is_refused_until_the_first_is_dead(pool, overrides, tmp_path):
    run = tmp_path / "run"
    pool.run(1, main, overrides(run__dir=tmp_path / "whole", **SAVES))
    first = RankProcess(hang_after, 4, words=overrides(**SAVES))
    try:
        wait_for_step(run, 3, first)
        records = [run / name for name in ("metrics.jsonl", "config.yaml", "run.log")]
        before = [path.read_bytes() for path in records]
        name = f"is in use by another run: process {first._process.pid} on host"
        assert f"run.dir={run} {name}" in read_refusal(overrides, tmp_path, **SAVES)
        other = {"run__dir": tmp_path / "other", "checkpoint__folder": run / "checkpoints"}
        assert f"checkpoint.folder={run}/checkpoints {name}" in read_refusal(
            overrides, tmp_path, **SAVES, **other
        )
        assert not (tmp_path / "other").exists()
        assert [path.read_bytes() for path in records] == before
        with open_checkpoint(
            locate_checkpoint(run, "--checkpoint")
        ) as checkpoint:  # readers need no lock
            assert checkpoint.step >= 3
    finally:
        first.kill()
    assert pool.run(1, main, overrides(**SAVES)) == [0]
    line = f"took over run.dir={run} and checkpoint.folder={run}/checkpoints from process"
    assert log(run).count(line) == 1
    losses, whole = read_losses(run), read_losses(tmp_path / "whole")
    assert_same_losses(losses, whole, because="a checkpoint has every bit of the state")
    assert not list(run.rglob(LOCK))


@pytest.mark.slow
def test_a_rank_that_leaves_because_another_is_lost_unlocks_its_folders(overrides, tmp_path):
    """Otherwise a first rank on another host would wait for the end of a lease."""
    keys = overrides(checkpoint__every=10**6, train__steps=10**6)
    ranks = [
        RankProcess(run_entry, words=keys, environment=environment)
        for environment in list_rank_environments(2)
    ]
    try:
        wait_for_step(tmp_path / "run", 3, *ranks)
        assert (tmp_path / "run" / LOCK).exists()
        ranks[1].send_signal(signal.SIGKILL)
        assert ranks[0].wait(PATIENCE) == 3
    finally:
        for rank in ranks:
            rank.kill()
    assert not list((tmp_path / "run").rglob(LOCK))


def lose_lock(trainer, step):
    """Let another process have the folder, as if this one had been suspended for a minute."""
    if trainer.step == step:
        trainer._lock._lost_message = "run.dir=... was taken over"


def test_a_run_that_was_taken_over_ends_without_a_save(pool, overrides, tmp_path):
    keys = overrides(**{**SAVES, "checkpoint__every": 2})
    assert pool.run(1, main, keys, lose_lock, None, 3) == [2]
    assert not (tmp_path / "run/checkpoints/step-00000004").exists()


@pytest.mark.slow
def test_two_runs_at_the_same_time_are_one(overrides, tmp_path):
    for number in range(2):
        keys = overrides(run__dir=tmp_path / str(number), checkpoint__every=4, train__steps=40)
        runs = [RankProcess(run_entry, words=keys) for _ in range(4)]
        try:
            assert sorted(run.wait(PATIENCE) for run in runs) == [0, 2, 2, 2]
        finally:
            for run in runs:
                run.kill()
        assert len(read_losses(tmp_path / str(number))) == 40
