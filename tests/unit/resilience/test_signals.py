"""A signal ends a run after a step, with a checkpoint, on all ranks together."""

import os
import shlex
import signal
import sys
import time
from pathlib import Path

import pytest
from bitwise import assert_same_losses
from entry_runs import read_lines, read_losses
from fault_runs import begins_once, log, main, send_signal
from patience import PATIENCE, count_lines, is_running, wait_until
from rank_process import RankProcess, hang_after, list_rank_environments
from slow_cases import slow

from megaframe.distributed import gloo_sockets
from megaframe.distributed.rank_progress import RankProgress
from megaframe.resilience import signals
from megaframe.resilience.signals import handle_signals, resume_command


@pytest.mark.parametrize(
    ("number", "status"),
    [(signal.SIGTERM, 143), slow(signal.SIGUSR1, 138), slow(signal.SIGINT, 130)],
)
def test_a_signal_to_one_rank_saves_on_all_and_the_run_goes_on_from_there(
    number, status, pool, overrides, tmp_path
):
    parallel = {"parallel__pipeline": 2, "checkpoint__every": 100}
    assert pool.run(2, main, overrides(run__dir=tmp_path / "whole", **parallel)) == [0, 0]
    keys = [*overrides(**parallel), "checkpoint.resume=latest"]
    assert pool.run(2, run_with_python_handler, keys, send_signal, 1, 4, number) == [status] * 2
    assert len(read_lines(tmp_path / "run")) == 6
    assert f"by {number.name} after step 6 of 12" in log(tmp_path / "run")
    assert pool.run(2, main, keys) == [0, 0]
    losses, whole = read_losses(tmp_path / "run"), read_losses(tmp_path / "whole")
    assert_same_losses(losses, whole, because="a checkpoint has every bit of the state")


def run_with_python_handler(*arguments):
    """Run `main` with Python's own reaction to SIGINT, which jobs in the background ignore."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        return main(*arguments)
    finally:
        signal.signal(signal.SIGINT, before)


def test_the_summary_says_how_a_run_that_was_cut_short_goes_on(pool, overrides, tmp_path):
    """The printed command continues the run, whatever the first one resumed from."""
    keys = overrides(checkpoint__every=100, run__dir=tmp_path / "a run")
    assert pool.run(1, run_with_python_handler, keys, send_signal, 0, 4, signal.SIGINT) == [130]
    (line,) = (entry for entry in log(tmp_path / "a run").splitlines() if "continue with" in entry)
    program, script, *words = shlex.split(line.partition("continue with")[2])
    assert Path(program).name.startswith("python") and script == "pretrain_gpt.py"
    assert pool.run(1, main, words) == [0]
    text = log(tmp_path / "a run")
    assert len(read_losses(tmp_path / "a run")) == 12 and text.count("cut short") == 1
    assert f"resumed from step 6 of {tmp_path}/a run/checkpoints/step-00000006" in text
    assert pool.run(1, run_with_python_handler, overrides(), send_signal, 0, 4, signal.SIGINT) == [
        130
    ]
    assert "nothing: checkpoint.every=0" in log(tmp_path / "run")


def test_the_command_names_the_launcher(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["pretrain_gpt.py", "checkpoint.resume=x", "run.dir=a b"])
    monkeypatch.setenv("WORLD_SIZE", "8")
    end = "pretrain_gpt.py 'run.dir=a b' checkpoint.resume=latest"
    assert resume_command() == f"8 ranks of: {sys.orig_argv[0]} {end}"
    for name, value in (("TORCHELASTIC_RUN_ID", "1"), ("LOCAL_WORLD_SIZE", "4")):
        monkeypatch.setenv(name, value)
    assert resume_command().endswith(f"/torchrun --nproc-per-node 4 {end}")
    monkeypatch.setenv("GROUP_WORLD_SIZE", "2")
    assert f" --nnodes 2 {end}" in resume_command()


def hang_with_python_handler():
    signal.signal(signal.SIGINT, signal.default_int_handler)
    hang_after(4)


def test_a_second_ctrl_c_ends_a_run_at_once_wherever_it_is(overrides, tmp_path):
    run = RankProcess(
        hang_with_python_handler, words=overrides(train__steps=6), errors=tmp_path / "errors"
    )
    try:
        wait_until(lambda: count_lines(tmp_path / "run/metrics.jsonl"), run)
        run.send_signal(signal.SIGINT)
        told = "interrupted: saving after this step"
        wait_until(lambda: told in (tmp_path / "errors").read_text(), run)
        run.send_signal(signal.SIGINT)
        assert run.wait(PATIENCE) == -signal.SIGINT
    finally:
        run.kill()


def test_a_signal_that_is_ignored_stays_ignored():
    """A shell lets jobs in the background ignore Ctrl-C, which is meant for the one in front."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with handle_signals(progress := RankProgress()):
            signal.raise_signal(signal.SIGINT)
            assert not progress.leave_signal
    finally:
        signal.signal(signal.SIGINT, before)


