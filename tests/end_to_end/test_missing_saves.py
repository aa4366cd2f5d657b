"""A run whose checkpoints are missing is refused, so its records are not overwritten; a run that
never had any starts from scratch and keeps its earlier records."""

import shutil
import signal

import pytest
from entry_runs import read_lines, read_losses
from fault_runs import log, main, send_signal

KEYS = {"checkpoint__every": 4, "checkpoint__resume": "latest"}


def test_a_run_whose_checkpoints_are_gone_is_refused(pool, overrides, capsys, tmp_path):
    run, keys = tmp_path / "run", overrides(**KEYS)
    assert pool.run(2, main, keys) == [0, 0]
    (run / "checkpoints").rename(tmp_path / "away")
    before = (run / "metrics.jsonl").read_bytes()
    assert pool.run(2, main, keys) == [2, 2] and main(keys) == 2
    message = capsys.readouterr().err
    for word in (f"run.dir={run} ", "up to step 12", f"{run}/checkpoints:", "or delete"):
        assert word in message
    assert (run / "metrics.jsonl").read_bytes() == before
    (tmp_path / "away").rename(run / "checkpoints")
    assert pool.run(2, main, [*keys, "train.steps=13"]) == [0, 0]
    assert len(read_losses(run)) == 13
    shutil.rmtree(run)
    assert pool.run(2, main, keys) == [0, 0]


@pytest.mark.slow
def test_a_run_that_ended_before_its_first_checkpoint_begins_anew(pool, overrides, tmp_path):
    run, keys = tmp_path / "run", overrides(**{**KEYS, "checkpoint__every": 0})
    for ended in range(2):
        assert pool.run(2, main, keys, send_signal, 1, 4 + ended, signal.SIGTERM) == [143, 143]
    assert pool.run(2, main, overrides(**KEYS)) == [0, 0]
    assert len(read_losses(run)) == 12
    for number, steps in ((1, 6), (2, 7)):
        earlier_lines = (run / f"metrics.{number}.jsonl").read_text().splitlines()
        assert len(earlier_lines) == steps
        assert f"metrics.{number}.jsonl" in log(run)
    assert read_lines(run)[0]["step"] == 1


def test_an_earlier_start_may_have_left_an_empty_file(pool, overrides, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run/metrics.jsonl").write_text("")
    assert pool.run(1, main, overrides(**KEYS)) == [0]
    assert not (tmp_path / "run/metrics.1.jsonl").exists()
