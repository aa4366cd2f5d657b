"""A signal ends a run after a step, with a checkpoint, on all ranks together."""

import os
import signal
import sys
import time
from pathlib import Path

import pytest
from fault_runs import lines, log, losses, main, once, told
from program import Program, places

from megaframe.comm.place import Place
from megaframe.faults import leaving
from megaframe.faults.leaving import heeding_signals


@pytest.mark.quick(when=lambda number: number == signal.SIGTERM)
@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGUSR1, 138)])
def test_a_signal_to_one_rank_saves_on_all_and_the_run_goes_on_from_there(
    number, status, pool, overrides, tmp_path
):
    parallel = {"parallel__pipeline": 2, "checkpoint__every": 100}
    assert pool.run(2, main, overrides(run__dir=tmp_path / "whole", **parallel)) == [0, 0]
    keys = [*overrides(**parallel), "checkpoint.resume=latest"]
    assert pool.run(2, main, keys, told, 1, 4, number) == [status] * 2
    assert len(lines(tmp_path / "run")) == 6
    assert pool.run(2, main, keys) == [0, 0]
    assert losses(tmp_path / "run") == losses(tmp_path / "whole")


def test_a_signal_near_the_end_of_a_run_that_saves_nothing(pool, overrides, tmp_path):
    assert pool.run(1, main, overrides(), told, 0, 10) == [0]
    assert len(lines(tmp_path / "run")) == 12
    assert pool.run(1, main, overrides(run__dir=tmp_path / "other"), told, 0, 2) == [143]


@pytest.fixture
def heard():
    """Yield the signals that reach the handler set before `heeding_signals`."""
    found = []
    before = signal.signal(signal.SIGUSR1, lambda number, _: found.append(number))
    yield found
    signal.signal(signal.SIGUSR1, before)


def test_the_same_request_by_two_ways_is_one(heard, monkeypatch):
    """A signal that comes later is passed on to the earlier handler, whatever the run does."""
    place = Place()
    with heeding_signals(place):
        signal.raise_signal(signal.SIGUSR1)
        signal.raise_signal(signal.SIGUSR1)
        assert place.told == signal.SIGUSR1 and heard == []
        monkeypatch.setattr(leaving, "ECHO", 0.0)
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


def statuses(folder, deadline):
    """Wait until all ranks have ended, and return their statuses."""
    ranks = (folder / "ranks").read_text().split()
    while any(Path(f"/proc/{rank}").exists() for rank in ranks) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not any(Path(f"/proc/{rank}").exists() for rank in ranks)
    return [(folder / f"status-{number}").read_text() for number in range(len(ranks))]


@pytest.mark.quick(when=lambda names: names)
@pytest.mark.parametrize(("names", "status"), [({"TORCHELASTIC_RUN_ID": "1"}, "143"), ({}, "0")])
def test_a_rank_whose_launcher_is_killed_saves_and_ends(names, status, overrides, tmp_path):
    """A rank that a shell started, without a launcher's variables, continues."""
    steps = 10**6 if names else 40
    keys = overrides(train__steps=steps, checkpoint__every=10**6, checkpoint__resume="latest")
    launcher = Program(launch, tmp_path, [{}], words=keys, environment=names)
    metrics, deadline = Path(tmp_path / "run/metrics.jsonl"), time.monotonic() + 60
    while not metrics.exists() or metrics.read_text().count("\n") < 2:
        assert time.monotonic() < deadline and launcher.poll() is None
        time.sleep(0.02)
    launcher.kill()
    assert statuses(tmp_path, deadline) == [status]
    assert (metrics.read_text().count("\n") == steps) == (status == "0")
    assert (tmp_path / "run/checkpoints/latest").exists()


def end_launcher_and_break(trainer):
    """Kill the launcher and break the connections, so that ranks restart with another parent."""
    if once(trainer, 3):
        launcher = os.getppid()
        os.kill(launcher, signal.SIGKILL)
        while os.getppid() == launcher:
            time.sleep(0.001)
        trainer.mesh.connections.cut()


@pytest.mark.slow
def test_so_do_ranks_that_begin_again_without_the_launcher_that_started_them(overrides, tmp_path):
    keys = overrides(train__steps=12, parallel__pipeline=2, checkpoint__resume="latest")
    names = {"TORCHELASTIC_RUN_ID": "1"}
    arguments = tmp_path, [*places(2)], end_launcher_and_break
    launcher = Program(launch, *arguments, words=keys, environment=names)
    deadline = time.monotonic() + 60
    while launcher.poll() is None and time.monotonic() < deadline:
        time.sleep(0.02)
    assert statuses(tmp_path, deadline) == ["143"] * 2
    assert "restarted in the same processes" in log(tmp_path / "run")
    assert len(lines(tmp_path / "run")) < 12