def test_ctrl_c_under_a_torchrun_comes_twice(monkeypatch):
    """From the terminal, and from torchrun, which forwards its own."""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with handle_signals(progress := RankProgress()):
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)
            assert progress.leave_signal == signal.SIGINT
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_signal_near_the_end_of_a_run_that_saves_nothing(pool, overrides, tmp_path):
    assert pool.run(1, main, overrides(), send_signal, 0, 10) == [0]
    assert len(read_lines(tmp_path / "run")) == 12
    assert pool.run(1, main, overrides(run__dir=tmp_path / "other"), send_signal, 0, 2) == [143]


@pytest.fixture
def heard():
    """Yield the signals that reach the handler set before `handle_signals`."""
    signals = []
    before = signal.signal(signal.SIGUSR1, lambda number, _: signals.append(number))
    yield signals
    signal.signal(signal.SIGUSR1, before)


def test_the_same_request_by_two_ways_is_one(heard, monkeypatch):
    """A signal that comes later is passed on to the earlier handler, whatever the run does."""
    progress = RankProgress()
    with handle_signals(progress):
        signal.raise_signal(signal.SIGUSR1)
        signal.raise_signal(signal.SIGUSR1)
        assert progress.leave_signal == signal.SIGUSR1 and heard == []
        monkeypatch.setattr(signals, "REPEAT_SECONDS", 0.0)
        signal.raise_signal(signal.SIGUSR1)
        assert heard == [signal.SIGUSR1]


def launch(folder, environments, fault=None):
    """Fork a rank per environment, the first with the fault; write process ids and statuses."""
    ranks = []
    for number, environment in enumerate(environments):
        ranks.append(os.fork())
        if not ranks[-1]:
            os.environ.update(environment)
            (folder / f"status-{number}").write_text(str(main(sys.argv[1:], fault, 0)))
            os._exit(0)
    (folder / "ranks").write_text(" ".join(map(str, ranks)))
    for rank in ranks:
        os.waitpid(rank, 0)


def wait_for_statuses(folder):
    """Wait until all ranks have ended, and return their statuses."""
    ranks = (folder / "ranks").read_text().split()
    wait_until(lambda: not any(map(is_running, ranks)))
    return [(folder / f"status-{number}").read_text() for number in range(len(ranks))]


@pytest.mark.parametrize(
    ("names", "status"), [({"TORCHELASTIC_RUN_ID": "1"}, "143"), slow({}, "0")]
)
def test_a_rank_whose_launcher_is_killed_saves_and_ends(names, status, overrides, tmp_path):
    """A rank that a shell started, without a launcher's variables, continues."""
    steps = 10**6 if names else 40
    keys = overrides(train__steps=steps, checkpoint__every=10**6, checkpoint__resume="latest")
    launcher = RankProcess(launch, tmp_path, [{}], words=keys, environment=names)
    metrics = tmp_path / "run/metrics.jsonl"
    wait_until(lambda: count_lines(metrics) >= 2, launcher)
    launcher.kill()
    assert wait_for_statuses(tmp_path) == [status]
    assert (count_lines(metrics) == steps) == (status == "0")
    assert (tmp_path / "run/checkpoints/latest").exists()


def end_launcher_and_break(trainer):
    """Kill the launcher and break the connections, so that ranks restart with another parent."""
    if begins_once(trainer, 3):
        launcher = os.getppid()
        os.kill(launcher, signal.SIGKILL)
        while os.getppid() == launcher:
            time.sleep(0.001)
        gloo_sockets.shut_down_sockets()


@pytest.mark.slow
def test_ranks_that_begin_again_without_their_launcher_save_and_end(overrides, tmp_path):
    keys = overrides(train__steps=12, parallel__pipeline=2, checkpoint__resume="latest")
    names = {"TORCHELASTIC_RUN_ID": "1"}
    arguments = tmp_path, [*list_rank_environments(2)], end_launcher_and_break
    launcher = RankProcess(launch, *arguments, words=keys, environment=names)
    wait_until(lambda: launcher.poll() is not None)
    assert wait_for_statuses(tmp_path) == ["143"] * 2
    assert "restarted in the same processes" in log(tmp_path / "run")
    assert len(read_lines(tmp_path / "run")) < 12
