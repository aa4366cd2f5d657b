"""A signal ends a run after a step, with a checkpoint, on all ranks at once."""

import signal

import pytest
from fault_runs import lines, losses, main, told

from megaframe.comm.place import Place
from megaframe.faults import leaving
from megaframe.faults.leaving import heeding_signals


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
    """Signals that came to whom they would come without `heeding_signals`."""
    found = []
    before = signal.signal(signal.SIGUSR1, lambda number, _: found.append(number))
    yield found
    signal.signal(signal.SIGUSR1, before)


def test_the_same_request_by_two_ways_is_one(heard, monkeypatch):
    """And another one later is not held back, whatever the run does."""
    place = Place()
    with heeding_signals(place):
        signal.raise_signal(signal.SIGUSR1)
        signal.raise_signal(signal.SIGUSR1)
        assert place.told == signal.SIGUSR1 and heard == []
        monkeypatch.setattr(leaving, "ECHO", 0.0)
        signal.raise_signal(signal.SIGUSR1)
        assert heard == [signal.SIGUSR1]
