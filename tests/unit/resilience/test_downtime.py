"""Lost time by cause, across the starts of a run."""

import json
import os

import pytest

from megaframe.io.output_files import OutputFiles
from megaframe.resilience.downtime import CAUSES, LEDGER_FILE, DowntimeLedger
from megaframe.resilience.stragglers import KINDS, SlowRank, find_slow_ranks


class SettableClock:
    now = 1000.0

    def __call__(self):
        return self.now


def test_each_second_has_a_cause(tmp_path):
    clock = SettableClock()
    ledger = DowntimeLedger(tmp_path, OutputFiles(tmp_path), clock)
    clock.now += 2
    ledger.record_start(0)
    metrics = tmp_path / "metrics.jsonl"
    for step in range(1, 11):
        clock.now += 1
        lost = ledger.record_step(step, 0.25 if step == 6 else 0.0)
        assert lost["load"] == (2 if step == 1 else 0) and lost["save"] == (step == 6) * 0.25
        with metrics.open("a") as file:
            file.write(json.dumps({"step": step}) + "\n")
    os.utime(metrics, (clock.now, clock.now))
    clock.now += 30  # it hangs until it is ended
    with (tmp_path / "faults/ended.jsonl").open("w") as file:
        file.write(json.dumps({"at": clock.now, "text": "stuck"}) + "\n")
    clock.now += 15
    resumed = DowntimeLedger(tmp_path, OutputFiles(tmp_path), clock)
    clock.now += 3
    resumed.record_start(5)
    clock.now += 1
    first = resumed.record_step(6, 0.0)
    assert first == pytest.approx(
        {"detection": 30, "restart": 15, "load": 3, "repeat": 1, "save": 0}
    )
    for step in range(7, 13):
        clock.now += 1
        assert resumed.record_step(step, 0.0)["repeat"] == (step <= 10)
    total = 2 + 10 + 30 + 15 + 3 + 7
    assert resumed.summarize().startswith(
        f"effective time {1 - (2 + 0.25 + 48 + 5) / total:.1%} of"
    )
    assert all(cause in resumed.summarize() for cause in CAUSES)


def test_a_new_run_forgets_and_torn_lines_do_no_harm(tmp_path):
    clock = SettableClock()
    DowntimeLedger(tmp_path, OutputFiles(tmp_path), clock).record_start(0)
    (tmp_path / "metrics.jsonl").write_text('{"step": 3}\n{"st')
    with (tmp_path / "faults" / LEDGER_FILE).open("a") as file:
        file.write('{"seconds": ')
    ledger = DowntimeLedger(tmp_path, OutputFiles(tmp_path), clock)
    ledger.record_start(0)
    clock.now += 1
    assert ledger.record_step(3, 0.0)["repeat"] == 1
    (tmp_path / "metrics.jsonl").unlink()
    ledger = DowntimeLedger(tmp_path, OutputFiles(tmp_path), clock)
    ledger.record_start(0)
    assert ledger.record_step(1, 0.0) == dict.fromkeys(CAUSES, 0)


def test_an_outlier_is_one_among_those_that_do_the_same():
    times = {rank: [0.1] * len(KINDS) for rank in range(4)}
    times[2] = [0.1, 0.5, 0.1, 0.1, 0.1]
    assert list(find_slow_ranks(times, 2.0)) == [SlowRank(2, KINDS[1], 0.5, 0.1)]
    assert not list(find_slow_ranks({0: [9.0] * len(KINDS)}, 2.0))
    tiny = {0: [1e-6] * len(KINDS), 1: [9e-4] * len(KINDS)}
    assert not list(find_slow_ranks(tiny, 2.0))
